"""Effects of removing training examples: predicted, and verified by retraining."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import PositiveInt, checked
from gradkeep.datamodels._weights import checked_base, checked_ids
from gradkeep.errors import DatamodelsError, EvidenceWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """Predicted outputs with and without some training examples.

    Attributes:
        removed: Ids of the removed examples.
        before: Predicted outputs `[t]` of the whole training set.
        after: Predicted outputs `[t]` without them.
        change: `after - before`, `[t]`.
    """

    removed: AnyArray
    before: AnyArray
    after: AnyArray
    change: AnyArray


@checked(DatamodelsError)
def counterfactual(fitted: Datamodels, removed: Any, *, base: Any = None) -> Counterfactual:
    """Predict the outputs after removing some training examples.

    The change is minus the sum of the removed weights. Datamodels are fitted on subsets of a certain size: changes
    extrapolate to a full set better than outputs do.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        removed: Ids of the examples, or a boolean mask `[n]`.
        base: Mask `[n]` of the training set that rows are removed from; all rows by default.

    Returns:
        The predicted outputs before and after, and the change.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(400, 20, 3)
        >>> fitted = fit(data.masks, data.outputs)
        >>> result = counterfactual(fitted, [4, 7])
        >>> bool(np.allclose(result.change, -fitted.weights[[4, 7]].sum(0)))
        True
    """
    n = len(fitted.weights)
    whole = checked_base(base, n)
    gone = checked_ids("examples", removed, n)
    gone = gone[whole[gone]]
    weights = fitted.weights.astype(np.float64)
    before = weights[whole].sum(axis=0) + fitted.bias
    change = -weights[gone].sum(axis=0)
    return Counterfactual(gone, before, before + change, change)


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRemovals:
    """Predicted and measured effects of removals.

    Weights that were selected for being large are partly large by chance, so measured changes fall short of predicted ones.

    Attributes:
        predicted: Predicted changes `[removals, t]`.
        measured: Measured changes `[removals, t]`.
        standard_error: Standard error of the measured changes; NaN for a single training.
        correlation: Correlation of both over removals and targets.
        shrinkage: Slope of measured on predicted changes through zero; 1 if predictions hold.
        control: Measured changes without random sets of the same sizes `[removals, t]`, or None.
    """

    predicted: AnyArray
    measured: AnyArray
    standard_error: AnyArray
    correlation: float
    shrinkage: float
    """The slope of measured on predicted changes, through zero; 1 if predictions hold."""
    control: AnyArray | None = None
    """`[removals, t]`, if a control was asked for."""

    def __str__(self) -> str:
        lines = [
            "removal  target  predicted   measured" + "    control" * (self.control is not None)
        ]
        for removal, target in np.ndindex(self.predicted.shape):
            numbers = [self.predicted[removal, target], self.measured[removal, target]]
            if self.control is not None:
                numbers.append(self.control[removal, target])
            cells = "".join(f"{number:>11.4f}" for number in numbers)
            lines.append(f"{removal:>7}{target:>8}{cells}")
        lines.append(
            f"correlation {self.correlation:.3f}, {self.shrinkage:.0%} of what was predicted"
        )
        return "\n".join(lines)


@checked(DatamodelsError)
def verify_removals(
    fitted: Datamodels,
    removals: Sequence[Any],
    retrain: Callable[[AnyArray, int], Any],
    *,
    base: Any = None,
    repeats: PositiveInt = 1,
    control: bool = False,
    seed: int = 0,
) -> VerifiedRemovals:
    """Train with and without each set of examples and compare with the predictions.

    The same `repeats` seeds train every set, so that part of the noise cancels. Costs (removals + 1) x repeats trainings, and as many
    removals again for the control. Warns if less than half of the predicted change happens.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        removals: Sets of example ids.
        retrain: Function of a mask `[n]` and a seed that returns the outputs `[t]` of a trained model.
        base: Mask `[n]` of the training set that rows are removed from; all rows by default.
        repeats: Trainings per set.
        control: Also remove a random set of each size.
        seed: Seed of the random sets.

    Returns:
        Predicted and measured changes.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(400, 20, 3)
        >>> fitted = fit(data.masks, data.outputs)
        >>> real = lambda mask, seed: mask @ data.weights + data.bias
        >>> verify_removals(fitted, [[0, 1], [2, 3, 4], [5]], real).correlation > 0.9
        True
    """
    if not len(removals):
        raise DatamodelsError("there are no removals", code="datamodels.nothing_to_verify")
    n, targets = fitted.weights.shape
    whole = checked_base(base, n)
    predictions = [counterfactual(fitted, removed, base=whole) for removed in removals]
    before = [_outputs(retrain(whole.copy(), number), targets) for number in range(repeats)]

    def changes_without(sets: Sequence[AnyArray]) -> AnyArray:
        changes = np.empty((len(sets), repeats, targets))
        for index, removed in enumerate(sets):
            mask = whole.copy()
            mask[removed] = False
            for number in range(repeats):
                outputs = _outputs(retrain(mask.copy(), number), targets)
                changes[index, number] = outputs - before[number]
        return changes

    changes = changes_without([one.removed for one in predictions])
    predicted, measured = np.stack([one.change for one in predictions]), changes.mean(axis=1)
    beside = None
    if control:
        drawn = control_sets([one.removed for one in predictions], whole, seed=seed)
        beside = changes_without(drawn).mean(axis=1)
    error = np.full_like(measured, np.nan)
    if repeats > 1:
        error = changes.std(axis=1, ddof=1) / np.sqrt(repeats)
    p, y = predicted.ravel() - predicted.mean(), measured.ravel() - measured.mean()
    length = float(np.sqrt((p @ p) * (y @ y)))
    power = float((predicted**2).sum())
    shrinkage = float((predicted * measured).sum()) / power if power else float("nan")
    if shrinkage < 0.5 and float((measured**2).sum()) < power:
        warnings.warn(
            f"only {shrinkage:.0%} of what these removals were predicted to change did: weights that are "
            "chosen for being large are large by chance too; train more models, or believe the "
            "measured changes",
            EvidenceWarning,
            stacklevel=2,
        )
    correlation = float(p @ y) / length if length else float("nan")
    return VerifiedRemovals(predicted, measured, error, correlation, shrinkage, beside)


def control_sets(removals: Sequence[AnyArray], base: AnyArray, *, seed: int) -> list[AnyArray]:
    """Draw a random set of each removal's size from `base [n]`."""
    rng = np.random.default_rng(seed)
    inside = np.flatnonzero(base)
    return [np.sort(rng.choice(inside, len(removed), replace=False)) for removed in removals]


def _outputs(returned: Any, targets: int) -> AnyArray:
    array = np.asarray(returned, dtype=np.float64)
    if array.shape != (targets,) or not np.isfinite(array).all():
        raise DatamodelsError(
            "the retraining must return one finite output per target",
            code="datamodels.retrain_output",
            found=f"shape {list(array.shape)}",
            expected=[targets],
        )
    return array


@dataclass(frozen=True, slots=True, eq=False)
class DataSupport:
    """Smallest predicted removal that brings each output to the threshold.

    Attributes:
        size: Number of removed examples `[t]`; 0 if the output is there already, -1 if no removal does it.
        removed: Their ids, per target.
        before: Predicted outputs `[t]` before.
        after: Predicted outputs `[t]` after.
    """

    size: AnyArray
    removed: tuple[AnyArray, ...]
    before: AnyArray
    after: AnyArray


@checked(DatamodelsError)
def data_support(fitted: Datamodels, *, threshold: float = 0.0, base: Any = None) -> DataSupport:
    """Find the smallest removal that is predicted to flip each target.

    With margins and a threshold of 0, a flip is a wrong class. For a linear model, removing the most positive weights first is optimal. Costs
    n log n per target.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        threshold: Output at or below which a target counts as flipped.
        base: Mask `[n]` of the training set that rows are removed from; all rows by default.

    Returns:
        Sizes, ids and predicted outputs.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(400, 20, 3)
        >>> fitted = fit(data.masks, data.outputs + 5)
        >>> result = data_support(fitted, threshold=float(data.outputs.mean()))
        >>> bool((result.after[result.size > 0] <= result.before[result.size > 0]).all())
        True
    """
    whole = checked_base(base, len(fitted.weights))
    inside = np.flatnonzero(whole)
    weights = fitted.weights[inside].astype(np.float64)
    before = weights.sum(axis=0) + fitted.bias
    sizes, removed, after = [], [], []
    for target, start in enumerate(before):
        order = np.argsort(-weights[:, target], kind="stable")
        order = order[weights[order, target] > 0]
        remaining = start - np.cumsum(np.concatenate([[0.0], weights[order, target]]))
        flipped = np.flatnonzero(remaining <= threshold)
        size = int(flipped[0]) if len(flipped) else -1
        sizes.append(size)
        removed.append(inside[order[: max(size, 0)]])
        after.append(remaining[size] if size >= 0 else remaining[-1])
    return DataSupport(np.array(sizes), tuple(removed), before, np.array(after))
