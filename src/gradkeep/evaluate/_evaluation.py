"""Evaluations: values with intervals, their differences, and how they are saved."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._display import TextDisplay
from gradkeep._environment import install_hint
from gradkeep._ranks import ranks
from gradkeep.errors import EvaluationError, MissingExtraError, NotSealedError, SchemaMismatchError
from gradkeep.store import Array, EvaluationKey, Schema, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    AnyArray = np.ndarray[Any, np.dtype[Any]]


LEAST_SEEDS = 3
"""Fewest seeds, or other repetitions, that an interval is computed from."""
_GROUPS = 100
"""Most groups of subsets that are left out in turn."""


def check_level(level: float) -> None:
    """Validate the level of an interval."""
    _arguments.number("level", level, error=EvaluationError, above=0, most=0.9999)


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

    def evaluation(
        self, metric: str, subject: str, item_ids: AnyArray, *, level: float, **facts: Any
    ) -> Evaluation:
        """Build the evaluation of the mean; `facts` are further fields of `Evaluation`."""
        return Evaluation(
            metric,
            subject,
            self.value,
            self.interval(level),
            table=self.table,
            items=self.items,
            item_ids=item_ids,
            level=level,
            **facts,
        )


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


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """Numbers of queries, subsets, seeds and rows behind a value; 0 if not applicable.

    Attributes:
        queries: Number of queries.
        subsets: Number of subsets.
        seeds: Number of seeds.
        rows: Number of rows.
    """

    queries: int = 0
    subsets: int = 0
    seeds: int = 0
    rows: int = 0

    def __str__(self) -> str:
        parts = [f"{self.queries} queries"] if self.queries else []
        if self.subsets:
            parts.append(
                f"{self.subsets} subsets" + (f" x {self.seeds} seeds" if self.seeds else "")
            )
        elif self.seeds:
            parts.append(f"{self.seeds} seeds")
        if self.rows:
            parts.append(f"{self.rows} rows")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Lines over one axis, each with its interval.

    Attributes:
        along: Name of the axis.
        at: Positions on the axis `[K]`.
        names: Names of the lines.
        values: `[lines, K]`.
        low: Lower ends `[lines, K]`; NaN without an interval.
        high: Upper ends `[lines, K]`; NaN without an interval.
    """

    along: str
    at: AnyArray
    names: tuple[str, ...]
    values: AnyArray
    low: AnyArray
    high: AnyArray

    def __str__(self) -> str:
        wide = max(len(self.along), *(len(name) for name in self.names))
        head = "".join(f"{value:>22g}" for value in self.at.tolist())
        lines = [f"{self.along:<{wide}}{head}"]
        for name, values, low, high in zip(
            self.names, self.values, self.low, self.high, strict=True
        ):
            cells = [
                f"{value:.3f}" + ("" if np.isnan(a) else f" [{a:.3f}, {b:.3f}]")
                for value, a, b in zip(values, low, high, strict=True)
            ]
            lines.append(f"{name:<{wide}}" + "".join(f"{text:>22}" for text in cells))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation(TextDisplay):
    """A value about an attribution with its interval and provenance.

    Two evaluations of the same `universe` have the same queries, and the same seeds or subsets, so that `compare`
    can test their difference.

    Args:
        metric: Name of the metric.
        subject: What was evaluated: a method and its checkpoints, or a detector.
        value: The value.
        interval: Its interval; None with fewer than 3 seeds, or fewer than 3 queries of a mean over queries alone.
        sizes: Numbers of queries, subsets, seeds and rows.
        truth: What it was compared with, and which half of the subsets.
        universe: Digest of queries, subsets, seeds and level.
        items: Value of each query or other item `[T]`; NaN if undefined.
        item_ids: Ids of the items `[T]`.
        level: Level of the interval.
        draws: Values of bootstrap resamples `[B]`, centered on the value, for metrics without a table.
        table: Values `[queries, seeds or subsets]` that the interval was computed from; one column for means over
            queries alone.
        ceiling: Expected value of a perfect prediction, if chance sets a limit.
        ceiling_interval: Interval of the ceiling.
        spread_by_subsets: Standard deviation that decreases with more subsets.
        spread_by_queries: Standard deviation between queries, which more subsets do not decrease.
        provenance: How the subject was computed.
        curve: Lines behind the value.
        captures: Folder and identity of every capture that the subject was computed from.
    """

    metric: str
    subject: str
    value: float
    interval: tuple[float, float] | None
    sizes: SampleSizes
    truth: str
    universe: str
    items: AnyArray = field(repr=False)
    item_ids: AnyArray = field(repr=False)
    level: float = 0.95
    draws: AnyArray | None = field(default=None, repr=False)
    table: AnyArray | None = field(default=None, repr=False)
    ceiling: float | None = None
    ceiling_interval: tuple[float, float] | None = None
    spread_by_subsets: float | None = None
    spread_by_queries: float | None = None
    provenance: str = ""
    curve: Curve | None = None
    captures: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def share(self) -> float | None:
        """Value as a share of its ceiling."""
        return self.value / self.ceiling if self.ceiling else None

    @property
    def from_zero(self) -> bool:
        """True if there is an interval that excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def above_zero(self) -> bool:
        """True if there is an interval, and all of it is above zero."""
        return self.interval is not None and self.interval[0] > 0

    def __str__(self) -> str:
        text = f"{self.metric} {self.value:.3f} {format_interval(self.interval)}"
        if self.ceiling is not None:
            share = "" if self.share is None else f"{self.share:.0%} of the "
            text += f", {share}ceiling {self.ceiling:.3f} {format_interval(self.ceiling_interval)}"
            if self.ceiling == 0:
                text += " (models of other seeds do not agree)"
            elif self.value > self.ceiling:
                text += " (above the ceiling, which is an estimate)"
        return f"{text}: {self.subject}; {self.sizes}, {self.truth}"

    @checked(EvaluationError)
    def save(self, name: str, *, store: Store) -> None:
        """Save the evaluation in a store; saving it again does nothing.

        Args:
            name: Name of the evaluation.
            store: The store.

        Raises:
            EvaluationError: Another evaluation has that name.
        """
        fingerprints: dict[str, Any] = {part: getattr(self, part) for part in (*_TEXTS, *_NUMBERS)}
        fingerprints |= {part: getattr(self.sizes, part) for part in _SIZES}
        for prefix, interval in (("", self.interval), ("ceiling_", self.ceiling_interval)):
            low, high = (None, None) if interval is None else interval
            fingerprints |= {f"{prefix}low": low, f"{prefix}high": high}
        if self.captures:
            fingerprints["captures"] = json.dumps(dict(self.captures), sort_keys=True)
        values: dict[str, AnyArray] = {
            part: np.asarray(array, np.float64)
            for part, array in (("draws", self.draws), ("table", self.table))
            if array is not None
        }
        values |= {
            "items": np.asarray(self.items, np.float64),
            "item_ids": np.asarray(self.item_ids, np.int64),
        }
        if self.curve is not None:
            fingerprints |= {
                "along": self.curve.along,
                "lines": _BETWEEN.join(self.curve.names),
            }
            values |= {
                "curve_at": np.asarray(self.curve.at, np.float64),
                "curve": np.stack([self.curve.values, self.curve.low, self.curve.high]),
            }
        arrays = tuple(
            Array(part, str(value.dtype), value.shape, kind="data", nan="keep")
            if value.dtype.kind == "f"
            else Array(part, str(value.dtype), value.shape, kind="data")
            for part, value in values.items()
        )
        try:
            with store.write(
                EvaluationKey(name), Schema(arrays, num_rows=1, fingerprints=fingerprints)
            ) as out:
                if out.needs(1):
                    out.append(np.zeros(1, np.int64), {part: v[None] for part, v in values.items()})
                else:
                    out.skip(np.zeros(1, np.int64))
        except SchemaMismatchError as error:
            raise EvaluationError(
                f"another evaluation is saved as {name!r}",
                code="evaluate.name_taken",
                path=error.path,
                found=error.found,
                fix="Use another name, or delete it with gradkeep delete STORE evaluations/NAME --yes.",
            ) from None

    @classmethod
    @checked(EvaluationError)
    def load(cls, store: Store, name: str) -> Evaluation:
        """Load a saved evaluation.

        Args:
            store: The store.
            name: Name of the evaluation.

        Returns:
            The evaluation.

        Raises:
            EvaluationError: There is none, or a capture has changed since.
        """
        known = [key.name for key in store.evaluations()]
        if name not in known:
            raise EvaluationError(
                f"there is no evaluation {name!r}",
                code="evaluate.unknown_evaluation",
                path=store.location,
                found=", ".join(known) or "no saved evaluations",
                fix="Save one with `gradkeep evaluate lds STORE` or Evaluation.save.",
            )
        try:
            block = store.read(EvaluationKey(name))
        except NotSealedError as error:
            raise EvaluationError(
                f"the evaluation {name!r} is incomplete",
                code="evaluate.incomplete",
                path=error.path,
                fix="Save it again.",
            ) from error
        fingerprints: Mapping[str, Any] = block.schema.fingerprints
        command = f"gradkeep evaluate all {store.location}"
        store.require_current(EvaluationKey(name), fingerprints, OutdatedEvaluationError, command)
        values = {part: np.asarray(block.column(part))[0] for part in block.names}
        curve = None
        if "curve" in values:
            middle, low, high = values["curve"]
            names = tuple(str(fingerprints["lines"]).split(_BETWEEN))
            curve = Curve(str(fingerprints["along"]), values["curve_at"], names, middle, low, high)
        texts: Any = {part: str(fingerprints[part]) for part in _TEXTS}
        numbers: Any = {part: fingerprints[part] for part in _NUMBERS}
        return cls(
            **texts,
            **numbers,
            interval=_saved_interval(fingerprints, ""),
            ceiling_interval=_saved_interval(fingerprints, "ceiling_"),
            sizes=SampleSizes(**{part: int(fingerprints[part]) for part in _SIZES}),
            draws=values.get("draws"),
            table=values.get("table"),
            items=values["items"],
            item_ids=values["item_ids"],
            curve=curve,
            captures=store.capture_identities(fingerprints),
        )

    def plot(self) -> Any:
        """Plot the curve if there is one, else the distribution of the items, as a `matplotlib` figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("plots need matplotlib", fix=install_hint("remat")) from error
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        if self.curve is not None:
            curve = self.curve
            for row, name in enumerate(curve.names):
                axes.plot(curve.at, curve.values[row], marker="o", label=name)
                axes.fill_between(curve.at, curve.low[row], curve.high[row], alpha=0.2)
            axes.set_xlabel(curve.along)
            axes.set_ylabel(self.metric)
            axes.legend()
        else:
            axes.hist(self.items[np.isfinite(self.items)], bins=30, color="#2b6cb0")
            axes.axvline(self.value, color="#c05621", label=f"{self.value:.3f}")
            if self.interval is not None:
                axes.axvspan(*self.interval, color="#c05621", alpha=0.2)
            axes.set_xlabel(f"{self.metric} of each of {len(self.items)}")
            axes.legend()
        axes.set_title(str(self), fontsize=7, wrap=True)
        return figure


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two evaluations of the same queries and seeds or subsets.

    Attributes:
        metric: Name of the metric.
        first: Subject of the first evaluation.
        second: Subject of the second evaluation.
        value: First minus second.
        interval: Its interval; None if the evaluations have none.
        level: Level of the interval.
    """

    metric: str
    first: str
    second: str
    value: float
    interval: tuple[float, float] | None
    level: float

    @property
    def differs(self) -> bool:
        """True if there is an interval that excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def above_zero(self) -> bool:
        """True if there is an interval, and all of it is above zero."""
        return self.interval is not None and self.interval[0] > 0

    def __str__(self) -> str:
        verdict = "differ" if self.differs else "do not differ significantly"
        if self.interval is None:
            verdict = "cannot be told apart without an interval"
        return (
            f"{self.metric} {self.value:+.3f} {format_interval(self.interval, '+.3f')}: {self.first} "
            f"against {self.second} {verdict}"
        )


@checked(EvaluationError)
def compare(first: Evaluation, second: Evaluation) -> Difference:
    """Compare two evaluations pair by pair: their queries, and their seeds or subsets, are the same.

    The difference has a narrower interval than each of them, because queries that are hard for one method are
    mostly hard for the other. The values behind both are stored, so this costs nothing.

    Args:
        first: An evaluation.
        second: Another one with the same metric and universe.

    Returns:
        First minus second, with an interval.

    Raises:
        EvaluationError: Metric or universe differ.

    Example:
        >>> one = evaluated("lds", "kernel", np.array([0.5, 0.7, 0.6]), universe="u", truth="halves")
        >>> other = evaluated("lds", "dot", np.array([0.1, 0.4, 0.3]), universe="u", truth="halves")
        >>> compare(one, other).differs
        True
    """
    if (first.metric, first.universe) != (second.metric, second.universe):
        raise EvaluationError(
            "the evaluations have different metrics or resamples",
            code="evaluate.not_comparable",
            found=f"{first.metric} of {first.sizes} ({first.truth}) and {second.metric} of "
            f"{second.sizes} ({second.truth})",
            fix="Use the same metric, truth, queries, level and resamples for both.",
        )
    value = first.value - second.value
    if first.table is not None and second.table is not None:
        interval = mean_interval(first.table - second.table, first.level)
        if interval is not None:
            interval = min(interval[0], value), max(interval[1], value)
    elif first.draws is not None and second.draws is not None:
        interval = interval_of(first.draws - second.draws, value, first.level)
    else:
        raise EvaluationError(
            "one of the evaluations was saved by an older version, with other intervals",
            code="evaluate.not_comparable",
            found=f"{first.subject} and {second.subject}",
            fix="Evaluate both again.",
        )
    return Difference(first.metric, first.subject, second.subject, value, interval, first.level)


def evaluated(
    metric: str,
    subject: str,
    items: AnyArray,
    *,
    universe: str,
    truth: str,
    item_ids: AnyArray | None = None,
    level: float = 0.95,
    share: bool = False,
    sizes: SampleSizes | None = None,
    provenance: str = "",
    captures: Mapping[str, str] | None = None,
) -> Evaluation:
    """Build the evaluation of the mean of one value per query `[T]`, or the share of true ones."""
    check_level(level)
    defined = np.isfinite(items)
    if not defined.any():
        raise EvaluationError(
            f"{metric} is defined for none of {len(items)} queries", code="evaluate.undefined"
        )
    items = np.asarray(items, np.float64)
    table = items[defined][:, None]
    return Evaluation(
        metric,
        subject,
        float(table.mean()),
        mean_interval(table, level, share=share),
        items=items,
        item_ids=np.arange(len(items)) if item_ids is None else item_ids,
        sizes=SampleSizes(queries=len(table)) if sizes is None else sizes,
        truth=truth,
        universe=universe,
        level=level,
        table=table,
        provenance=provenance,
        captures=captures or {},
    )


def interval_of(draws: AnyArray, value: float, level: float) -> tuple[float, float]:
    """Return the interval of a value: percentiles of its resamples, shifted to have the value as mean."""
    low, high = np.percentile(draws, (50 * (1 - level), 50 * (1 + level)))
    moved = value - float(draws.mean())
    return float(low) + moved, float(high) + moved


def _saved_interval(fingerprints: Mapping[str, Any], prefix: str) -> tuple[float, float] | None:
    low, high = (fingerprints.get(f"{prefix}{end}") for end in ("low", "high"))
    return None if low is None or high is None else (float(low), float(high))


_TEXTS = ("metric", "subject", "truth", "universe", "provenance")
_NUMBERS = ("value", "level", "ceiling", "spread_by_subsets", "spread_by_queries")
_SIZES = ("queries", "subsets", "seeds", "rows")
_BETWEEN = "\n"


class OutdatedEvaluationError(EvaluationError):
    """An evaluation of rows that the store no longer holds."""


@checked(EvaluationError)
def evaluations(store: Store | str | os.PathLike[str]) -> dict[str, Evaluation]:
    """Load all evaluations of a store.

    An evaluation of captures that have changed since is left out with a warning.

    Args:
        store: The store, or its path.

    Returns:
        The evaluations by name.
    """
    opened = open_store(store, create=False)
    loaded: dict[str, Evaluation] = {}
    for key in opened.evaluations():
        try:
            loaded[key.name] = Evaluation.load(opened, key.name)
        except OutdatedEvaluationError as error:
            warnings.warn(str(error), stacklevel=2)
    return loaded
