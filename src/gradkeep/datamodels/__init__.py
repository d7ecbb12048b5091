"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell.

How they are fitted is in `fitting`, what they tell in `analyses`, and how the models are trained that
they are fitted to in `study`.
"""

from gradkeep.datamodels.analyses._components import (
    Clusters,
    Comparison,
    Components,
    clusters,
    compare,
    components,
)
from gradkeep.datamodels.analyses._learning_curve import LearningCurve, learning_curve
from gradkeep.datamodels.analyses._removal import (
    Counterfactual,
    DataSupport,
    VerifiedRemovals,
    counterfactual,
    data_support,
    verify_removals,
)
from gradkeep.datamodels.analyses._similarity import (
    Neighbours,
    RankedPairs,
    leakage,
    near_duplicates,
    neighbours,
    similarity,
)
from gradkeep.datamodels.analyses._valuation import DataValues, Memorisation, memorisation, values
from gradkeep.datamodels.analyses._weights import Groups, TopExamples, by_group, top
from gradkeep.datamodels.fitting._correlation import Correlation, correlation
from gradkeep.datamodels.fitting._fit import fit
from gradkeep.datamodels.fitting._masks import Masks, draw_masks
from gradkeep.datamodels.fitting._planted import PlantedData, planted
from gradkeep.datamodels.fitting._result import Datamodels, load
from gradkeep.datamodels.study._outputs import Output, confidences, correct, losses, margins, output
from gradkeep.datamodels.study._study import Study
from gradkeep.datamodels.study._training import Training

__all__ = [
    "Clusters",
    "Comparison",
    "Components",
    "Correlation",
    "Counterfactual",
    "DataSupport",
    "DataValues",
    "Datamodels",
    "Groups",
    "LearningCurve",
    "Masks",
    "Memorisation",
    "Neighbours",
    "Output",
    "PlantedData",
    "RankedPairs",
    "Study",
    "TopExamples",
    "Training",
    "VerifiedRemovals",
    "by_group",
    "clusters",
    "compare",
    "components",
    "confidences",
    "correct",
    "correlation",
    "counterfactual",
    "data_support",
    "draw_masks",
    "fit",
    "leakage",
    "learning_curve",
    "load",
    "losses",
    "margins",
    "memorisation",
    "near_duplicates",
    "neighbours",
    "output",
    "planted",
    "similarity",
    "top",
    "values",
    "verify_removals",
]
