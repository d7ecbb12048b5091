"""The older name of `training.worker`."""

from gradkeep.compat.datamodels._command_line import run_command
from gradkeep.compat.datamodels.training.worker import main

if __name__ == "__main__":
    run_command(main)
