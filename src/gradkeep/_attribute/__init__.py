"""Attribution: scores of training rows for queries, from captures."""

from gradkeep._attribute._attribute import attribute
from gradkeep._attribute._ensemble import combine
from gradkeep._attribute._method import Method
from gradkeep._attribute._named import methods
from gradkeep._attribute._projections import Projection, project
from gradkeep._attribute._scores import Ranked, Scores
from gradkeep._attribute._suspects import Suspects, suspects

__all__ = [
    "Method",
    "Projection",
    "Ranked",
    "Scores",
    "Suspects",
    "attribute",
    "combine",
    "methods",
    "project",
    "suspects",
]
