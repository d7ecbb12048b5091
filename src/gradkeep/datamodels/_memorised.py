"""What models do on an example they were trained on, against models that never saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._request import checked_outputs
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray

_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Memorisation:
    """Per training example, `[n]`: its mean output over models that saw it, over models that did not,
    the difference with its standard error, and its rank among label `suspects` (ids, the most
    suspect first: the lowest output of models that did not see it). NaN where all models or none
    saw an example."""

    seen: AnyArray
    unseen: AnyArray
    value: AnyArray
    standard_error: AnyArray
    suspects: AnyArray


def memorisation(masks: Any, outputs: Any) -> Memorisation:
    """How much of its own output each training example owes to itself (Feldman and Zhang).

    `outputs [m, n]` are those of the training examples themselves, the larger the better (margins,
    or the probability of the label). A label that models without the example reject is suspect:
    out-of-sample outputs find wrong labels as well as anything known. Costs m n.

    >>> masks = np.random.default_rng(0).random((400, 3)) < 0.5
    >>> outputs = np.where(masks, [1.0, 1.0, 1.0], [0.9, -2.0, 0.8])
    >>> told = memorisation(masks, outputs)
    >>> told.value.round(1).tolist(), int(told.suspects[0])
    ([0.1, 3.0, 0.2], 1)
    """
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    n = packed.num_examples
    if y.shape[1] != n:
        raise DatamodelsError(
            "memorisation needs the outputs of the training examples themselves",
            found=f"{y.shape[1]} targets",
            expected=f"{n}, one per training example and in their order",
        )
    centre = y.mean(axis=0, dtype=np.float64)
    sums = np.zeros((2, 3, n))
    for start, rows in packed.blocks(_ROWS):
        values = y[start : start + len(rows)].astype(np.float64) - centre
        for which, inside in enumerate((rows == 1, rows == 0)):
            kept = np.where(inside, values, 0.0)
            sums[which] += inside.sum(axis=0), kept.sum(axis=0), (kept * kept).sum(axis=0)
    means, errors = zip(*(_mean_and_error(*part) for part in sums), strict=True)
    unseen = means[1] + centre
    return Memorisation(
        means[0] + centre,
        unseen,
        means[0] - means[1],
        np.sqrt(errors[0] + errors[1]),
        np.argsort(np.where(np.isnan(unseen), np.inf, unseen), kind="stable"),
    )


def _mean_and_error(
    count: AnyArray, total: AnyArray, squares: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """The mean and the square of its standard error; NaN where nothing was counted."""
    nothing = np.full_like(total, np.nan)
    mean = np.divide(total, count, out=nothing.copy(), where=count > 0)
    spread = np.maximum(squares - count * mean * mean, 0)
    return mean, np.divide(spread, count * (count - 1), out=nothing, where=count > 1)
