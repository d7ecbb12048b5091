"""Attribution: scores of training rows for queries, from captures."""

from gradkeep._attribute._attribute import attribute
from gradkeep._attribute._methods import Method, methods
from gradkeep._attribute._scores import Ranked, Scores

__all__ = ["Method", "Ranked", "Scores", "attribute", "methods"]
