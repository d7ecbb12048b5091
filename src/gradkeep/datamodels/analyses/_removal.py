"""What would happen without some training examples: predicted, and checked by retraining."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import checked
from gradkeep.datamodels.analyses._weights import checked_base, checked_ids
from gradkeep.errors import DatamodelsError, EvidenceWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels.fitting._masks import AnyArray
    from gradkeep.datamodels.fitting._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """Predicted outputs `[t]` of a training set, of the same without `removed`, and the change."""

    removed: AnyArray
    before: AnyArray
    after: AnyArray
    change: AnyArray


@checked(DatamodelsError)
def counterfactual(found: Datamodels, removed: Any, *, base: Any = None) -> Counterfactual:
    """The predicted outputs after leaving out some examples of a training set (all, or `base [n]`).

    The change is minus the sum of the removed weights. Datamodels were fitted on subsets of a
    certain size: changes extrapolate to a full set better than outputs do.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(400, 20, 3)
    >>> found = fit(data.masks, data.outputs)
    >>> told = counterfactual(found, [4, 7])
    >>> bool(np.allclose(told.change, -found.weights[[4, 7]].sum(0)))
    True
    """
    n = len(found.weights)
    whole = checked_base(base, n)
    gone = checked_ids("examples", removed, n)
    gone = gone[whole[gone]]
    weights = found.weights.astype(np.float64)
    before = weights[whole].sum(axis=0) + found.bias
    change = -weights[gone].sum(axis=0)
    return Counterfactual(gone, before, before + change, change)


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRemovals:
    """Predicted and measured changes `[removals, t]`, the standard error of the measured ones (NaN
    for a single training), and the correlation of both over removals and targets.

    Weights that were chosen for being large are large by chance too, so that changes fall short of
    what is predicted: `shrinkage` is what is left of it. The `control` are measured changes without
    random sets of the same sizes.
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
            told = "".join(f"{number:>11.4f}" for number in numbers)
            lines.append(f"{removal:>7}{target:>8}{told}")
        lines.append(
            f"correlation {self.correlation:.3f}, {self.shrinkage:.0%} of what was predicted"
        )
        return "\n".join(lines)


@checked(DatamodelsError)
def verify_removals(
    found: Datamodels,
    removals: Sequence[Any],
    retrain: Callable[[AnyArray, int], Any],
    *,
    base: Any = None,
    repeats: int = 1,
    control: bool = False,
    seed: int = 0,
) -> VerifiedRemovals:
    """Train with and without each set of examples, and compare with what was predicted.

    `retrain(mask [n], seed)` returns the outputs `[t]` of a model trained on a mask. The same
    `repeats` seeds train every set, so that part of the noise cancels. `control` also leaves out a
    random set of each size, drawn with `seed`. Costs (removals + 1) x repeats trainings, with the control
    as many removals again. Warns if less than half of what was predicted happens.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(400, 20, 3)
    >>> found = fit(data.masks, data.outputs)
    >>> real = lambda mask, seed: mask @ data.weights + data.bias
    >>> verify_removals(found, [[0, 1], [2, 3, 4], [5]], real).correlation > 0.9
    True
    """
    if repeats < 1 or len(removals) == 0:
        raise DatamodelsError("verification needs a removal and a repeat or more")
    n, targets = found.weights.shape
    whole = checked_base(base, n)
    told = [counterfactual(found, removed, base=whole) for removed in removals]
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

    changes = changes_without([one.removed for one in told])
    predicted, measured = np.stack([one.change for one in told]), changes.mean(axis=1)
    beside = None
    if control:
        drawn = control_sets([one.removed for one in told], whole, seed=seed)
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
    """A random set of each removal's size, of the examples of `base [n]`."""
    rng = np.random.default_rng(seed)
    inside = np.flatnonzero(base)
    return [np.sort(rng.choice(inside, len(removed), replace=False)) for removed in removals]


def _outputs(returned: Any, targets: int) -> AnyArray:
    array = np.asarray(returned, dtype=np.float64)
    if array.shape != (targets,) or not np.isfinite(array).all():
        raise DatamodelsError(
            "the retraining must return one finite output per target",
            found=f"shape {list(array.shape)}",
            expected=[targets],
        )
    return array


@dataclass(frozen=True, slots=True, eq=False)
class DataSupport:
    """Per target the fewest examples whose removal is predicted to bring its output to the threshold
    or below: their number `[t]` (0 if it is there already, -1 if no removal does it), their ids, and
    the predicted outputs before and after `[t]`."""

    size: AnyArray
    removed: tuple[AnyArray, ...]
    before: AnyArray
    after: AnyArray


@checked(DatamodelsError)
def data_support(found: Datamodels, *, threshold: float = 0.0, base: Any = None) -> DataSupport:
    """The smallest removal that is predicted to flip each target: how brittle its output is.

    With margins and threshold 0 a flip is a wrong class. For a linear model taking the most
    positive weights first is the smallest removal there is. Costs n log n per target.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(400, 20, 3)
    >>> found = fit(data.masks, data.outputs + 5)
    >>> told = data_support(found, threshold=float(data.outputs.mean()))
    >>> bool((told.after[told.size > 0] <= told.before[told.size > 0]).all())
    True
    """
    whole = checked_base(base, len(found.weights))
    inside = np.flatnonzero(whole)
    weights = found.weights[inside].astype(np.float64)
    before = weights.sum(axis=0) + found.bias
    sizes, removed, after = [], [], []
    for target, start in enumerate(before):
        order = np.argsort(-weights[:, target], kind="stable")
        order = order[weights[order, target] > 0]
        left = start - np.cumsum(np.concatenate([[0.0], weights[order, target]]))
        flipped = np.flatnonzero(left <= threshold)
        size = int(flipped[0]) if len(flipped) else -1
        sizes.append(size)
        removed.append(inside[order[: max(size, 0)]])
        after.append(left[size] if size >= 0 else left[-1])
    return DataSupport(np.array(sizes), tuple(removed), before, np.array(after))
