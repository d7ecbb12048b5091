"""The `gradkeep` command; everything else is loaded when it is needed."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process."""
    import sys

    try:
        from gradkeep._environment import forget_stored_folders

        forget_stored_folders()
        from gradkeep.cli._app import run

        run(sys.argv[1:])
    except KeyboardInterrupt:  # it came while we still load
        sys.exit(130)
