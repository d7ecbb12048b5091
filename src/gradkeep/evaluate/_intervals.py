"""Intervals of means, shares and rank correlations over queries, subsets and seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import xxhash

from gradkeep._arguments import Limits
from gradkeep._ranks import ranks
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    AnyArray = np.ndarray[Any, np.dtype[Any]]


LEAST_SEEDS = 3
"""Fewest seeds, or other repetitions, that an interval is computed from."""
_GROUPS = 100
"""Most groups of subsets that are left out in turn."""


Level = Annotated[float, Limits(above=0, below=1)]
"""Share of intervals that cover."""


def digest_of(*parts: Any) -> str:
    """Return a digest of arrays and other values, to identify what was resampled."""
    digest = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def draw_weights(count: int, resamples: int, universe: str, what: str) -> AnyArray:
    """Draw how often each of `count` items occurs in each resample `[B, count]`, determined by the universe."""
    seed = xxhash.xxh3_64_intdigest(f"{universe}/{what}".encode())
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Spread:
    """Variance of the mean of a table `[rows, columns]`, by source, with its degrees of freedom."""

    by_columns: float
    by_rows: float
    by_controls: float
    freedom: float

    @property
    def total(self) -> float:
        """Variance of the mean."""
        return self.by_columns + self.by_rows + self.by_controls

    def margin(self, level: float) -> float:
        """Return half the width of the interval."""
        return student_quantile(level, self.freedom) * math.sqrt(self.total)


def spread_of(table: AnyArray, controls: AnyArray | None = None) -> Spread | None:
    """Estimate the variance of the mean of a table whose rows and columns are both samples.

    Rows are queries; columns are seeds or subsets, or there is a single one. The noise of single cells is part
    of the variance between columns and is subtracted from that between rows, so that it counts once. Degrees of
    freedom are Satterthwaite's.

    Args:
        table: Values `[rows, columns]`.
        controls: Means of the control sets `[controls, columns]` that were subtracted from all rows.

    Returns:
        The spread; None with fewer than 3 columns, or with one column and fewer than 3 rows.
    """
    rows, columns = table.shape
    if (rows if columns == 1 else columns) < LEAST_SEEDS:
        return None
    by_rows, noise = _variance_of_means(table)
    if columns == 1:
        return Spread(0.0, by_rows, 0.0, rows - 1)
    by_columns, _ = _variance_of_means(table.T)
    by_rows = max(0.0, by_rows - noise)
    by_controls, freedom_of_controls = 0.0, 1
    if controls is not None and len(controls) > 1:
        by_controls, noise = _variance_of_means(controls)
        by_controls, freedom_of_controls = max(0.0, by_controls - noise), len(controls) - 1
    total = by_columns + by_rows + by_controls
    squares = by_columns**2 / (columns - 1) + by_controls**2 / freedom_of_controls
    squares += by_rows**2 / max(1, rows - 1)
    freedom = total**2 / squares if squares > 0 else columns - 1
    return Spread(by_columns, by_rows, by_controls, freedom)


def _variance_of_means(table: AnyArray) -> tuple[float, float]:
    """Return the variance of the mean of the row means, and the part of it that is noise of single cells."""
    rows, columns = table.shape
    if rows == 1:
        return 0.0, 0.0
    means = table.mean(axis=1)
    residual = table - means[:, None] - table.mean(axis=0) + means.mean()
    cells = float((residual**2).sum()) / max(1, (rows - 1) * (columns - 1))
    return float(means.var(ddof=1)) / rows, cells / (rows * columns)


def student_quantile(level: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t.

    >>> round(student_quantile(0.95, 2), 2), round(student_quantile(0.95, 9.0), 2)
    (4.3, 2.26)
    """
    # With t = sqrt(freedom) tan(angle) the density is proportional to cos(angle) ** (freedom - 1). Above
    # 10,000 degrees t is normal to four digits.
    freedom = min(max(freedom, 1.0), 1e4)
    angles = np.linspace(0, math.pi / 2, 40_001)[:-1]
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, below / below[-1], angles)))


def mean_interval(
    table: AnyArray, level: float, *, controls: AnyArray | None = None, share: bool = False
) -> tuple[float, float] | None:
    """Return the interval of the mean of a table `[rows, columns]` by Student's t, or of a share by Wilson."""
    value = float(table.mean())
    if share and table.shape[1] == 1:
        return wilson_interval(value, len(table), student_quantile(level, math.inf))
    spread = spread_of(table, controls)
    if spread is None:
        return None
    if not share:
        margin = spread.margin(level)
        return value - margin, value + margin
    # As many independent answers as would have this variance; without any variance, one for each query.
    varies = spread.total > 0 and 0 < value < 1
    count = value * (1 - value) / spread.total if varies else len(table)
    count = min(max(count, 1.0), float(table.size))
    return wilson_interval(value, count, student_quantile(level, spread.freedom))


def wilson_interval(share: float, count: float, z: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of `count` answers; `z` is the quantile of its level.

    >>> low, high = wilson_interval(0.0, 10, 1.96)
    >>> low, round(high, 3)
    (0.0, 0.278)
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    margin = (
        z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    )
    return (
        0.0 if share == 0 else max(0.0, middle - margin),
        1.0 if share == 1 else min(1.0, middle + margin),
    )


def format_interval(interval: tuple[float, float] | None, style: str = ".3f") -> str:
    """Format an interval, or say that there is none."""
    if interval is None:
        return "[no interval]"
    return f"[{interval[0]:{style}}, {interval[1]:{style}}]"


@dataclass(frozen=True, slots=True, eq=False)
class RankCorrelations:
    """Rank correlations over subsets, one for each query, and their jackknife values."""

    items: AnyArray
    """`[T]`; NaN if the outcome is constant"""
    value: float
    """Their mean."""
    table: AnyArray
    """Jackknife values `[defined queries, groups of subsets]`; their mean is corrected for bias."""

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return the interval of the mean correlation with infinitely many subsets and queries."""
        spread = spread_of(self.table)
        if spread is None:
            return None
        middle, margin = float(self.table.mean()), spread.margin(level)
        low, high = middle - margin, middle + margin
        if len(self.table) == 1:
            # A single correlation of few pairs is skewed: cover Fisher's interval as well.
            center = math.atanh(min(max(middle, -0.9995), 0.9995))
            scale = margin / (1 - min(self.value**2, 0.999))
            low, high = min(low, math.tanh(center - scale)), max(high, math.tanh(center + scale))
        return max(-1.0, min(low, self.value)), min(1.0, max(high, self.value))


def rank_correlations(predicted: AnyArray, actual: AnyArray) -> RankCorrelations:
    """Compute Spearman's correlation over subsets of predictions and outcomes `[m, T]`, averaged over queries.

    Leaves out every subset in turn (groups of them if there are more than 100). A constant prediction of a
    varying outcome counts as 0. Costs m x min(m, 100) x T.
    """
    # By range, because a mean of equal numbers may differ from them in the last bit.
    varies = np.ptp(actual, axis=0) > 0
    if not varies.any():
        raise EvaluationError(
            f"the outputs of all {len(varies)} queries are constant",
            code="evaluate.constant_outputs",
        )
    defined = np.flatnonzero(varies)
    items = np.full(len(varies), np.nan)
    items[defined], table = jackknife_correlations(predicted[:, defined], actual[:, defined])
    return RankCorrelations(items, float(items[defined].mean()), table)


def jackknife_correlations(one: AnyArray, other: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return Spearman's correlations `[T]` of columns of two tables `[m, T]`, and jackknife values `[T, groups]`.

    The jackknife value of a group is groups x all - (groups - 1) x without it.
    """
    count, columns = one.shape
    groups = min(count, _GROUPS)
    member = (np.arange(count) * groups // count)[:, None] == np.arange(groups)
    rest = np.where(member, 0.0, 1.0)
    rank_pairs = ranks(one), ranks(other)
    whole = _correlations(*rank_pairs, np.ones((count, 1)))
    without = np.empty((columns, groups))
    for column in range(columns):
        first, second = (
            values[:, column, None] - _count_below(table[:, column], member)
            for values, table in zip(rank_pairs, (one, other), strict=True)
        )
        without[column] = _correlations(first, second, rest)
    return whole, groups * whole[:, None] - (groups - 1) * without


def _count_below(values: AnyArray, member: AnyArray) -> AnyArray:
    """Count the members of each group below each of the values `[m, groups]`; equal ones count half."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    counts = np.zeros((len(values) + 1, member.shape[1]))
    np.cumsum(member[order], axis=0, out=counts[1:])
    first, last = (np.searchsorted(ordered, ordered, side) for side in ("left", "right"))
    out = np.empty((len(values), member.shape[1]))
    out[order] = (counts[first] + counts[last]) / 2
    return out


def _correlations(one: AnyArray, other: AnyArray, weights: AnyArray) -> AnyArray:
    """Compute weighted correlations of columns; 0 if one of them is constant."""
    total = weights.sum(axis=0)
    first, second = (values - (weights * values).sum(axis=0) / total for values in (one, other))
    squares = (weights * first * first).sum(axis=0) * (weights * second * second).sum(axis=0)
    size = np.sqrt(squares)
    product = (weights * first * second).sum(axis=0)
    # Ranks of at most a million rows: a spread below this is rounding of a constant.
    varies = size > 1e-9
    return np.asarray(
        np.clip(np.divide(product, size, out=np.zeros_like(size), where=varies), -1, 1)
    )


def interval_of(draws: AnyArray, value: float, level: float) -> tuple[float, float]:
    """Return the interval of a value: percentiles of its resamples, shifted to have the value as mean."""
    low, high = np.percentile(draws, (50 * (1 - level), 50 * (1 + level)))
    moved = value - float(draws.mean())
    return float(low) + moved, float(high) + moved
