"""Targets that depend on the same training examples, and targets that one example decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels.fitting._masks import AnyArray
    from gradkeep.datamodels.fitting._result import Datamodels

_BLOCK = 1024


def unit_rows(found: Datamodels) -> AnyArray:
    """The targets' weights as rows of length 1, float64 `[t, n]`; a target without any stays 0."""
    rows: AnyArray = found.weights.T.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, length, out=np.zeros_like(rows), where=length > 0))


@checked(DatamodelsError)
def similarity(found: Datamodels, other: Datamodels | None = None) -> AnyArray:
    """The cosine of the weights of all pairs of targets, `[t, t']`; 0 for a target without weights.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 20, 3)
    >>> similarity(fit(data.masks, data.outputs)).diagonal().round(6).tolist()
    [1.0, 1.0, 1.0]
    """
    if other is not None and len(other.weights) != len(found.weights):
        raise DatamodelsError(
            "the fits are of different training sets",
            found=f"{len(found.weights)} and {len(other.weights)} examples",
        )
    rows = unit_rows(found)
    return rows @ (rows if other is None else unit_rows(other)).T


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Per target the nearest others, nearest first, and their cosines, both `[t, count]`."""

    ids: AnyArray
    cosine: AnyArray


@checked(DatamodelsError)
def neighbours(found: Datamodels, count: int = 10) -> Neighbours:
    """The targets with the most similar datamodels, in blocks: t^2 n operations, little memory.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 20, 5)
    >>> neighbours(fit(data.masks, data.outputs), 2).ids.shape
    (5, 2)
    """
    _arguments.count("count", count, error=DatamodelsError, least=1)
    rows = unit_rows(found)
    count = min(count, len(rows) - 1)
    ids = np.empty((len(rows), count), np.int64)
    cosine = np.empty((len(rows), count))
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK] @ rows.T
        own = np.arange(len(part))
        part[own, start + own] = -np.inf
        order = np.argsort(-part, axis=1, kind="stable")[:, :count]
        ids[start : start + _BLOCK] = order
        cosine[start : start + _BLOCK] = np.take_along_axis(part, order, axis=1)
    return Neighbours(ids, cosine)


@dataclass(frozen=True, slots=True, eq=False)
class RankedPairs:
    """Pairs that stand out, the most striking first: `first`, `second` and `strength`, all `[k]`."""

    first: AnyArray
    second: AnyArray
    strength: AnyArray

    def __len__(self) -> int:
        return len(self.first)


@checked(DatamodelsError)
def near_duplicates(found: Datamodels, *, threshold: float = 0.8) -> RankedPairs:
    """Pairs of targets whose datamodels have a cosine of `threshold` or more.

    Two copies of an image depend on the same training examples, however their pixels differ.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(400, 20, 3)
    >>> twice = np.concatenate([data.outputs, data.outputs[:, :1] + 1], axis=1)
    >>> pairs = near_duplicates(fit(data.masks, twice), threshold=0.99)
    >>> (0, 3) in zip(pairs.first.tolist(), pairs.second.tolist())
    True
    """
    rows = unit_rows(found)
    first, second, cosine = [], [], []
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK] @ rows.T
        i, j = np.nonzero(np.triu(part >= threshold, k=start + 1))
        first.append(i + start)
        second.append(j)
        cosine.append(part[i, j])
    return _ordered(np.concatenate(first), np.concatenate(second), np.concatenate(cosine))


@checked(DatamodelsError)
def leakage(found: Datamodels, *, threshold: float = 8.0) -> RankedPairs:
    """Targets with a training example whose weight stands out from all others: `first` is the target,
    `second` the example, `strength` the weight in robust standard deviations of that target's.

    A test image that is also in the training set has one such weight. The deviation is that of the
    weights which are not 0, so that a sparse fit is no alarm by itself.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(600, 40, 3, large=0, tail=0.05)
    >>> copied = data.outputs + 4.0 * data.masks[:, [7]] * np.array([0, 1, 0])
    >>> pairs = leakage(fit(data.masks, copied, penalty="ridge"))
    >>> pairs.first.tolist(), pairs.second.tolist()
    ([1], [7])
    """
    first, second, strength = [], [], []
    for target, weights in enumerate(found.weights.T.astype(np.float64)):
        there = np.flatnonzero(weights)
        # Fewer weights than this have no usual size to stand out from.
        if len(there) < 5:
            continue
        values = weights[there]
        middle = np.median(values)
        # A normal distribution's standard deviation in parts of its median absolute deviation.
        deviation = 1.4826 * np.median(np.abs(values - middle))
        if deviation == 0:
            continue
        score = (values - middle) / deviation
        out = np.flatnonzero(score >= threshold)
        first += [target] * len(out)
        second += there[out].tolist()
        strength += score[out].tolist()
    return _ordered(np.array(first, np.int64), np.array(second, np.int64), np.array(strength))


def _ordered(first: AnyArray, second: AnyArray, strength: AnyArray) -> RankedPairs:
    order = np.lexsort((second, first, -strength))
    return RankedPairs(first[order], second[order], strength[order])
