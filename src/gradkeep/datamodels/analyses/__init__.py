"""What datamodels, and the models they were fitted to, tell about the training data."""

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

__all__ = [
    "Clusters",
    "Comparison",
    "Components",
    "Counterfactual",
    "DataSupport",
    "DataValues",
    "Groups",
    "LearningCurve",
    "Memorisation",
    "Neighbours",
    "RankedPairs",
    "TopExamples",
    "VerifiedRemovals",
    "by_group",
    "clusters",
    "compare",
    "components",
    "counterfactual",
    "data_support",
    "leakage",
    "learning_curve",
    "memorisation",
    "near_duplicates",
    "neighbours",
    "similarity",
    "top",
    "values",
    "verify_removals",
]
