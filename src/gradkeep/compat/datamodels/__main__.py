"""`python -m gradkeep.compat.datamodels MODULE ...`: run a module that imports `datamodels`.

The original package need not be installed: this one is imported in its place, as in workers.
"""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING

from gradkeep.compat.datamodels import OLD_NAME
from gradkeep.compat.datamodels._command_line import run_command
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Run the module named first with the remaining arguments."""
    from gradkeep.datamodels._contract import offer_aliases

    if not arguments or arguments[0].startswith("-"):
        raise DatamodelsError(
            "there is no module to run",
            code="compat.no_module",
            expected="python -m gradkeep.compat.datamodels MODULE ...",
            fix="Name a module that imports datamodels, such as examples.minimal.check.",
        )
    offer_aliases(OLD_NAME)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_command(main)
