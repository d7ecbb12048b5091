"""Evaluations: values with intervals, their differences, and how they are saved."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import checked
from gradkeep._display import TextDisplay
from gradkeep._environment import import_extra
from gradkeep.errors import EvaluationError, NotSealedError, SchemaMismatchError
from gradkeep.evaluate._intervals import (
    RankCorrelations,
    format_interval,
    interval_of,
    mean_interval,
)
from gradkeep.store import Array, EvaluationKey, Schema, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from gradkeep.evaluate._truth import Ceiling

    AnyArray = np.ndarray[Any, np.dtype[Any]]


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
        matplotlib = import_extra("matplotlib.figure", extra="remat", what="a plot")
        figure = matplotlib.Figure(figsize=(6.4, 4), layout="constrained")
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


def evaluate_correlations(
    correlation: RankCorrelations,
    metric: str,
    subject: str,
    *,
    level: float,
    ceiling: Ceiling | None,
    **facts: Any,
) -> Evaluation:
    """Build the evaluation of a mean correlation; `facts` are further fields of `Evaluation`."""
    return Evaluation(
        metric,
        subject,
        correlation.value,
        correlation.interval(level),
        table=correlation.table,
        items=correlation.items,
        level=level,
        ceiling=None if ceiling is None else ceiling.value,
        ceiling_interval=None if ceiling is None else ceiling.interval,
        **facts,
    )


def evaluate_table(
    metric: str,
    subject: str,
    table: AnyArray,
    *,
    level: float,
    controls: AnyArray | None = None,
    share: bool = False,
    items: AnyArray | None = None,
    **facts: Any,
) -> Evaluation:
    """Build the evaluation of the mean of a table `[T, seeds]`; `facts` are further fields of `Evaluation`."""
    return Evaluation(
        metric,
        subject,
        float(table.mean()),
        mean_interval(table, level, controls=controls, share=share),
        items=table.mean(axis=1) if items is None else items,
        level=level,
        table=table,
        **facts,
    )


def evaluated(
    metric: str,
    subject: str,
    items: AnyArray,
    *,
    level: float = 0.95,
    share: bool = False,
    **facts: Any,
) -> Evaluation:
    """Build the evaluation of the mean of one value per query `[T]`, or the share of true ones."""
    items = np.asarray(items, np.float64)
    table = items[np.isfinite(items)][:, None]
    if not len(table):
        raise EvaluationError(
            f"{metric} is defined for none of {len(items)} queries", code="evaluate.undefined"
        )
    facts = {
        "item_ids": np.arange(len(items)),
        "sizes": SampleSizes(queries=len(table)),
        **facts,
    }
    return evaluate_table(metric, subject, table, level=level, share=share, items=items, **facts)


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
