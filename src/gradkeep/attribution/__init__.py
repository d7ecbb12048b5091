"""Attribution: scores of training rows for queries, from captures."""

from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._ensemble import combine
from gradkeep.attribution._method import Method
from gradkeep.attribution._named import methods
from gradkeep.attribution._projections import Projection, project
from gradkeep.attribution._scores import Ranked, Scores
from gradkeep.attribution._suspects import Suspects, suspects

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
