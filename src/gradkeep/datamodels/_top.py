"""The training examples that matter most to each target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._ids import checked_ids

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """Per target the examples that raise its output most and lower it most, `[t, count]`; an id of
    -1 and a weight of NaN where a target has fewer."""

    targets: AnyArray
    positive: AnyArray
    positive_weights: AnyArray
    negative: AnyArray
    negative_weights: AnyArray


def top(found: Datamodels, count: int = 10, *, targets: Any = None) -> Top:
    """The `count` most positive and most negative training examples of each target.

    Equal weights are ordered by id. Costs n log n per target.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(500, 20, 2)
    >>> found = top(fit(data.masks, data.outputs), 3)
    >>> found.positive.shape, bool(found.positive[1, 0] == data.weights[:, 1].argmax())
    ((2, 3), True)
    """
    n, t = found.weights.shape
    chosen = np.arange(t) if targets is None else checked_ids("targets", targets, t)
    weights = found.weights[:, chosen].T.astype(np.float64)
    count = min(count, n)
    return Top(chosen, *_first(weights, count), *_negated(_first(-weights, count)))


def _first(weights: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(weights, order, axis=1)
    there = values > 0
    return np.where(there, order, -1), np.where(there, values, np.nan)


def _negated(found: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
    return found[0], -found[1]
