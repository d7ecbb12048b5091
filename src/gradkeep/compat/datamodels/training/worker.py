"""`python -m ...training.worker --worker.index=I --worker.main_import=MODULE --worker.logdir=DIR`."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from gradkeep.compat.datamodels._command_line import (
    Flag,
    collect,
    collect_for_script,
    run_command,
    tolerate_other_flags,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAGS = (
    Flag("worker.index", int, required=True),
    Flag("worker.main_import", required=True),
    Flag("worker.logdir", required=True),
    Flag("worker.do_if_complete", switch=True),
    Flag("worker.job_timeout", float, default=math.inf),
)


def main(arguments: Sequence[str]) -> None:
    """Train the model of one row; other flags are left in `sys.argv` for the script."""
    from gradkeep.compat.datamodels import OLD_NAME
    from gradkeep.compat.datamodels._npy_folder import NpyFolder, train_row
    from gradkeep.datamodels._contract import load_main, offer_aliases

    settings = collect(FLAGS, arguments)
    folder = NpyFolder.open(settings["worker.logdir"])
    index = settings["worker.index"]
    folder.check_index(index)
    offer_aliases(OLD_NAME)
    tolerate_other_flags()
    function = load_main(settings["worker.main_import"])
    collect_for_script()
    trained = train_row(
        folder,
        function,
        index,
        redo=settings["worker.do_if_complete"],
        timeout=settings["worker.job_timeout"],
        command=sys.argv,
    )
    print(f"model {index}: done" if trained else f"model {index}: already done")


if __name__ == "__main__":
    run_command(main)
