"""What every evaluation comes to: a figure, its interval, what it was found with, and its ceiling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._annotations import checked
from gradkeep._surroundings import install_hint
from gradkeep.errors import EvaluationError, MissingExtra
from gradkeep.evaluate._bootstrap import check_bounds, draw_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


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


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
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

    @checked(EvaluationError)
    def save(self, name: str, *, store: Store) -> None:
        """Keep the evaluation in a store; another one under that name is refused."""
        from gradkeep.evaluate._saved import save_evaluation

        save_evaluation(store, name, self)

    @classmethod
    @checked(EvaluationError)
    def load(cls, store: Store, name: str) -> Evaluation:
        """The evaluation saved under that name."""
        from gradkeep.evaluate._saved import load_evaluation

        return load_evaluation(store, name)

    def plot(self) -> Any:
        """A `matplotlib` figure: the curve if there is one, else how the items are spread."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtra("pictures need matplotlib", fix=install_hint("remat")) from error
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
    told = np.asarray(items, np.float64)[defined]
    weights = draw_weights(len(told), resamples, universe, "queries")
    draws = weights @ told / len(told)
    value = float(told.mean())
    draws += value - draws.mean()
    return Evaluation(
        metric,
        subject,
        value,
        interval_of(draws, value, level),
        SampleSizes(queries=len(told)) if sizes is None else sizes,
        truth,
        universe,
        draws,
        np.asarray(items, np.float64),
        np.arange(len(items)) if item_ids is None else item_ids,
        level=level,
        provenance=provenance,
        captures=captures or {},
    )


def interval_of(draws: AnyArray, value: float, level: float) -> tuple[float, float]:
    """The interval of a figure: percentiles of its resamples, moved to have the figure as mean."""
    low, high = np.percentile(draws, (50 * (1 - level), 50 * (1 + level)))
    moved = value - float(draws.mean())
    return float(low) + moved, float(high) + moved
