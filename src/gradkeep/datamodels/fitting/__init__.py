"""From masks and outputs to datamodels: exact counts, a path of penalties, the fitted weights."""

from gradkeep.datamodels.fitting._correlation import Correlation, correlation
from gradkeep.datamodels.fitting._counts import Counts
from gradkeep.datamodels.fitting._fit import fit
from gradkeep.datamodels.fitting._masks import Masks, draw_masks
from gradkeep.datamodels.fitting._options import FitOptions
from gradkeep.datamodels.fitting._planted import PlantedData, planted
from gradkeep.datamodels.fitting._result import Datamodels, load, open_store

__all__ = [
    "Correlation",
    "Counts",
    "Datamodels",
    "FitOptions",
    "Masks",
    "PlantedData",
    "correlation",
    "draw_masks",
    "fit",
    "load",
    "open_store",
    "planted",
]
