"""Attribution: scores of training rows for queries, from captures."""

from gradkeep._attribute._attribute import attribute
from gradkeep._attribute._method import Method
from gradkeep._attribute._named import methods
from gradkeep._attribute._scores import Ranked, Scores

__all__ = ["Method", "Ranked", "Scores", "attribute", "methods"]
