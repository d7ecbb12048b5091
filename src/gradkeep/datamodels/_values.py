"""The value of training examples to a utility, from the same subset-trained models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._request import checked_outputs
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray

_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The value of each training example to each utility, `[n, t]`.

    `covered [n]` is the part of the subset sizes 0 .. n - 1 at which both kinds of models were seen
    (1 for Banzhaf values, which weigh all subsets alike); NaN values where none was.
    """

    value: AnyArray
    covered: AnyArray
    kind: Literal["banzhaf", "shapley"]


def values(masks: Any, utility: Any, *, kind: Literal["banzhaf", "shapley"] = "banzhaf") -> Values:
    """Data Banzhaf or Shapley values of n examples, from utilities `[m]` or `[m, t]` of models.

    Banzhaf: E[u | i in] - E[u | i out] over subsets drawn with probability 1/2 (maximum sample
    reuse: every model informs every example). Shapley: the mean over sizes s of
    E[u | i in, size s + 1] - E[u | i out, size s], over the sizes that the models have; masks of one
    alpha have sizes near alpha n only, which `covered` tells: draw alpha at random for more.
    Costs m n t.

    >>> masks = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    >>> values(masks, [0.0, 1.0, 2.0, 5.0]).value[:, 0].tolist()
    [3.0, 2.0]
    >>> values(masks, [0.0, 1.0, 2.0, 5.0], kind="shapley").value[:, 0].tolist()
    [3.0, 2.0]
    """
    packed = Masks.of(masks)
    u = checked_outputs(packed, utility).astype(np.float64)
    n = packed.num_examples
    if kind == "banzhaf":
        value, there = _difference(packed, u, np.arange(len(packed)), np.arange(len(packed)))
        return Values(np.where(there[:, None], value, np.nan), there.astype(np.float64), kind)
    if kind != "shapley":
        raise DatamodelsError(
            "there is no such value", found=repr(kind), expected="banzhaf or shapley"
        )
    sizes = packed.sizes()
    rows = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
    total, seen = np.zeros((n, u.shape[1])), np.zeros(n)
    for size in sorted(rows):
        if size + 1 in rows:
            value, there = _difference(packed, u, rows[size + 1], rows[size])
            total[there] += value[there]
            seen += there
    mean = np.divide(total, seen[:, None], out=np.full_like(total, np.nan), where=seen[:, None] > 0)
    return Values(mean, seen / n, kind)


def _difference(
    masks: Masks, u: AnyArray, with_it: AnyArray, without: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """E[u | i in] over some models minus E[u | i out] over others, and where both exist."""
    centre = u.mean(axis=0)
    n = masks.num_examples
    sums = []
    for rows, wanted in ((with_it, 1), (without, 0)):
        count, total = np.zeros(n), np.zeros((n, u.shape[1]))
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            inside = (masks[part].dense(0, len(part)) == wanted).astype(np.float64)
            count += inside.sum(axis=0)
            total += inside.T @ (u[part] - centre)
        sums.append((count, total))
    (count_in, total_in), (count_out, total_out) = sums
    there = (count_in > 0) & (count_out > 0)
    value = total_in / np.maximum(count_in, 1)[:, None]
    value -= total_out / np.maximum(count_out, 1)[:, None]
    return value, there
