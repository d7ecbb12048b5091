"""The older name of `training.worker`."""

from gradkeep.compat.datamodels._flags import end
from gradkeep.compat.datamodels.training.worker import main

if __name__ == "__main__":
    end(main)
