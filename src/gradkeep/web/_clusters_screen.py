"""The screen of clusters: rows in the plane, and groups that pull in opposite directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import StoreError

if TYPE_CHECKING:
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
