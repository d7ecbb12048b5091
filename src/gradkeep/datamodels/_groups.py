"""What whole groups of training examples do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """For groups of examples (and of targets, if given; else each target by itself): their names, how
    many there are, and the `total`, `mean` and absolute `share` of weights, `[groups, columns]`.

    `total` is what training on the whole group adds to an output, in the mean over a group of
    targets; `share` sums to 1 over the groups of examples.
    """

    names: tuple[Any, ...]
    counts: AnyArray
    columns: tuple[Any, ...]
    total: AnyArray
    mean: AnyArray
    share: AnyArray


def by_group(found: Datamodels, groups: Any, *, target_groups: Any = None) -> Groups:
    """Weights summed over groups of training examples `[n]`, such as classes or sources.

    `target_groups [t]` averages the targets of each group too: with classes on both sides, the
    result tells which class helps or harms which. Costs n t.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 6, 2)
    >>> found = fit(data.masks, data.outputs)
    >>> told = by_group(found, list("aabbbb"))
    >>> told.names, told.counts.tolist(), told.total.shape
    (('a', 'b'), [2, 4], (2, 2))
    """
    n, t = found.weights.shape
    names, inside = _indicator("groups", groups, n)
    weights = found.weights.astype(np.float64)
    total, size = inside.T @ weights, inside.T @ np.abs(weights)
    columns: tuple[Any, ...] = tuple(range(t))
    if target_groups is not None:
        columns, which = _indicator("target_groups", target_groups, t)
        total, size = total @ which / which.sum(axis=0), size @ which / which.sum(axis=0)
    counts = inside.sum(axis=0).astype(np.int64)
    whole = size.sum(axis=0)
    share = np.divide(size, whole, out=np.zeros_like(size), where=whole > 0)
    return Groups(names, counts, columns, total, total / counts[:, None], share)


def _indicator(what: str, groups: Any, count: int) -> tuple[tuple[Any, ...], AnyArray]:
    """The names in order, and which group each is in, float64 `[count, groups]`."""
    array = np.asarray(groups)
    if array.shape != (count,):
        raise DatamodelsError(
            f"{what} must name one group each",
            found=f"shape {list(array.shape)}",
            expected=[count],
        )
    names, where = np.unique(array, return_inverse=True)
    return tuple(names.tolist()), np.eye(len(names))[where]
