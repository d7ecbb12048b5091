"""Datamodels: linear maps from training subsets to a model's outputs, and what they tell.

Studies train models on subsets (`_study`), `_fit` fits them, and the analyses read the weights.
"""

from gradkeep.datamodels._correlation import Correlation as Correlation
from gradkeep.datamodels._correlation import correlation
from gradkeep.datamodels._fit import fit
from gradkeep.datamodels._masks import Masks, planted
from gradkeep.datamodels._masks import PlantedData as PlantedData
from gradkeep.datamodels._masks import draw_masks as draw_masks
from gradkeep.datamodels._removal import Counterfactual as Counterfactual
from gradkeep.datamodels._removal import DataSupport as DataSupport
from gradkeep.datamodels._removal import VerifiedRemovals as VerifiedRemovals
from gradkeep.datamodels._removal import counterfactual, data_support, verify_removals
from gradkeep.datamodels._result import Datamodels, load
from gradkeep.datamodels._similarity import Clusters as Clusters
from gradkeep.datamodels._similarity import Comparison as Comparison
from gradkeep.datamodels._similarity import Components as Components
from gradkeep.datamodels._similarity import Neighbors as Neighbors
from gradkeep.datamodels._similarity import RankedPairs as RankedPairs
from gradkeep.datamodels._similarity import (
    clusters,
    compare,
    components,
    leakage,
    near_duplicates,
    neighbors,
    similarity,
)
from gradkeep.datamodels._spec import Output as Output
from gradkeep.datamodels._spec import confidences as confidences
from gradkeep.datamodels._spec import losses, margins
from gradkeep.datamodels._spec import output as output
from gradkeep.datamodels._study import Study
from gradkeep.datamodels._training import Training
from gradkeep.datamodels._weights import DataValues as DataValues
from gradkeep.datamodels._weights import Groups as Groups
from gradkeep.datamodels._weights import LearningCurve as LearningCurve
from gradkeep.datamodels._weights import Memorization as Memorization
from gradkeep.datamodels._weights import TopExamples as TopExamples
from gradkeep.datamodels._weights import by_group, learning_curve, memorization, top, values

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
