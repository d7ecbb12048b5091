"""Data values and memorization from models with and without each example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep._arguments import checked
from gradkeep.datamodels.fitting._masks import Masks
from gradkeep.datamodels.fitting._options import checked_outputs
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels.fitting._masks import AnyArray

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
