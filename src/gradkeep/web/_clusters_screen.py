"""Screens of clusters and of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import GradkeepError, StoreError
from gradkeep.web._responses import ProblemView, problem_of

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.evaluate._map import OpposingClusters, RowMap
    from gradkeep.web._served import ServedStore


_GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One cluster in a few words."""

    number: int
    size: int
    label: int | float | None
    """The commonest label."""
    label_name: str | None
    purity: float | None
    """The share of its rows with that label."""


@dataclass(frozen=True, slots=True)
class MapView:
    """Rows in the plane."""

    of: str
    split: str
    total: int
    share: tuple[float, float]
    ids: list[int]
    x: list[float]
    y: list[float]
    cluster: list[int]
    label: list[int | float] | None
    clusters: list[ClusterView]
    opposing: tuple[OpposingClusters, ...]
    sources: list[str]
    """What maps there are: `gradients`, `fit:NAME`, `study:NAME`."""


def draw_map(
    served: ServedStore, *, run: str, split: str, queries: str, name: str, of: str, clusters: int
) -> MapView:
    """The map of a split's gradients, or of queries by the datamodels of a fit or study."""
    sources = map_sources(served)
    if of not in sources:
        raise StoreError(f"no map of {of[:100]!r}", found=", ".join(sources))
    where = split if of == _GRADIENTS else queries
    age = served.sealed(run, name)
    places = served.checkpoints(run, name, split)

    def make(_: Any) -> RowMap:
        from gradkeep.evaluate._map import map_rows, map_targets

        if of == _GRADIENTS:
            return map_rows(
                served.store,
                split=split,
                checkpoints=places[-1] if places else None,
                run=run,
                name=name,
                clusters=clusters,
            )
        return map_targets(_fitted(served, of), clusters=clusters)

    found = served.desk.ask(
        ("map", run, split, name, of, clusters, age),
        f"drawing {of}",
        make,
        size=lambda one: 64 * len(one),
    )
    preview = served.preview(where)
    counts = np.bincount(found.clusters)
    views = []
    for number, size in enumerate(counts.tolist()):
        label, purity = None, None
        if found.labels is not None:
            values, many = np.unique(found.labels[found.clusters == number], return_counts=True)
            label, purity = values[many.argmax()].item(), float(many.max() / size)
        called = preview.name_of(label) if preview is not None and isinstance(label, int) else None
        views.append(ClusterView(number, size, label, called, purity))
    return MapView(
        of=found.of,
        split=where,
        total=found.total,
        share=found.share,
        ids=found.ids.tolist(),
        x=np.round(found.places[:, 0], 4).tolist(),
        y=np.round(found.places[:, 1], 4).tolist(),
        cluster=found.clusters.tolist(),
        label=None if found.labels is None else found.labels.tolist(),
        clusters=views,
        opposing=found.opposing,
        sources=sources,
    )


def map_sources(served: ServedStore) -> list[str]:
    """What there is to be drawn."""
    from gradkeep.web._score_sources import score_sources

    kinds = ("fit", "study")
    return [_GRADIENTS, *(one.id for one in score_sources(served) if one.kind in kinds)]


def _fitted(served: ServedStore, of: str) -> Any:
    from gradkeep import datamodels
    from gradkeep.evaluate import load_truth

    kind, _, name = of.partition(":")
    if kind == "fit":
        return datamodels.load(served.store, name)
    half = load_truth(served.store, name).choosing
    return datamodels.fit(half.masks, half.outputs)


@dataclass(frozen=True, slots=True)
class CurveView:
    """Lines over one axis."""

    along: str
    at: list[float]
    names: tuple[str, ...]
    values: list[list[float]]
    low: list[list[float]]
    high: list[list[float]]


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """A figure with its interval, what it was found with, and its ceiling."""

    name: str
    metric: str
    subject: str
    value: float
    low: float
    high: float
    level: float
    ceiling: float | None
    sizes: str
    truth: str
    provenance: str
    items: list[int]
    """How the figures of single queries are spread, from the least to the largest."""
    item_range: tuple[float, float]
    curve: CurveView | None


@dataclass(frozen=True, slots=True)
class EvaluationsView:
    """All evaluations that are kept, and those that cannot be read."""

    evaluations: list[EvaluationView]
    problems: list[ProblemView]


def list_evaluations(served: ServedStore) -> EvaluationsView:
    """Every evaluation that the store keeps."""
    names = tuple((one.address.name, one.version) for one in served.info().evaluations)
    return served.desk.ask(
        ("evaluations", names),
        "reading evaluations",
        lambda _: _read(served, [name for name, _ in names]),
        size=lambda found: 4096 * (1 + len(found.evaluations)),
        patience=5.0,
    )


def lds_of(served: ServedStore, method: str) -> EvaluationView | None:
    """How well a method predicts retraining, if that was evaluated: the figure on most queries."""
    found = [
        one
        for one in list_evaluations(served).evaluations
        if one.metric.lower().startswith("lds") and one.subject.split(" ")[0] == method
    ]
    return max(found, key=lambda one: sum(one.items), default=None)


def _read(served: ServedStore, names: list[str]) -> EvaluationsView:
    from gradkeep.evaluate import Evaluation

    found, problems = [], []
    for name in names:
        try:
            found.append(evaluation_view(name, Evaluation.load(served.store, name)))
        except GradkeepError as error:
            problems.append(problem_of(error))
    return EvaluationsView(found, problems)


def evaluation_view(name: str, found: Evaluation) -> EvaluationView:
    """An evaluation as it is shown."""
    items = np.asarray(found.items, np.float64)
    items = items[np.isfinite(items)]
    low, high = (float(items.min()), float(items.max())) if len(items) else (0.0, 0.0)
    counts = np.histogram(items, bins=24, range=(low, high) if high > low else (low - 1, low + 1))
    curve = found.curve
    return EvaluationView(
        name=name,
        metric=found.metric,
        subject=found.subject,
        value=found.value,
        low=found.interval[0],
        high=found.interval[1],
        level=found.level,
        ceiling=found.ceiling,
        sizes=str(found.sizes),
        truth=found.truth,
        provenance=found.provenance,
        items=counts[0].tolist(),
        item_range=(low, high),
        curve=None
        if curve is None
        else CurveView(
            curve.along,
            curve.at.tolist(),
            curve.names,
            curve.values.tolist(),
            curve.low.tolist(),
            curve.high.tolist(),
        ),
    )
