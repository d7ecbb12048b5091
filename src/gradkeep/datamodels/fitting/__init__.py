"""From masks and outputs to datamodels: exact counts, a path of penalties, the fitted weights.

What users call is in `gradkeep.datamodels`; here is what fits are made of.
"""

from gradkeep.datamodels.fitting._counts import Counts
from gradkeep.datamodels.fitting._options import FitOptions
from gradkeep.datamodels.fitting._path import PenaltyStep
from gradkeep.datamodels.fitting._result import open_store

__all__ = ["Counts", "FitOptions", "PenaltyStep", "open_store"]
