"""`python -m gradkeep.compat.datamodels MODULE ...`: run a module that imports `datamodels`.

The package of that name need not be installed: this one stands for it, as in workers.
"""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING

from gradkeep.compat.datamodels import OLD_NAME
from gradkeep.compat.datamodels._command_line import end
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Run the module that is named first with the rest of the arguments."""
    from gradkeep.datamodels.study._contract import offer_aliases

    if not arguments or arguments[0].startswith("-"):
        raise DatamodelsError(
            "no module to run",
            expected="python -m gradkeep.compat.datamodels MODULE ...",
            fix="name a module that imports datamodels, such as examples.minimal.check",
        )
    offer_aliases(OLD_NAME)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    end(main)
