"""Strongest examples and groups of each target, and learning curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import NonNegativeInt, PositiveInt, checked
from gradkeep.datamodels._fit import fit
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._options import checked_outputs, rows_left_out
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.datamodels._correlation import Correlation
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


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
def top(fitted: Datamodels, count: PositiveInt = 10, *, targets: Any = None) -> TopExamples:
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
    count = min(count, n)
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
        what,
        groups,
        error=DatamodelsError,
        kinds="biufUS",
        expected="one group each",
        shape=(count,),
        code="datamodels.group_count",
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
    return _arguments.array(
        "base",
        base,
        error=DatamodelsError,
        kinds="b",
        expected=f"the mask of one training set, bool [{count}]",
        shape=(count,),
        code="datamodels.base_mask",
    )


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
    seed: NonNegativeInt = 0,
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


_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class DataValues:
    """Values of training examples.

    Attributes:
        value: Value of each example for each utility `[n, t]`; NaN where unknown.
        covered: Share of the subset sizes 0 .. n - 1 with models of both kinds `[n]`; 1 for Banzhaf values.
        kind: `"banzhaf"` or `"shapley"`.
    """

    value: AnyArray
    covered: AnyArray
    kind: Literal["banzhaf", "shapley"]


@checked(DatamodelsError)
def values(
    masks: Any, utility: Any, *, kind: Literal["banzhaf", "shapley"] = "banzhaf"
) -> DataValues:
    """Compute data Banzhaf or Shapley values from the utilities of models.

    Banzhaf: E[u | i in] - E[u | i out] over subsets drawn with probability 1/2 (maximum sample reuse). Shapley: the mean over sizes s of
    E[u | i in, size s + 1] - E[u | i out, size s], over the sizes that the models have. Masks of one alpha have sizes near alpha n only, which `covered`
    reports: draw alpha at random for more. Costs m n t.

    Args:
        masks: Training subsets `[m, n]`.
        utility: Utilities `[m]` or `[m, t]`.
        kind: `"banzhaf"` or `"shapley"`.

    Returns:
        Values `[n, t]` and coverage.

    Example:
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
        return DataValues(np.where(there[:, None], value, np.nan), there.astype(np.float64), kind)
    sizes = packed.sizes()
    rows = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
    total, seen = np.zeros((n, u.shape[1])), np.zeros(n)
    for size in sorted(rows):
        if size + 1 in rows:
            value, there = _difference(packed, u, rows[size + 1], rows[size])
            total[there] += value[there]
            seen += there
    mean = np.divide(total, seen[:, None], out=np.full_like(total, np.nan), where=seen[:, None] > 0)
    return DataValues(mean, seen / n, kind)


def _difference(
    masks: Masks, u: AnyArray, with_it: AnyArray, without: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """Return E[u | i in] over some models minus E[u | i out] over others, and where both exist."""
    centre = u.mean(axis=0)
    n = masks.num_examples
    sums = []
    for rows, member in ((with_it, 1), (without, 0)):
        count, total = np.zeros(n), np.zeros((n, u.shape[1]))
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            inside = (masks[part].dense(0, len(part)) == member).astype(np.float64)
            count += inside.sum(axis=0)
            total += inside.T @ (u[part] - centre)
        sums.append((count, total))
    (count_in, total_in), (count_out, total_out) = sums
    there = (count_in > 0) & (count_out > 0)
    value = total_in / np.maximum(count_in, 1)[:, None]
    value -= total_out / np.maximum(count_out, 1)[:, None]
    return value, there


@dataclass(frozen=True, slots=True, eq=False)
class Memorization:
    """Memorization of training examples; NaN where all models or none trained on an example.

    Attributes:
        seen: Mean output over models that trained on the example `[n]`.
        unseen: Mean output over models that did not `[n]`.
        value: Their difference `[n]`.
        standard_error: Its standard error `[n]`.
        suspects: Ids by suspicion of a wrong label: the lowest unseen output first.
    """

    seen: AnyArray
    unseen: AnyArray
    value: AnyArray
    standard_error: AnyArray
    suspects: AnyArray


@checked(DatamodelsError)
def memorization(masks: Any, outputs: Any) -> Memorization:
    """Estimate how much of its own output each training example owes to itself (Feldman and Zhang).

    A label that models without the example reject is suspicious. Costs m n.

    Args:
        masks: Training subsets `[m, n]`.
        outputs: Outputs `[m, n]` for the training examples themselves; larger is better (margins, or the label's probability).

    Returns:
        Means, differences and suspects.

    Example:
        >>> masks = np.random.default_rng(0).random((400, 3)) < 0.5
        >>> outputs = np.where(masks, [1.0, 1.0, 1.0], [0.9, -2.0, 0.8])
        >>> result = memorization(masks, outputs)
        >>> result.value.round(1).tolist(), int(result.suspects[0])
        ([0.1, 3.0, 0.2], 1)
    """
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    n = packed.num_examples
    if y.shape[1] != n:
        raise DatamodelsError(
            "memorization needs the outputs of the training examples themselves",
            code="datamodels.memorization_outputs",
            found=f"{y.shape[1]} targets",
            expected=f"{n}, one per training example and in their order",
        )
    centre = y.mean(axis=0, dtype=np.float64)
    sums = np.zeros((2, 3, n))
    for start, rows in packed.blocks(_ROWS):
        values = y[start : start + len(rows)].astype(np.float64) - centre
        for which, inside in enumerate((rows == 1, rows == 0)):
            selected = np.where(inside, values, 0.0)
            sums[which] += (
                inside.sum(axis=0),
                selected.sum(axis=0),
                (selected * selected).sum(axis=0),
            )
    means, errors = zip(*(_mean_and_error(*part) for part in sums), strict=True)
    unseen = means[1] + centre
    return Memorization(
        means[0] + centre,
        unseen,
        means[0] - means[1],
        np.sqrt(errors[0] + errors[1]),
        np.argsort(np.where(np.isnan(unseen), np.inf, unseen), kind="stable"),
    )


def _mean_and_error(
    count: AnyArray, total: AnyArray, squares: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """Return the mean and its squared standard error; NaN where the count is 0."""
    nothing = np.full_like(total, np.nan)
    mean = np.divide(total, count, out=nothing.copy(), where=count > 0)
    spread = np.maximum(squares - count * mean * mean, 0)
    return mean, np.divide(spread, count * (count - 1), out=nothing, where=count > 1)
