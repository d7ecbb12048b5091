"""`python -m ...training.initialize_store --logging.logdir=DIR --logging.spec=FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.compat.datamodels._command_line import Flag, collect, run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAGS = (Flag("logging.logdir", required=True), Flag("logging.spec", required=True))


def main(arguments: Sequence[str]) -> None:
    """Create the empty arrays of a spec in an existing folder."""
    from gradkeep.compat.datamodels._npy_folder import NpyFolder
    from gradkeep.datamodels._spec import Spec

    settings = collect(FLAGS, arguments)
    folder = NpyFolder.create(settings["logging.logdir"], Spec.read(settings["logging.spec"]))
    print(f"{folder.path}: room for {folder.spec.num_models} models")


if __name__ == "__main__":
    run_command(main)
