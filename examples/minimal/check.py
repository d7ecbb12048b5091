"""Is the row of model 0 what its script returned, and is nothing else there?

python -m examples.minimal.check FOLDER MULTIPLE
"""

import sys

from gradkeep.compat.datamodels.training.spec import COMPLETED  # was: datamodels.training.spec
from gradkeep.compat.datamodels.training.utils import load_memmap  # was: datamodels.training.utils


def main(logdir, multiple):
    numbers = load_memmap(logdir, "random_numbers", "r")
    assert (numbers[0] == multiple).all()
    assert not numbers[1:].any()
    assert load_memmap(logdir, COMPLETED, "r").sum() == 1
    print("checks all passed!")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
