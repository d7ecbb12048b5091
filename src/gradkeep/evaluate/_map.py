"""Two-dimensional maps of rows by their gradients or datamodels, with opposing clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._environment import install_hint
from gradkeep.curvature._project import project
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import EvaluationError, MissingExtraError
from gradkeep.query import gradients
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os

    from gradkeep.datamodels import Datamodels
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

_DIRECTIONS = 10
"""Principal components for clustering."""


@dataclass(frozen=True, slots=True)
class OpposingClusters:
    """Two clusters whose rows pull the model in opposite directions."""

    first: int
    second: int
    cosine: float
    """Cosine of their mean directions; -1 is exactly opposite."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """Rows in the plane: rows with similar effects are close.

    Attributes:
        ids: Ids of the rows `[N]`.
        places: First two principal components of the rows' directions `[N, 2]`.
        share: Share of the variance along each axis.
        clusters: Cluster of each row `[N]`, numbered from the largest.
        labels: Captured labels `[N]`.
        opposing: Most opposed pairs of clusters.
        total: Number of rows before sampling.
        of: Source of the map.
    """

    ids: AnyArray
    places: AnyArray
    share: tuple[float, float]
    clusters: AnyArray
    labels: AnyArray | None
    opposing: tuple[OpposingClusters, ...]
    total: int
    of: str

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        part = "" if len(self) == self.total else f" of {self.total}"
        count = len(np.unique(self.clusters))
        return f"{len(self)}{part} rows by {self.of}: {count} clusters, {len(self.opposing)} pairs opposed"


def map_rows(
    store: Store | str | os.PathLike[str],
    *,
    split: str = "train",
    checkpoints: str | None = None,
    run: str = "main",
    name: str = "main",
    clusters: int = 8,
    most: int = 4000,
    seed: int = 0,
) -> RowMap:
    """Map rows of a capture by the directions of their gradients, with k-means clusters.

    Gradients are projected to 256 numbers (`gk.project`) and normalized; of more than `most` rows a random
    sample is used. Cost: one read of these rows, and 256² products of them.

    >>> import gradkeep as gk, tempfile, torch
    >>> store, net = gk.open(tempfile.mkdtemp()), torch.nn.Linear(4, 3)
    >>> data = [(torch.randn(12, 4), torch.arange(12) % 3)]
    >>> _ = gk.capture(store, net, data, task=gk.Classification(), split="train")
    >>> map_rows(store, clusters=3).places.shape
    (12, 2)
    """
    _check_settings(clusters, most, seed)
    opened = open_store(store, create=False)
    stored = gradients(opened, split=split, checkpoints=checkpoints, run=run, name=name)
    block, rows = stored.block, _sample(len(stored), most, seed)
    # Cosines of 256-dimensional projections have an error of about 0.06.
    low = np.asarray(project(stored, Projection(dim=256), rows=rows))
    labels = np.asarray(block.column("label"))[rows] if "label" in block.names else None
    of = f"gradients of {split} at {stored.key.checkpoint}"
    return _build_map(low, block.ids[rows], labels, len(stored), of, clusters, seed)


def map_targets(
    datamodels: Datamodels, *, clusters: int = 8, most: int = 4000, seed: int = 0
) -> RowMap:
    """Map targets of datamodels by the training examples that they depend on.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 20, 6)
    >>> map_targets(fit(data.masks, data.outputs), clusters=2).places.shape
    (6, 2)
    """
    _check_settings(clusters, most, seed)
    weights = np.asarray(datamodels.weights.T)
    rows = _sample(len(weights), most, seed)
    of = f"datamodels of {datamodels.num_models} models"
    return _build_map(weights[rows], rows, None, len(weights), of, clusters, seed)


def _check_settings(clusters: int, most: int, seed: int) -> None:
    _arguments.count("clusters", clusters, error=EvaluationError, least=1)
    _arguments.count("most", most, error=EvaluationError, least=2)
    _arguments.count("seed", seed, error=EvaluationError)


def _sample(total: int, most: int, seed: int) -> AnyArray:
    """Return at most `most` rows, at random."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng(seed).permutation(total)[:most])


def _build_map(
    rows: AnyArray,
    ids: AnyArray,
    labels: AnyArray | None,
    total: int,
    of: str,
    clusters: int,
    seed: int,
) -> RowMap:
    if len(rows) < 2:
        raise EvaluationError(
            "a map needs at least two rows", code="evaluate.few_rows", found=len(rows)
        )
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    along, power = _principal(unit - unit.mean(axis=0))
    whole = max(float(power.sum()), 1e-30)
    places = np.zeros((len(rows), 2))
    places[:, : min(2, along.shape[1])] = along[:, :2]
    marks = _clustered(along, min(clusters, len(rows)), seed)
    return RowMap(
        ids=np.asarray(ids),
        places=places,
        share=(float(power[0] / whole), float(power[1] / whole)),
        clusters=marks,
        labels=labels,
        opposing=_opposing(unit, marks),
        total=total,
        of=of,
    )


def _principal(centered: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the rows' first principal components, and the variance along each, decreasing."""
    wide = centered.shape[1] > len(centered)
    values, vectors = np.linalg.eigh(centered @ centered.T if wide else centered.T @ centered)
    power = np.maximum(values[::-1], 0)
    first = vectors[:, ::-1][:, :_DIRECTIONS]
    along = first * np.sqrt(power[:_DIRECTIONS]) if wide else centered @ first
    # The sign of an eigenvector is arbitrary: make the largest entry positive.
    far = np.abs(along).argmax(axis=0)
    along = along * np.where(along[far, np.arange(along.shape[1])] < 0, -1.0, 1.0)
    return along, np.append(power, [0.0, 0.0])


def _clustered(along: AnyArray, count: int, seed: int) -> AnyArray:
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise MissingExtraError("clusters need scikit-learn", fix=install_hint("demo")) from error
    count = min(count, len(np.unique(along, axis=0)))
    marks = KMeans(count, n_init=4, random_state=seed).fit_predict(along)
    sizes = np.bincount(marks, minlength=count)
    order = np.argsort(-sizes, kind="stable")
    places = np.empty(count, np.int64)
    places[order] = np.arange(count)
    return np.asarray(places[marks])


def _opposing(unit: AnyArray, marks: AnyArray) -> tuple[OpposingClusters, ...]:
    means = np.stack([unit[marks == mark].mean(axis=0) for mark in range(marks.max() + 1)])
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-30)
    cosines = means @ means.T
    pairs = [
        OpposingClusters(i, j, float(cosines[i, j]))
        for i in range(len(means))
        for j in range(i + 1, len(means))
        if cosines[i, j] < 0
    ]
    return tuple(sorted(pairs, key=lambda pair: pair.cosine)[:5])
