"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell.

How they are fitted is in `fitting`, what they tell in `analyses`, and how the models are trained that
they are fitted to in `study`.
"""

from gradkeep.datamodels.analyses._removal import Counterfactual as Counterfactual
from gradkeep.datamodels.analyses._removal import DataSupport as DataSupport
from gradkeep.datamodels.analyses._removal import VerifiedRemovals as VerifiedRemovals
from gradkeep.datamodels.analyses._removal import counterfactual, data_support, verify_removals
from gradkeep.datamodels.analyses._similarity import Clusters as Clusters
from gradkeep.datamodels.analyses._similarity import Comparison as Comparison
from gradkeep.datamodels.analyses._similarity import Components as Components
from gradkeep.datamodels.analyses._similarity import Neighbors as Neighbors
from gradkeep.datamodels.analyses._similarity import RankedPairs as RankedPairs
from gradkeep.datamodels.analyses._similarity import (
    clusters,
    compare,
    components,
    leakage,
    near_duplicates,
    neighbors,
    similarity,
)
from gradkeep.datamodels.analyses._valuation import DataValues as DataValues
from gradkeep.datamodels.analyses._valuation import Memorization as Memorization
from gradkeep.datamodels.analyses._valuation import memorization, values
from gradkeep.datamodels.analyses._weights import Groups as Groups
from gradkeep.datamodels.analyses._weights import LearningCurve as LearningCurve
from gradkeep.datamodels.analyses._weights import TopExamples as TopExamples
from gradkeep.datamodels.analyses._weights import by_group, learning_curve, top
from gradkeep.datamodels.fitting._correlation import Correlation as Correlation
from gradkeep.datamodels.fitting._correlation import correlation
from gradkeep.datamodels.fitting._fit import fit
from gradkeep.datamodels.fitting._masks import Masks, planted
from gradkeep.datamodels.fitting._masks import PlantedData as PlantedData
from gradkeep.datamodels.fitting._masks import draw_masks as draw_masks
from gradkeep.datamodels.fitting._result import Datamodels, load
from gradkeep.datamodels.study._spec import Output as Output
from gradkeep.datamodels.study._spec import confidences as confidences
from gradkeep.datamodels.study._spec import correct as correct
from gradkeep.datamodels.study._spec import losses, margins
from gradkeep.datamodels.study._spec import output as output
from gradkeep.datamodels.study._study import Study
from gradkeep.datamodels.study._training import Training

__all__ = [
    "Datamodels",
    "Masks",
    "Study",
    "Training",
    "by_group",
    "clusters",
    "compare",
    "components",
    "correlation",
    "counterfactual",
    "data_support",
    "fit",
    "leakage",
    "learning_curve",
    "load",
    "losses",
    "margins",
    "memorization",
    "near_duplicates",
    "neighbors",
    "planted",
    "similarity",
    "top",
    "values",
    "verify_removals",
]
