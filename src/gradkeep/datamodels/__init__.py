"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell."""

from gradkeep.datamodels._contract import MODELS, Status, initialize, models_of, status, work
from gradkeep.datamodels._correlation import Correlation, correlation
from gradkeep.datamodels._counts import Counts
from gradkeep.datamodels._draw import draw_masks
from gradkeep.datamodels._exchange import (
    Published,
    export_folder,
    import_folder,
    import_published,
    load_weights,
    open_published,
    save_weights,
)
from gradkeep.datamodels._fit import fit
from gradkeep.datamodels._invalid import DatamodelsError
from gradkeep.datamodels._main_job import MainJob
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._npy_folder import NpyFolder, load_memmap
from gradkeep.datamodels._outputs import Output, confidences, correct, losses, margins, output
from gradkeep.datamodels._planted import Planted, planted
from gradkeep.datamodels._result import Datamodels
from gradkeep.datamodels._saved import load
from gradkeep.datamodels._spec import COMPLETED, Spec
from gradkeep.datamodels._study import Study
from gradkeep.datamodels._training import Training

__all__ = [
    "COMPLETED",
    "MODELS",
    "Correlation",
    "Counts",
    "Datamodels",
    "DatamodelsError",
    "MainJob",
    "Masks",
    "NpyFolder",
    "Output",
    "Planted",
    "Published",
    "Spec",
    "Status",
    "Study",
    "Training",
    "confidences",
    "correct",
    "correlation",
    "draw_masks",
    "export_folder",
    "fit",
    "import_folder",
    "import_published",
    "initialize",
    "load",
    "load_memmap",
    "load_weights",
    "losses",
    "margins",
    "models_of",
    "open_published",
    "output",
    "planted",
    "save_weights",
    "status",
    "work",
]
