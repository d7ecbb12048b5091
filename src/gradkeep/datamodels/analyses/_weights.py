"""Strongest examples and groups of each target, and learning curves."""

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
    """Strongest training examples of each target; id -1 and weight NaN where a target has fewer.

    Attributes:
        targets: Targets `[t]`.
        positive: Ids of the most positive examples `[t, count]`.
        positive_weights: Their weights `[t, count]`.
        negative: Ids of the most negative examples `[t, count]`.
        negative_weights: Their weights `[t, count]`.
    """

    targets: AnyArray
    positive: AnyArray
    positive_weights: AnyArray
    negative: AnyArray
    negative_weights: AnyArray


@checked(DatamodelsError)
def top(fitted: Datamodels, count: int = 10, *, targets: Any = None) -> TopExamples:
    """Find the most positive and most negative training examples of each target.

    Equal weights are ordered by id. Costs n log n per target.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        count: Examples per target and sign.
        targets: Ids of targets; all by default.

    Returns:
        Ids and weights `[t, count]`.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(500, 20, 2)
        >>> fitted = top(fit(data.masks, data.outputs), 3)
        >>> fitted.positive.shape, bool(fitted.positive[1, 0] == data.weights[:, 1].argmax())
        ((2, 3), True)
    """
    n, t = fitted.weights.shape
    chosen = np.arange(t) if targets is None else checked_ids("targets", targets, t)
    weights = fitted.weights[:, chosen].T.astype(np.float64)
    count = min(_arguments.count("count", count, error=DatamodelsError, least=1), n)
    return TopExamples(chosen, *_first(weights, count), *_negated(_first(-weights, count)))


def _first(weights: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(weights, order, axis=1)
    there = values > 0
    return np.where(there, order, -1), np.where(there, values, np.nan)


def _negated(ranked: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
    return ranked[0], -ranked[1]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Weights summed over groups of examples.

    Attributes:
        names: Names of the groups.
        counts: Examples per group `[groups]`.
        columns: Target groups, or targets.
        total: Summed weights `[groups, columns]`: what training on the group adds to an output.
        mean: Mean weights `[groups, columns]`.
        share: Shares of absolute weight `[groups, columns]`; they sum to 1 over groups.
    """

    names: tuple[Any, ...]
    counts: AnyArray
    columns: tuple[Any, ...]
    total: AnyArray
    mean: AnyArray
    share: AnyArray


@checked(DatamodelsError)
def by_group(fitted: Datamodels, groups: Any, *, target_groups: Any = None) -> Groups:
    """Sum weights over groups of training examples, such as classes or sources.

    With classes on both sides the result shows which class helps or hurts which. Costs n t.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        groups: Group of each training example `[n]`.
        target_groups: Group of each target `[t]`, to average over; each target alone by default.

    Returns:
        Totals, means and shares.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 6, 2)
        >>> fitted = fit(data.masks, data.outputs)
        >>> result = by_group(fitted, list("aabbbb"))
        >>> result.names, result.counts.tolist(), result.total.shape
        (('a', 'b'), [2, 4], (2, 2))
    """
    n, t = fitted.weights.shape
    names, inside = _indicator("groups", groups, n)
    weights = fitted.weights.astype(np.float64)
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
    """Return the group names in order, and the indicator matrix float64 `[count, groups]`."""
    array = _arguments.array(
        what, groups, error=DatamodelsError, kinds="biufUS", expected="one group each"
    )
    if array.shape != (count,):
        raise DatamodelsError(
            f"{what} must name one group each",
            code="datamodels.group_count",
            found=f"shape {list(array.shape)}",
            expected=[count],
        )
    names, where = np.unique(array, return_inverse=True)
    return tuple(names.tolist()), np.eye(len(names))[where]


def checked_ids(what: str, ids: Any, count: int) -> AnyArray:
    """Validate ids or a boolean mask and return sorted distinct ids below `count`."""
    values = _arguments.array(what, ids, error=DatamodelsError, expected="ids")
    array = np.atleast_1d(values)
    if array.dtype == np.bool_ and array.shape == (count,):
        return np.flatnonzero(array)
    array = array.astype(np.int64) if array.size == 0 else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatamodelsError(
            f"{what} must be ids, or one boolean each",
            code="datamodels.not_ids",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"ids 0 to {count - 1}, or bool [{count}]",
        )
    if array.size and (array.min() < 0 or array.max() >= count):
        raise DatamodelsError(
            f"there is no such id among the {what}",
            code="datamodels.unknown_id",
            found=int(array.max() if array.max() >= count else array.min()),
            expected=f"0 to {count - 1}",
        )
    return np.unique(array)


def checked_base(base: Any, count: int) -> AnyArray:
    """Validate the mask of a training set; all True by default."""
    if base is None:
        return np.ones(count, np.bool_)
    array = _arguments.array("base", base, error=DatamodelsError, expected="a mask")
    if array.shape != (count,) or array.dtype != np.bool_:
        raise DatamodelsError(
            "a base must be the mask of one training set",
            code="datamodels.base_mask",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"bool [{count}]",
        )
    return array


@dataclass(frozen=True, slots=True, eq=False)
class LearningCurve:
    """Correlation on held-out models by number of fitted models.

    Attributes:
        models: Numbers of models `[k]`.
        mean: Mean correlation over targets `[k]`.
        low: Lower ends of the intervals `[k]`.
        high: Upper ends of the intervals `[k]`.
        correlations: The correlation of each fit.
    """

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
    """Fit growing numbers of models and predict the held-out ones.

    The held-out models select nothing, so the correlations are unbiased. Costs one fit per size.

    Args:
        masks: Training subsets `[m, n]`.
        outputs: Outputs `[m, t]`.
        sizes: Numbers of models; five doublings up to all by default.
        held_out: Share or rows of the models to hold out.
        kind: `"pearson"` or `"spearman"`.
        seed: Seed of the held-out choice.
        **options: Options of `fit`.

    Returns:
        The curve.

    Example:
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
    counts = sorted({len(rest) >> k for k in range(5)}) if sizes is None else sorted(sizes)
    # Fits of fewer models tell nothing.
    counts = [size for size in counts if sizes is not None or size >= 20]
    if not counts or counts[0] < 1 or counts[-1] > len(rest):
        raise DatamodelsError(
            "sizes exceed the number of models that are not held out",
            code="datamodels.curve_sizes",
            found=counts,
            expected=f"1 to {len(rest)}",
        )
    correlations = []
    for size in counts:
        rows = rest[:size]
        fitted = fit(packed[rows], y[rows], seed=seed, **options)
        correlations.append(fitted.score(packed[out], y[out], kind=kind))
    return LearningCurve(
        np.array(counts),
        np.array([one.mean for one in correlations]),
        np.array([one.mean_low for one in correlations]),
        np.array([one.mean_high for one in correlations]),
        tuple(correlations),
    )
