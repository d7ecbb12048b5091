"""`knn-shapley`: exact Shapley values of a nearest-neighbour classifier on embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._row_features import column, embeddings
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class KnnShapleyOptions:
    """What `knn-shapley` can be told."""

    k: int = 5
    """How many neighbours vote."""
    layer: str | None = None
    """Whose embeddings; by default the last that both splits keep."""


def _prepare_knn_shapley(at: CheckpointView, options: KnnShapleyOptions) -> Scorer:
    if options.k < 1:
        raise AttributionError("at least one neighbour must vote", found=f"k={options.k}")
    train, asked = embeddings(at, options.layer, method="knn-shapley")
    labels = column(at.train_block, "label", method="knn-shapley")
    wanted = column(at.query_block, "label", method="knn-shapley")[at.question.positions]

    def score(start: int, stop: int) -> Tensor:
        apart = torch.cdist(asked[start:stop].double(), train.double())
        agree = (wanted[start:stop, None] == labels).double()
        return shapley(apart, agree, k=options.k).float()

    return Scorer(score)


def shapley(apart: Tensor, agree: Tensor, *, k: int) -> Tensor:
    """Values `[Q, N]` from distances and agreements a of labels `[Q, N]`; rows at one distance in order.

    With rows by rising distance, i from 1 to N: s_N = a_N min(k, N) / (N k) and
    s_i = s_{i+1} + (a_i - a_{i+1}) / k * min(k, i) / i. Their sum is the share of the k nearest
    that agree. Cost: a sort.

    >>> near = torch.tensor([[0.1, 0.2, 0.3]])
    >>> shapley(near, torch.tensor([[1.0, 0.0, 1.0]]), k=1)
    tensor([[ 0.8333, -0.1667,  0.3333]])
    """
    count = apart.shape[1]
    order = apart.argsort(dim=1, stable=True)
    sorted_agree = agree.gather(1, order)
    place = torch.arange(1, count + 1, dtype=agree.dtype)
    share = place.clamp(max=k) / place / k
    steps = (sorted_agree - sorted_agree.roll(-1, 1)) * share
    steps[:, -1] = sorted_agree[:, -1] * min(k, count) / (count * k)
    values = steps.flip(1).cumsum(1).flip(1)
    return torch.empty_like(values).scatter_(1, order, values)


KNN_SHAPLEY = Method(
    "knn-shapley",
    "Shapley value of a row for the vote of the query's k nearest embeddings",
    "embeddings and labels of both splits: capture(..., embeddings=[layer])",
    "Q x N distances and a sort",
    exact=True,
    reference="Jia et al., Efficient Task-Specific Data Valuation for Nearest Neighbor, 2019",
    prepare=_prepare_knn_shapley,
    options=KnnShapleyOptions,
    whitened=True,
)
