"""Baselines that use no gradients, and k-nearest-neighbor Shapley values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from gradkeep.attribution._question import Method, NoOptions, Scorer, column
from gradkeep.attribution._row_features import embeddings
from gradkeep.curvature import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep._arguments import PositiveInt
    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class RandomOptions:
    """Options of `random`."""

    seed: int = 0


def _prepare_random(at: CheckpointView, options: RandomOptions) -> Scorer:
    question = at.question
    queries, train = at.query_block.ids[question.positions], at.train_block.ids.astype(np.uint64)

    def score(start: int, stop: int) -> Tensor:
        rows = [_numbers(train, options.seed, int(query)) for query in queries[start:stop]]
        return torch.from_numpy(np.stack(rows))

    return Scorer(score)


def _numbers(
    ids: np.ndarray[tuple[int], np.dtype[np.uint64]], seed: int, query: int
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Compute numbers from -1 to 1 that depend on the ids only, not on other rows, order or tiles."""
    key = _random.raw(2, "random scores", seed, query)
    with np.errstate(over="ignore"):  # the finalizer of splitmix64, modulo 2^64
        mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key[0]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27)) ^ key[1]) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return np.asarray(mixed.astype(np.float64) / 2.0**63 - 1, np.float32)


RANDOM = Method(
    "random",
    "a random number between -1 and 1 for every pair of ids",
    "nothing but the ids of both splits",
    "Q x N random numbers",
    exact=True,
    reference="the baseline of chance",
    prepare=_prepare_random,
    options=RandomOptions,
    whitened=True,
)


def _prepare_loss(at: CheckpointView, options: NoOptions) -> Scorer:
    # Badly fitted rows tend to have wrong labels, which harm: hence the sign.
    scores = -column(at.train_block, "loss", method="loss").float().unsqueeze(0)

    def score(start: int, stop: int) -> Tensor:
        return scores

    return Scorer(score)


LOSS = Method(
    "loss",
    "minus a row's own loss: the worst fitted rows score lowest",
    "losses of the training split",
    "reads one number a row",
    exact=True,
    reference="the baseline for wrong labels, strongest in the middle of training",
    prepare=_prepare_loss,
    about_queries=False,
    whitened=True,
)


def _prepare_label_match(at: CheckpointView, options: NoOptions) -> Scorer:
    train = column(at.train_block, "label", method="label-match")
    query_labels = column(at.query_block, "label", method="label-match")[at.question.positions]

    def score(start: int, stop: int) -> Tensor:
        return (query_labels[start:stop, None] == train).float()

    return Scorer(score)


LABEL_MATCH = Method(
    "label-match",
    "1 where the labels are equal, else 0",
    "labels of both splits",
    "Q x N comparisons",
    exact=True,
    reference="the baseline of labels alone",
    prepare=_prepare_label_match,
    whitened=True,
)


@dataclass(frozen=True, slots=True)
class SimilarityOptions:
    """Options of `similarity`."""

    layer: str | None = None
    """Layer of the embeddings; by default the last that both splits hold."""


def _prepare_similarity(at: CheckpointView, options: SimilarityOptions) -> Scorer:
    train, queries = (
        functional.normalize(values, dim=1, eps=1e-30)
        for values in embeddings(at, options.layer, method="similarity")
    )

    def score(start: int, stop: int) -> Tensor:
        return queries[start:stop] @ train.t()

    return Scorer(score)


SIMILARITY = Method(
    "similarity",
    "cosine of the angle between embeddings; 0 where one is zero",
    "embeddings of both splits: capture(..., embeddings=[layer])",
    "Q x N products of embeddings",
    exact=True,
    reference="Hanawa et al., Evaluation of Similarity-based Explanations, 2021",
    prepare=_prepare_similarity,
    options=SimilarityOptions,
    whitened=True,
)


@dataclass(frozen=True, slots=True)
class KnnShapleyOptions:
    """Options of `knn-shapley`."""

    k: PositiveInt = 5
    """Number of neighbors that vote."""
    layer: str | None = None
    """Layer of the embeddings; by default the last that both splits hold."""


def _prepare_knn_shapley(at: CheckpointView, options: KnnShapleyOptions) -> Scorer:
    train, queries = embeddings(at, options.layer, method="knn-shapley")
    labels = column(at.train_block, "label", method="knn-shapley")
    query_labels = column(at.query_block, "label", method="knn-shapley")[at.question.positions]

    def score(start: int, stop: int) -> Tensor:
        distances = torch.cdist(queries[start:stop].double(), train.double())
        agreement = (query_labels[start:stop, None] == labels).double()
        return shapley(distances, agreement, k=options.k).float()

    return Scorer(score)


def shapley(distances: Tensor, agreement: Tensor, *, k: int) -> Tensor:
    """Compute Shapley values `[Q, N]` from distances and label agreements a `[Q, N]`; ties keep their order.

    With rows by increasing distance, i from 1 to N: s_N = a_N min(k, N) / (N k) and
    s_i = s_{i+1} + (a_i - a_{i+1}) / k * min(k, i) / i. Their sum is the share of the k nearest
    that agree. Cost: a sort.

    >>> near = torch.tensor([[0.1, 0.2, 0.3]])
    >>> shapley(near, torch.tensor([[1.0, 0.0, 1.0]]), k=1)
    tensor([[ 0.8333, -0.1667,  0.3333]])
    """
    count = distances.shape[1]
    order = distances.argsort(dim=1, stable=True)
    sorted_agree = agreement.gather(1, order)
    place = torch.arange(1, count + 1, dtype=agreement.dtype)
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
