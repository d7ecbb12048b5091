"""The screen Clusters: rows in the plane, by gradients or by datamodels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._arguments import one_of
from gradkeep.errors import StoreError
from gradkeep.web._http import Clusters, MapSource, Name  # noqa: TC001 - FastAPI reads them
from gradkeep.web._score_sources import score_sources

if TYPE_CHECKING:
    from gradkeep.evaluate._groups import RowMap
    from gradkeep.web._served import ServedStore

_GRADIENTS = "gradients"


def show_clusters(
    served: ServedStore,
    run: Name = "main",
    split: Name = "train",
    queries: Name = "test",
    name: Name = "main",
    of: MapSource = _GRADIENTS,
    clusters: Clusters = 8,
) -> dict[str, Any]:
    """Return the map of a split's gradients, or of queries by the datamodels of a fit or study."""
    fits = [source.id for source in score_sources(served) if source.kind in ("fit", "study")]
    sources = [_GRADIENTS, *fits]
    one_of("of", of, sources, error=StoreError, code="web.unknown_map")
    checkpoints = served.checkpoints(run, name, split)

    def compute(_: Any) -> RowMap:
        from gradkeep.evaluate._groups import map_rows, map_targets

        if of != _GRADIENTS:
            return map_targets(_load_datamodels(served, of), clusters=clusters)
        return map_rows(
            served.store,
            split=split,
            checkpoints=checkpoints[-1] if checkpoints else None,
            run=run,
            name=name,
            clusters=clusters,
        )

    row_map = served.tasks.get(
        ("map", run, split, name, of, clusters, served.sealed(run, name)),
        f"drawing {of}",
        compute,
        size=lambda row_map: 64 * len(row_map),
    )
    shown_split = split if of == _GRADIENTS else queries
    return {
        "of": row_map.of,
        "split": shown_split,
        "total": row_map.total,
        "share": row_map.share,
        "ids": row_map.ids.tolist(),
        "x": np.round(row_map.places[:, 0], 4),
        "y": np.round(row_map.places[:, 1], 4),
        "cluster": row_map.clusters.tolist(),
        "label": row_map.labels,
        "clusters": _describe_clusters(served, row_map, shown_split),
        "opposing": row_map.opposing,
        "sources": sources,
    }


def _describe_clusters(served: ServedStore, row_map: RowMap, split: str) -> list[dict[str, Any]]:
    """Return the size, the most common label and its share for every cluster."""
    views = []
    for number, size in enumerate(np.bincount(row_map.clusters).tolist()):
        label, purity = None, None
        if row_map.labels is not None:
            members = row_map.labels[row_map.clusters == number]
            labels, counts = np.unique(members, return_counts=True)
            label, purity = labels[counts.argmax()].item(), float(counts.max() / size)
        name = served.label_name(split, label)
        view = {"number": number, "size": size, "label": label, "label_name": name}
        views.append({**view, "purity": purity})
    return views


def _load_datamodels(served: ServedStore, source: str) -> Any:
    from gradkeep import datamodels
    from gradkeep.evaluate import load_truth

    kind, _, name = source.partition(":")
    if kind == "fit":
        return datamodels.load(served.store, name)
    half = load_truth(served.store, name).choosing
    return datamodels.fit(half.masks, half.outputs)
