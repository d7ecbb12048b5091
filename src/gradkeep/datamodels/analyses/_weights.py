"""Which training examples, and which groups of them, matter most to each target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.datamodels.fitting._fit import fit
from gradkeep.datamodels.fitting._masks import Masks
from gradkeep.datamodels.fitting._options import checked_outputs, rows_left_out
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from gradkeep.datamodels.fitting._correlation import Correlation
    from gradkeep.datamodels.fitting._masks import AnyArray
    from gradkeep.datamodels.fitting._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class TopExamples:
    """Per target the examples that raise its output most and lower it most, `[t, count]`; an id of
    -1 and a weight of NaN where a target has fewer."""

    targets: AnyArray
    positive: AnyArray
    positive_weights: AnyArray
    negative: AnyArray
    negative_weights: AnyArray


@checked(DatamodelsError)
def top(found: Datamodels, count: int = 10, *, targets: Any = None) -> TopExamples:
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
    count = min(_arguments.count("count", count, error=DatamodelsError, least=1), n)
    return TopExamples(chosen, *_first(weights, count), *_negated(_first(-weights, count)))


def _first(weights: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(weights, order, axis=1)
    there = values > 0
    return np.where(there, order, -1), np.where(there, values, np.nan)


def _negated(found: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
    return found[0], -found[1]


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


@checked(DatamodelsError)
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
    array = _arguments.array(
        what, groups, error=DatamodelsError, kinds="biufUS", expected="one group each"
    )
    if array.shape != (count,):
        raise DatamodelsError(
            f"{what} must name one group each",
            found=f"shape {list(array.shape)}",
            expected=[count],
        )
    names, where = np.unique(array, return_inverse=True)
    return tuple(names.tolist()), np.eye(len(names))[where]


def checked_ids(what: str, ids: Any, count: int) -> AnyArray:
    """Distinct ids below `count`, from ids or a boolean array; sorted."""
    given = _arguments.array(what, ids, error=DatamodelsError, expected="ids")
    array = np.atleast_1d(given)
    if array.dtype == np.bool_ and array.shape == (count,):
        return np.flatnonzero(array)
    array = array.astype(np.int64) if array.size == 0 else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatamodelsError(
            f"{what} must be ids, or one boolean each",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"ids 0 to {count - 1}, or bool [{count}]",
        )
    if array.size and (array.min() < 0 or array.max() >= count):
        raise DatamodelsError(
            f"there is no such id among the {what}",
            found=int(array.max() if array.max() >= count else array.min()),
            expected=f"0 to {count - 1}",
        )
    return np.unique(array)


def checked_base(base: Any, count: int) -> AnyArray:
    """The training set that something is taken from: all examples, or a mask of some, bool `[n]`."""
    if base is None:
        return np.ones(count, np.bool_)
    array = _arguments.array("base", base, error=DatamodelsError, expected="a mask")
    if array.shape != (count,) or array.dtype != np.bool_:
        raise DatamodelsError(
            "a base must be the mask of one training set",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"bool [{count}]",
        )
    return array


@dataclass(frozen=True, slots=True, eq=False)
class LearningCurve:
    """The correlation on the same left-out models after fits of more and more others: `models [k]`,
    its `mean` over targets and the interval `low`, `high` `[k]`, and each whole `Correlation`."""

    models: AnyArray
    mean: AnyArray
    low: AnyArray
    high: AnyArray
    correlations: tuple[Correlation, ...]


@checked(DatamodelsError)
def learning_curve(
    masks: Any,
    outputs: Any,
    sizes: Sequence[int] | None = None,
    *,
    held_out: Any = 0.1,
    kind: Literal["pearson", "spearman"] = "pearson",
    seed: int = 0,
    **options: Any,
) -> LearningCurve:
    """Fit growing numbers of models, in their order, and predict those that were left out.

    The left-out models choose nothing, so the correlations are honest. `sizes` are by default five
    doublings up to all others; `options` go to `fit`. Costs a fit per size.

    >>> from gradkeep.datamodels import planted
    >>> data = planted(800, 30, 4)
    >>> curve = learning_curve(data.masks, data.outputs, [100, 600])
    >>> bool(curve.mean[1] > curve.mean[0])
    True
    """
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    out = rows_left_out(held_out, len(packed), seed=seed)
    rest = np.setdiff1d(np.arange(len(packed)), out)
    wanted = sorted({len(rest) >> k for k in range(5)}) if sizes is None else sorted(sizes)
    # Fits of fewer models tell nothing.
    wanted = [size for size in wanted if sizes is not None or size >= 20]
    if not wanted or wanted[0] < 1 or wanted[-1] > len(rest):
        raise DatamodelsError(
            "these sizes cannot be taken from the models that are not left out",
            found=wanted,
            expected=f"1 to {len(rest)}",
        )
    found = []
    for size in wanted:
        rows = rest[:size]
        fitted = fit(packed[rows], y[rows], seed=seed, **options)
        found.append(fitted.score(packed[out], y[out], kind=kind))
    return LearningCurve(
        np.array(wanted),
        np.array([one.mean for one in found]),
        np.array([one.mean_low for one in found]),
        np.array([one.mean_high for one in found]),
        tuple(found),
    )
