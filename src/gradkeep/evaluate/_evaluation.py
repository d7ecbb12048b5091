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


_AT_ONCE = 1 << 24
"""Numbers of a chunk of resamples."""


def check_bounds(level: float, resamples: int) -> None:
    """Validate the level and the number of resamples of an interval."""
    _arguments.number("level", level, error=EvaluationError, above=0, most=0.9999)
    _arguments.count("resamples", resamples, error=EvaluationError, least=100, most=1_000_000)


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


@dataclass(frozen=True, slots=True, eq=False)
class ResampledCorrelation:
    """Rank correlations over subsets, one for each query, and their mean in resamples."""

    items: AnyArray
    """`[T]`; NaN if the outcome is constant"""
    value: float
    draws: AnyArray
    """`[B]`: means with resampled subsets and queries"""
    by_subsets: float
    """Standard deviation that decreases with more subsets."""
    by_queries: float
    """Standard deviation between queries, which more subsets do not decrease."""

    def evaluation(self, metric: str, subject: str, item_ids: AnyArray, **facts: Any) -> Evaluation:
        """Build the evaluation of the mean; `facts` are further arguments of `Evaluation.from_draws`."""
        figures = (self.value, self.draws, self.items)
        return Evaluation.from_draws(metric, subject, *figures, item_ids, **facts)


def rank_correlations(
    predicted: AnyArray, actual: AnyArray, *, resamples: int, universe: str
) -> ResampledCorrelation:
    """Compute Spearman's correlation over subsets of predictions and outcomes `[m, T]`, averaged over queries.

    Ranks are computed once; a resample weights subsets and queries by how often they were drawn. A constant
    prediction of a varying outcome counts as 0. Costs resamples x m x T.
    """
    # By range, because a mean of equal numbers may differ from them in the last bit.
    varies = np.ptp(actual, axis=0) > 0
    if not varies.any():
        raise EvaluationError(
            f"the outputs of all {len(varies)} queries are constant",
            code="evaluate.constant_outputs",
        )
    prediction_varies = np.ptp(predicted, axis=0) > 0
    items = np.where(varies, 0.0, np.nan)
    predictable = np.flatnonzero(varies & prediction_varies)
    p, y = ranks(predicted[:, predictable]), ranks(actual[:, predictable])
    for values in (p, y):
        values -= values.mean(axis=0)
        values /= values.std(axis=0)
    items[predictable] = (p * y).mean(axis=0)
    defined = np.flatnonzero(varies)
    value = float(items[defined].mean())
    by_subset = draw_weights(len(p), resamples, universe, "subsets") / len(p)
    by_query = draw_weights(len(defined), resamples, universe, "queries") / len(defined)
    place = np.searchsorted(defined, predictable)
    draws = np.empty(resamples)
    step = max(1, _AT_ONCE // max(1, 8 * len(predictable)))
    parts = (p, y, p * y, p * p, y * y)
    for start in range(0, resamples, step):
        weights = by_subset[start : start + step]
        ep, ey, epy, epp, eyy = (weights @ part for part in parts)
        spread = np.sqrt(np.maximum(epp - ep * ep, 0) * np.maximum(eyy - ey * ey, 0))
        ratio = np.divide(epy - ep * ey, spread, out=np.zeros_like(spread), where=spread > 0)
        each = np.zeros((len(ratio), len(defined)))
        each[:, place] = np.clip(ratio, -1, 1)
        draws[start : start + step] = (each * by_query[start : start + step]).sum(axis=1)
    # The correlation of few models is biased to 0, that of a resample doubly so.
    draws += value - draws.mean()
    # Correlations of few subsets also differ by chance: the rest of their variance is between queries.
    noise = ((1 - items[predictable] ** 2) ** 2).sum() / (len(p) - 1) / len(defined)
    query_variance = max(0.0, float(items[defined].var()) - noise) / len(defined)
    subset_variance = max(0.0, float(draws.var()) - query_variance)
    return ResampledCorrelation(
        items, value, draws, math.sqrt(subset_variance), math.sqrt(query_variance)
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
        low: Lower ends `[lines, K]`.
        high: Upper ends `[lines, K]`.
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
                f"{value:.3f} [{a:.3f}, {b:.3f}]"
                for value, a, b in zip(values, low, high, strict=True)
            ]
            lines.append(f"{name:<{wide}}" + "".join(f"{text:>22}" for text in cells))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation(TextDisplay):
    """A value about an attribution with its interval and provenance.

    `draws` are the values of resamples, centered on the value. Two evaluations of the same `universe` were
    resampled alike, so that `compare` can test their difference.

    Args:
        metric: Name of the metric.
        subject: What was evaluated: a method and its checkpoints, or a detector.
        value: The value.
        interval: Its interval.
        sizes: Numbers of queries, subsets, seeds and rows.
        truth: What it was compared with, and which half of the subsets.
        universe: Digest of everything that was resampled, and how.
        draws: Values of the resamples `[B]`.
        items: Value of each query or other item `[T]`; NaN if undefined.
        item_ids: Ids of the items `[T]`.
        level: Level of the interval.
        ceiling: Expected value of a perfect prediction, if chance sets a limit.
        spread_by_subsets: Standard deviation that decreases with more subsets.
        spread_by_queries: Standard deviation between queries, which more subsets do not decrease.
        provenance: How the subject was computed.
        curve: Lines behind the value.
        captures: Folder and identity of every capture that the subject was computed from.
    """

    metric: str
    subject: str
    value: float
    interval: tuple[float, float]
    sizes: SampleSizes
    truth: str
    universe: str
    draws: AnyArray = field(repr=False)
    items: AnyArray = field(repr=False)
    item_ids: AnyArray = field(repr=False)
    level: float = 0.95
    ceiling: float | None = None
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
        """True if the interval excludes zero."""
        low, high = self.interval
        return low > 0 or high < 0

    def __str__(self) -> str:
        low, high = self.interval
        text = f"{self.metric} {self.value:.3f} [{low:.3f}, {high:.3f}]"
        if self.share is not None:
            text += f", {self.share:.0%} of the ceiling {self.ceiling:.3f}"
        elif self.ceiling is not None:
            text += ", ceiling 0: models of other seeds do not agree"
        return f"{text}: {self.subject}; {self.sizes}, {self.truth}"

    @classmethod
    def from_draws(
        cls,
        metric: str,
        subject: str,
        value: float,
        draws: AnyArray,
        items: AnyArray,
        item_ids: AnyArray,
        *,
        sizes: SampleSizes,
        truth: str,
        universe: str,
        level: float,
        **facts: Any,
    ) -> Evaluation:
        """Build an evaluation from the values of resamples, which are centered on the value.

        Args:
            metric: Name of the metric.
            subject: What was evaluated.
            value: The value.
            draws: Values of the resamples `[B]`.
            items: Value of each item `[T]`.
            item_ids: Ids of the items `[T]`.
            sizes: Numbers of queries, subsets, seeds and rows.
            truth: What it was compared with.
            universe: Digest of everything that was resampled.
            level: Level of the interval.
            facts: Further fields of `Evaluation`.

        Returns:
            The evaluation.
        """
        draws = draws + value - draws.mean()
        interval = interval_of(draws, value, level)
        required = (metric, subject, value, interval, sizes, truth, universe, draws)
        return cls(*required, items, item_ids, level=level, **facts)

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
        fingerprints |= {"low": self.interval[0], "high": self.interval[1]}
        if self.captures:
            fingerprints["captures"] = json.dumps(dict(self.captures), sort_keys=True)
        values: dict[str, AnyArray] = {
            "draws": np.asarray(self.draws, np.float64),
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
            interval=(float(fingerprints["low"]), float(fingerprints["high"])),
            sizes=SampleSizes(**{part: int(fingerprints[part]) for part in _SIZES}),
            draws=values["draws"],
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
            axes.axvspan(*self.interval, color="#c05621", alpha=0.2)
            axes.set_xlabel(f"{self.metric} of each of {len(self.items)}")
            axes.legend()
        axes.set_title(str(self), fontsize=7, wrap=True)
        return figure


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two evaluations, resample by resample.

    Attributes:
        metric: Name of the metric.
        first: Subject of the first evaluation.
        second: Subject of the second evaluation.
        value: First minus second.
        interval: Its interval.
        level: Level of the interval.
    """

    metric: str
    first: str
    second: str
    value: float
    interval: tuple[float, float]
    level: float

    @property
    def differs(self) -> bool:
        """True if the interval excludes zero."""
        return self.interval[0] > 0 or self.interval[1] < 0

    def __str__(self) -> str:
        low, high = self.interval
        verdict = "differ" if self.differs else "do not differ significantly"
        return (
            f"{self.metric} {self.value:+.3f} [{low:+.3f}, {high:+.3f}]: {self.first} against "
            f"{self.second} {verdict}"
        )


@checked(EvaluationError)
def compare(first: Evaluation, second: Evaluation) -> Difference:
    """Compare two evaluations by the paired bootstrap: both use the same resamples.

    The difference has a narrower interval than each of them, because queries that are hard for one method are
    mostly hard for the other. The resamples are stored, so this costs nothing.

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
    return Difference(
        first.metric,
        first.subject,
        second.subject,
        value,
        interval_of(first.draws - second.draws, value, first.level),
        first.level,
    )


def evaluated(
    metric: str,
    subject: str,
    items: AnyArray,
    *,
    universe: str,
    truth: str,
    item_ids: AnyArray | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    sizes: SampleSizes | None = None,
    provenance: str = "",
    captures: Mapping[str, str] | None = None,
) -> Evaluation:
    """Build the evaluation of the mean of one value per query `[T]`, with an interval over queries."""
    check_bounds(level, resamples)
    defined = np.isfinite(items)
    if not defined.any():
        raise EvaluationError(
            f"{metric} is defined for none of {len(items)} queries", code="evaluate.undefined"
        )
    items = np.asarray(items, np.float64)
    known = items[defined]
    weights = draw_weights(len(known), resamples, universe, "queries")
    return Evaluation.from_draws(
        metric,
        subject,
        float(known.mean()),
        weights @ known / len(known),
        items,
        np.arange(len(items)) if item_ids is None else item_ids,
        sizes=SampleSizes(queries=len(known)) if sizes is None else sizes,
        truth=truth,
        universe=universe,
        level=level,
        provenance=provenance,
        captures=captures or {},
    )


def interval_of(draws: AnyArray, value: float, level: float) -> tuple[float, float]:
    """Return the interval of a value: percentiles of its resamples, shifted to have the value as mean."""
    low, high = np.percentile(draws, (50 * (1 - level), 50 * (1 + level)))
    moved = value - float(draws.mean())
    return float(low) + moved, float(high) + moved


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
