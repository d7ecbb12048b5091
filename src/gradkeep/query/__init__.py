"""What can be computed from kept gradients without restoring them.

>>> from gradkeep import query
>>> [name for name in query.__all__ if name.islower()][:6]
['along', 'along_tokens', 'check_pairs', 'choose_compute', 'cosine', 'dot']
"""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.query._code_making import small_codes
from gradkeep.query._engine import (
    DEFAULT_BUDGET,
    ComputeWish,
    GradientPair,
    MemoryShares,
    ProductEngine,
    ProductTile,
    check_pairs,
    memory_shares,
)
from gradkeep.query._gradients import (
    FactorBatch,
    GradientOf,
    Gradients,
    gradients,
    gradients_of,
    open_capture,
)
from gradkeep.query._kept_moments import KeptMoments, SideMoments
from gradkeep.query._layers import LayerChoice, NamedLayer, select_layers
from gradkeep.query._machine import machine_speeds
from gradkeep.query._planner import ComputeChoice, QueryPlan, QueryStep, choose_compute
from gradkeep.query._products import Products, TopRows, cosine, dot, gram, top
from gradkeep.query._small_codes import SmallCodes
from gradkeep.query._sums import Directions, along, mean, squares, total, variance
from gradkeep.query._tokens import TokenProducts, along_tokens, tokens

if not TYPE_CHECKING:  # a type checker would take every name for one that may exist
    __getattr__ = lazy_names(
        __name__,
        renamed={
            "Plan": "gradkeep.query.QueryPlan",
            "Step": "gradkeep.query.QueryStep",
            "Top": "gradkeep.query.TopRows",
        },
    )

__all__ = [
    "DEFAULT_BUDGET",
    "ComputeChoice",
    "ComputeWish",
    "Directions",
    "FactorBatch",
    "GradientOf",
    "GradientPair",
    "Gradients",
    "KeptMoments",
    "LayerChoice",
    "MemoryShares",
    "NamedLayer",
    "ProductEngine",
    "ProductTile",
    "Products",
    "QueryPlan",
    "QueryStep",
    "SideMoments",
    "SmallCodes",
    "TokenProducts",
    "TopRows",
    "along",
    "along_tokens",
    "check_pairs",
    "choose_compute",
    "cosine",
    "dot",
    "gradients",
    "gradients_of",
    "gram",
    "machine_speeds",
    "mean",
    "memory_shares",
    "open_capture",
    "select_layers",
    "small_codes",
    "squares",
    "tokens",
    "top",
    "total",
    "variance",
]
