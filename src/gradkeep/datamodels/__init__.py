"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell."""

from gradkeep.datamodels._correlation import Correlation, correlation
from gradkeep.datamodels._counts import Counts
from gradkeep.datamodels._fit import fit
from gradkeep.datamodels._invalid import DatamodelsError
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._planted import Planted, planted
from gradkeep.datamodels._result import Datamodels
from gradkeep.datamodels._saved import load

__all__ = [
    "Correlation",
    "Counts",
    "Datamodels",
    "DatamodelsError",
    "Masks",
    "Planted",
    "correlation",
    "fit",
    "load",
    "planted",
]
