"""The older name of `training.initialize_store`."""

from gradkeep.compat.datamodels._command_line import run_command
from gradkeep.compat.datamodels.training.initialize_store import main

if __name__ == "__main__":
    run_command(main)
