"""Evaluations: a figure with its interval, how two of them differ, and how they are saved."""

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
from gradkeep._ranks import ranks
from gradkeep._surroundings import install_hint
from gradkeep.errors import EvaluationError, MissingExtraError, NotSealedError, SchemaMismatchError
from gradkeep.store import Array, EvaluationKey, Schema, Store
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_AT_ONCE = 1 << 24
"""Numbers that a part of the resamples may take."""


def check_bounds(level: float, resamples: int) -> None:
    """Refuse a level or a number of resamples that no interval can be made with."""
    _arguments.number("level", level, error=EvaluationError, above=0, most=0.9999)
    _arguments.count("resamples", resamples, error=EvaluationError, least=100, most=1_000_000)


def digest_of(*parts: Any) -> str:
    """One short name for arrays and words: what tells two universes of resamples apart."""
    found = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype.str}{part.shape}".encode())
            found.update(np.ascontiguousarray(part).data)
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


def draw_weights(count: int, resamples: int, universe: str, what: str) -> AnyArray:
    """How often each of `count` things is drawn in each resample `[B, count]`, by the universe alone."""
    seed = xxhash.xxh3_64_intdigest(f"{universe}/{what}".encode())
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ResampledCorrelation:
    """Correlations of ranks over subsets, one for each query, and their mean in resamples."""

    items: AnyArray
    """`[T]`; NaN where the outcome is constant"""
    value: float
    draws: AnyArray
    """`[B]`: subsets and queries drawn anew"""
    by_subsets: float
    """The standard deviation that more subsets would lessen."""
    by_queries: float
    """The standard deviation that stays with any number of subsets: queries differ."""

    def evaluation(self, metric: str, subject: str, item_ids: AnyArray, **facts: Any) -> Evaluation:
        """The evaluation of the mean; `facts` are further arguments of `Evaluation.from_draws`."""
        figures = (self.value, self.draws, self.items)
        return Evaluation.from_draws(metric, subject, *figures, item_ids, **facts)


def rank_correlations(
    predicted: AnyArray, actual: AnyArray, *, resamples: int, universe: str
) -> ResampledCorrelation:
    """Spearman's correlation over subsets of predictions and outcomes `[m, T]`, averaged over queries.

    Ranks are made once; a resample weighs subsets and queries by how often it drew them. A constant
    prediction of an outcome that varies counts as 0. Costs resamples x m x T.
    """
    # By range: a mean of equal numbers may differ from them in the last bit.
    varies = np.ptp(actual, axis=0) > 0
    if not varies.any():
        raise EvaluationError(
            f"the outputs of all {len(varies)} queries are constant: there is nothing to predict"
        )
    says = np.ptp(predicted, axis=0) > 0
    items = np.where(varies, 0.0, np.nan)
    told = np.flatnonzero(varies & says)
    p, y = ranks(predicted[:, told]), ranks(actual[:, told])
    for values in (p, y):
        values -= values.mean(axis=0)
        values /= values.std(axis=0)
    items[told] = (p * y).mean(axis=0)
    defined = np.flatnonzero(varies)
    value = float(items[defined].mean())
    by_subset = draw_weights(len(p), resamples, universe, "subsets") / len(p)
    by_query = draw_weights(len(defined), resamples, universe, "queries") / len(defined)
    place = np.searchsorted(defined, told)
    draws = np.empty(resamples)
    step = max(1, _AT_ONCE // max(1, 8 * len(told)))
    parts = (p, y, p * y, p * p, y * y)
    for start in range(0, resamples, step):
        weights = by_subset[start : start + step]
        ep, ey, epy, epp, eyy = (weights @ part for part in parts)
        spread = np.sqrt(np.maximum(epp - ep * ep, 0) * np.maximum(eyy - ey * ey, 0))
        ratio = np.divide(epy - ep * ey, spread, out=np.zeros_like(spread), where=spread > 0)
        each = np.zeros((len(ratio), len(defined)))
        each[:, place] = np.clip(ratio, -1, 1)
        draws[start : start + step] = (each * by_query[start : start + step]).sum(axis=1)
    # A correlation of few models is too near to 0, that of a resample doubly so.
    draws += value - draws.mean()
    # Correlations of few subsets differ by chance, too: what is left of their variance is the queries'.
    noise = ((1 - items[told] ** 2) ** 2).sum() / (len(p) - 1) / len(defined)
    stays = max(0.0, float(items[defined].var()) - noise) / len(defined)
    lessens = max(0.0, float(draws.var()) - stays)
    return ResampledCorrelation(items, value, draws, math.sqrt(lessens), math.sqrt(stays))


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """How much a figure was found with; 0 of what plays no part in it."""

    queries: int = 0
    subsets: int = 0
    seeds: int = 0
    rows: int = 0

    def __str__(self) -> str:
        told = [f"{self.queries} queries"] if self.queries else []
        if self.subsets:
            told.append(
                f"{self.subsets} subsets" + (f" x {self.seeds} seeds" if self.seeds else "")
            )
        elif self.seeds:
            told.append(f"{self.seeds} seeds")
        if self.rows:
            told.append(f"{self.rows} rows")
        return ", ".join(told)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Lines over one axis, each with its interval."""

    along: str
    """What the axis counts."""
    at: AnyArray
    """`[K]`"""
    names: tuple[str, ...]
    values: AnyArray
    """`[lines, K]`"""
    low: AnyArray
    """`[lines, K]`"""
    high: AnyArray
    """`[lines, K]`"""

    def __str__(self) -> str:
        wide = max(len(self.along), *(len(name) for name in self.names))
        head = "".join(f"{value:>22g}" for value in self.at.tolist())
        lines = [f"{self.along:<{wide}}{head}"]
        for name, values, low, high in zip(
            self.names, self.values, self.low, self.high, strict=True
        ):
            told = [
                f"{value:.3f} [{a:.3f}, {b:.3f}]"
                for value, a, b in zip(values, low, high, strict=True)
            ]
            lines.append(f"{name:<{wide}}" + "".join(f"{text:>22}" for text in told))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation(TextDisplay):
    """A figure about an attribution, never without its interval and what it was found with.

    `draws` are the figures of resamples, centred on the value. Two evaluations in the same `universe`
    were resampled alike, so that `compare` can tell whether they differ.
    """

    metric: str
    subject: str
    """What was judged: a method and where it was asked, or a detector."""
    value: float
    interval: tuple[float, float]
    sizes: SampleSizes
    truth: str
    """What it was held against, with the half of the subsets."""
    universe: str
    """A digest of all that was resampled, and how."""
    draws: AnyArray = field(repr=False)
    """`[B]`"""
    items: AnyArray = field(repr=False)
    """`[T]`: the figure of every query, or of whatever was counted; NaN where there is none"""
    item_ids: AnyArray = field(repr=False)
    """`[T]`"""
    level: float = 0.95
    ceiling: float | None = None
    """What a perfect prediction would come to, where chance sets a limit."""
    spread_by_subsets: float | None = None
    """The standard deviation that more subsets would lessen."""
    spread_by_queries: float | None = None
    """The standard deviation that stays with any number of subsets: queries differ."""
    provenance: str = ""
    """How the subject was made."""
    curve: Curve | None = None
    captures: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The folder of every capture that the subject was computed from, with its identity."""

    @property
    def share(self) -> float | None:
        """The figure as a share of its ceiling."""
        return self.value / self.ceiling if self.ceiling else None

    @property
    def from_zero(self) -> bool:
        """Whether the interval leaves out zero."""
        low, high = self.interval
        return low > 0 or high < 0

    def __str__(self) -> str:
        low, high = self.interval
        told = f"{self.metric} {self.value:.3f} [{low:.3f}, {high:.3f}]"
        if self.share is not None:
            told += f", {self.share:.0%} of the ceiling {self.ceiling:.3f}"
        elif self.ceiling is not None:
            told += ", where chance rules: models of other seeds do not agree at all"
        return f"{told}: {self.subject}; {self.sizes}, {self.truth}"

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
        """Make an evaluation from the figures `[B]` of resamples, which are centred on the value."""
        draws = draws + value - draws.mean()
        interval = interval_of(draws, value, level)
        required = (metric, subject, value, interval, sizes, truth, universe, draws)
        return cls(*required, items, item_ids, level=level, **facts)

    @checked(EvaluationError)
    def save(self, name: str, *, store: Store) -> None:
        """Keep the evaluation in a store; another one under that name is refused."""
        save_evaluation(store, name, self)

    @classmethod
    @checked(EvaluationError)
    def load(cls, store: Store, name: str) -> Evaluation:
        """The evaluation saved under that name."""
        return load_evaluation(store, name)

    def plot(self) -> Any:
        """A `matplotlib` figure: the curve if there is one, else how the items are spread."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError(
                "pictures need matplotlib", fix=install_hint("remat")
            ) from error
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
    """How much one evaluation is above another, resample by resample."""

    metric: str
    first: str
    second: str
    value: float
    interval: tuple[float, float]
    level: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval[0] > 0 or self.interval[1] < 0

    def __str__(self) -> str:
        low, high = self.interval
        said = "differ" if self.differs else "cannot be told apart"
        return (
            f"{self.metric} {self.value:+.3f} [{low:+.3f}, {high:+.3f}]: {self.first} against "
            f"{self.second} {said}"
        )


@checked(EvaluationError)
def compare(first: Evaluation, second: Evaluation) -> Difference:
    """Whether two evaluations differ, by the paired bootstrap: both see the same resamples.

    Their difference has a narrower interval than each of them, for what is hard for one method is
    mostly hard for the other. Cost: none; the resamples were kept.

    >>> one = evaluated("lds", "kernel", np.array([0.5, 0.7, 0.6]), universe="u", truth="halves")
    >>> other = evaluated("lds", "dot", np.array([0.1, 0.4, 0.3]), universe="u", truth="halves")
    >>> compare(one, other).differs
    True
    """
    if (first.metric, first.universe) != (second.metric, second.universe):
        raise EvaluationError(
            "these evaluations cannot be compared resample by resample",
            found=f"{first.metric} of {first.sizes} ({first.truth}) and {second.metric} of "
            f"{second.sizes} ({second.truth})",
            fix="evaluate both by the same metric on the same truth, queries, level and resamples",
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
    """The mean of one figure per query `[T]`, with an interval over queries."""
    check_bounds(level, resamples)
    defined = np.isfinite(items)
    if not defined.any():
        raise EvaluationError(f"{metric} is defined for none of {len(items)} queries")
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
    """The interval of a figure: percentiles of its resamples, moved to have the figure as mean."""
    low, high = np.percentile(draws, (50 * (1 - level), 50 * (1 + level)))
    moved = value - float(draws.mean())
    return float(low) + moved, float(high) + moved


_TEXTS = ("metric", "subject", "truth", "universe", "provenance")
_NUMBERS = ("value", "level", "ceiling", "spread_by_subsets", "spread_by_queries")
_SIZES = ("queries", "subsets", "seeds", "rows")
_BETWEEN = "\n"


class OutdatedEvaluationError(EvaluationError):
    """An evaluation of rows that the store does not hold any more."""


def save_evaluation(store: Store, name: str, found: Evaluation) -> None:
    """Write an evaluation under a name; the same again is free, another one is refused."""
    told: dict[str, Any] = {part: getattr(found, part) for part in (*_TEXTS, *_NUMBERS)}
    told |= {part: getattr(found.sizes, part) for part in _SIZES}
    told |= {"low": found.interval[0], "high": found.interval[1]}
    if found.captures:
        told["captures"] = json.dumps(dict(found.captures), sort_keys=True)
    values: dict[str, AnyArray] = {
        "draws": np.asarray(found.draws, np.float64),
        "items": np.asarray(found.items, np.float64),
        "item_ids": np.asarray(found.item_ids, np.int64),
    }
    if found.curve is not None:
        told |= {"along": found.curve.along, "lines": _BETWEEN.join(found.curve.names)}
        values |= {
            "curve_at": np.asarray(found.curve.at, np.float64),
            "curve": np.stack([found.curve.values, found.curve.low, found.curve.high]),
        }
    arrays = tuple(
        Array(part, str(value.dtype), value.shape, kind="data", nan="keep")
        if value.dtype.kind == "f"
        else Array(part, str(value.dtype), value.shape, kind="data")
        for part, value in values.items()
    )
    try:
        with store.write(EvaluationKey(name), Schema(arrays, num_rows=1, fingerprints=told)) as out:
            if out.needs(1):
                out.append(np.zeros(1, np.int64), {part: v[None] for part, v in values.items()})
            else:
                out.skip(np.zeros(1, np.int64))
    except SchemaMismatchError as error:
        raise EvaluationError(
            f"another evaluation is saved as {name!r}",
            path=error.path,
            found=error.found,
            fix="use another name, or delete it: gradkeep delete STORE evaluations/NAME --yes",
        ) from None


def load_evaluation(store: Store, name: str) -> Evaluation:
    """Read an evaluation back."""
    known = [key.name for key in store.evaluations()]
    if name not in known:
        raise EvaluationError(
            f"no evaluation {name!r}",
            path=store.location,
            found=", ".join(known) or "no saved evaluations",
            fix="`gradkeep evaluate lds STORE` saves evaluations, and so does Evaluation.save",
        )
    try:
        block = store.read(EvaluationKey(name))
    except NotSealedError as error:
        raise EvaluationError(
            f"the evaluation {name!r} was not written to the end", path=error.path, fix="save again"
        ) from error
    told: Mapping[str, Any] = block.schema.fingerprints
    again = f"gradkeep evaluate all {store.location}"
    store.require_current(EvaluationKey(name), told, OutdatedEvaluationError, again)
    values = {part: np.asarray(block.column(part))[0] for part in block.names}
    curve = None
    if "curve" in values:
        middle, low, high = values["curve"]
        names = tuple(str(told["lines"]).split(_BETWEEN))
        curve = Curve(str(told["along"]), values["curve_at"], names, middle, low, high)
    texts: Any = {part: str(told[part]) for part in _TEXTS}
    numbers: Any = {part: told[part] for part in _NUMBERS}
    return Evaluation(
        **texts,
        **numbers,
        interval=(float(told["low"]), float(told["high"])),
        sizes=SampleSizes(**{part: int(told[part]) for part in _SIZES}),
        draws=values["draws"],
        items=values["items"],
        item_ids=values["item_ids"],
        curve=curve,
        captures=store.capture_identities(told),
    )


@checked(EvaluationError)
def evaluations(store: Store | str | os.PathLike[str]) -> dict[str, Evaluation]:
    """Read all evaluations saved in a store, by name.

    An evaluation of captures that were made again since is left out with a warning.
    """
    opened = open_store(store, create=False)
    found: dict[str, Evaluation] = {}
    for key in opened.evaluations():
        try:
            found[key.name] = load_evaluation(opened, key.name)
        except OutdatedEvaluationError as error:
            warnings.warn(str(error), stacklevel=2)
    return found
