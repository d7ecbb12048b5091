"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell."""

from gradkeep.datamodels._compared import Comparison, compare
from gradkeep.datamodels._components import Clusters, Components, clusters, components
from gradkeep.datamodels._contract import MODELS, Status, initialize, models_of, status, work
from gradkeep.datamodels._correlation import Correlation, correlation
from gradkeep.datamodels._counts import Counts
from gradkeep.datamodels._curve import LearningCurve, learning_curve
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
from gradkeep.datamodels._groups import Groups, by_group
from gradkeep.datamodels._main_job import MainJob, load_main
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._memorised import Memorisation, memorisation
from gradkeep.datamodels._near import (
    Neighbours,
    Pairs,
    leakage,
    near_duplicates,
    neighbours,
    similarity,
)
from gradkeep.datamodels._npy_folder import NpyFolder, load_memmap
from gradkeep.datamodels._one_row import train_row
from gradkeep.datamodels._outputs import Output, confidences, correct, losses, margins, output
from gradkeep.datamodels._planted import Planted, planted
from gradkeep.datamodels._regression_file import RegressionData, collect, compute
from gradkeep.datamodels._removal import (
    Counterfactual,
    Support,
    Verified,
    counterfactual,
    data_support,
    verify_removals,
)
from gradkeep.datamodels._result import Datamodels
from gradkeep.datamodels._saved import load
from gradkeep.datamodels._spec import COMPLETED, Spec
from gradkeep.datamodels._study import Study
from gradkeep.datamodels._top import Top, top
from gradkeep.datamodels._training import Training
from gradkeep.datamodels._values import Values, values
from gradkeep.errors import DatamodelsError

__all__ = [
    "COMPLETED",
    "MODELS",
    "Clusters",
    "Comparison",
    "Components",
    "Correlation",
    "Counterfactual",
    "Counts",
    "Datamodels",
    "DatamodelsError",
    "Groups",
    "LearningCurve",
    "MainJob",
    "Masks",
    "Memorisation",
    "Neighbours",
    "NpyFolder",
    "Output",
    "Pairs",
    "Planted",
    "Published",
    "RegressionData",
    "Spec",
    "Status",
    "Study",
    "Support",
    "Top",
    "Training",
    "Values",
    "Verified",
    "by_group",
    "clusters",
    "collect",
    "compare",
    "components",
    "compute",
    "confidences",
    "correct",
    "correlation",
    "counterfactual",
    "data_support",
    "draw_masks",
    "export_folder",
    "fit",
    "import_folder",
    "import_published",
    "initialize",
    "leakage",
    "learning_curve",
    "load",
    "load_main",
    "load_memmap",
    "load_weights",
    "losses",
    "margins",
    "memorisation",
    "models_of",
    "near_duplicates",
    "neighbours",
    "open_published",
    "output",
    "planted",
    "save_weights",
    "similarity",
    "status",
    "top",
    "train_row",
    "values",
    "verify_removals",
    "work",
]
