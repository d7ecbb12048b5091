"""How well outputs are predicted, with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, NonNegativeInt, PositiveInt, checked
from gradkeep._ranks import ranks
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray

_AT_ONCE = 100


@dataclass(frozen=True, slots=True, eq=False)
class Correlation:
    """Correlation of predicted and true outputs over models, with intervals.

    A constant prediction of a varying target counts as 0. A constant output gives NaN and is excluded from the mean.

    Attributes:
        value: Correlations `[t]`.
        low: Lower ends of the intervals `[t]`.
        high: Upper ends of the intervals `[t]`.
        mean: Mean over targets.
        mean_low: Lower end of its interval.
        mean_high: Upper end of its interval.
        models: Number of models.
        level: Level of the intervals.
        kind: `"pearson"` or `"spearman"`.
        constant_outputs: Targets with a constant output.
        constant_predictions: Targets with a constant prediction, mostly because no weights predict best.
    """

    value: AnyArray
    low: AnyArray
    high: AnyArray
    mean: float
    mean_low: float
    mean_high: float
    models: int
    level: float
    kind: Literal["pearson", "spearman"]
    constant_outputs: tuple[int, ...] = ()
    """Targets whose output is the same for all these models: NaN."""
    constant_predictions: tuple[int, ...] = ()
    """Targets that vary but are predicted to be the same, mostly because a fit without weights
    predicted best: 0."""

    def __str__(self) -> str:
        text = (
            f"{self.kind} {self.mean:.3f} [{self.mean_low:.3f}, {self.mean_high:.3f}] over "
            f"{self.models} models, mean of {len(self.value) - len(self.constant_outputs)} targets"
        )
        if self.constant_predictions:
            text += f", {len(self.constant_predictions)} of them with constant predictions (0)"
        if self.constant_outputs:
            text += f", without {len(self.constant_outputs)} whose output is constant"
        return text


@checked(DatamodelsError)
def correlation(
    predicted: AnyArray,
    actual: AnyArray,
    *,
    kind: Literal["pearson", "spearman"] = "pearson",
    level: Annotated[float, Limits(above=0, below=1)] = 0.95,
    resamples: PositiveInt = 1000,
    seed: NonNegativeInt = 0,
) -> Correlation:
    """Correlate predictions and outputs over models, with bootstrap intervals.

    Models are resampled with replacement, alike for all targets. Costs resamples x m x t.

    Args:
        predicted: Predictions `[m, t]`.
        actual: Outputs `[m, t]`.
        kind: `"pearson"`, or `"spearman"` for ranks: its mean over targets is the linear datamodeling score.
        level: Level of the intervals.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        Correlations of all targets, their mean, and intervals.

    Example:
        >>> x = np.arange(20.0)[:, None]
        >>> fitted = correlation(x, x ** 3, kind="spearman")
        >>> round(fitted.mean, 6), fitted.models
        (1.0, 20)
    """
    p, y = _two_dimensional(predicted), _two_dimensional(actual)
    if p.ndim != 2 or p.shape != y.shape or len(p) < 3:
        raise DatamodelsError(
            "a correlation needs as many predictions as outputs, of three models or more",
            code="datamodels.correlation_shape",
            found=f"predictions {list(p.shape)}, outputs {list(y.shape)}",
        )
    # By range: a mean of equal numbers may differ from them in the last bit.
    still = np.ptp(y, axis=0) == 0
    silent = (np.ptp(p, axis=0) == 0) & ~still
    if kind == "spearman":
        p, y = ranks(p), ranks(y)
    p, y = p - p.mean(axis=0), y - y.mean(axis=0)
    for values, constant in ((p, still | silent), (y, still)):
        values /= np.where(constant, np.nan, values.std(axis=0))
    p[:, silent] = 0.0
    value = (p * y).mean(axis=0)
    drawn = np.empty((resamples, p.shape[1]))
    rng = np.random.default_rng(seed)
    parts = np.concatenate([p, y, p * y, p * p, y * y], axis=1)
    for start in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - start)
        # How often each model was drawn, counted for all resamples at once; as floats, because
        # there is no fast product of whole numbers.
        chosen = rng.integers(len(p), size=(count, len(p))) + len(p) * np.arange(count)[:, None]
        times = np.bincount(chosen.ravel(), minlength=count * len(p)).reshape(count, len(p))
        summed = times.astype(np.float64) @ parts / len(p)
        ep, ey, epy, epp, eyy = np.split(summed, 5, axis=1)
        spread = np.sqrt(np.maximum(epp - ep * ep, 0) * np.maximum(eyy - ey * ey, 0))
        ratio = np.divide(epy - ep * ey, spread, out=np.full_like(spread, np.nan), where=spread > 0)
        ratio[:, silent] = 0.0
        drawn[start : start + count] = np.clip(ratio, -1, 1)
    tails = (50 * (1 - level), 50 * (1 + level))
    low, high = _percentiles(drawn, value, tails)
    defined = ~np.isnan(value)
    means = drawn[:, defined].mean(axis=1) if defined.any() else np.full(resamples, np.nan)
    mean = float(value[defined].mean()) if defined.any() else float("nan")
    (mean_low,), (mean_high,) = _percentiles(means[:, None], np.array([mean]), tails)
    return Correlation(
        value,
        low,
        high,
        mean,
        float(mean_low),
        float(mean_high),
        len(p),
        level,
        kind,
        constant_outputs=tuple(np.flatnonzero(still).tolist()),
        constant_predictions=tuple(np.flatnonzero(silent).tolist()),
    )


def _percentiles(
    drawn: AnyArray, value: AnyArray, tails: tuple[float, float]
) -> tuple[AnyArray, AnyArray]:
    """Percentiles of each column without its NaN; NaN where nothing else is there.

    The draws are moved to have the value as their mean: a correlation of few models is too near
    to 0, that of a resample doubly so.
    """
    percentiles = np.full((2, drawn.shape[1]), np.nan)
    for column in range(drawn.shape[1]):
        values = drawn[:, column]
        values = values[~np.isnan(values)]
        if len(values):
            percentiles[:, column] = np.percentile(values, tails) + value[column] - values.mean()
    low, high = np.clip(percentiles, -1, 1)
    return low, high


def _two_dimensional(values: AnyArray) -> AnyArray:
    array = _arguments.array("it", values, error=DatamodelsError).astype(np.float64)
    return array[:, None] if array.ndim == 1 else array
