"""Similarity of targets by their weights, clusters and components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradkeep._arguments import NonNegativeInt, PositiveInt, checked
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


_BLOCK = 1024


def unit_rows(fitted: Datamodels) -> AnyArray:
    """Return the targets' weights scaled to length 1, float64 `[t, n]`; zero rows stay zero."""
    rows: AnyArray = fitted.weights.T.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, length, out=np.zeros_like(rows), where=length > 0))


@checked(DatamodelsError)
def similarity(fitted: Datamodels, other: Datamodels | None = None) -> AnyArray:
    """Compute the cosine similarity of the weights of all pairs of targets.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        other: Other datamodels of the same examples; the same by default.

    Returns:
        Cosines `[t, t']`; 0 for a target without weights.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 20, 3)
        >>> similarity(fit(data.masks, data.outputs)).diagonal().round(6).tolist()
        [1.0, 1.0, 1.0]
    """
    if other is not None and len(other.weights) != len(fitted.weights):
        raise DatamodelsError(
            "the fits have different training sets",
            code="datamodels.other_examples",
            found=f"{len(fitted.weights)} and {len(other.weights)} examples",
        )
    rows = unit_rows(fitted)
    return rows @ (rows if other is None else unit_rows(other)).T


@dataclass(frozen=True, slots=True, eq=False)
class Neighbors:
    """Nearest targets of each target.

    Attributes:
        ids: Targets `[t, count]`, nearest first.
        cosine: Their cosines `[t, count]`.
    """

    ids: AnyArray
    cosine: AnyArray


@checked(DatamodelsError)
def neighbors(fitted: Datamodels, count: PositiveInt = 10) -> Neighbors:
    """Find the targets with the most similar datamodels.

    Costs t^2 n operations, in blocks.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        count: Neighbors per target.

    Returns:
        Ids and cosines `[t, count]`.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 20, 5)
        >>> neighbors(fit(data.masks, data.outputs), 2).ids.shape
        (5, 2)
    """
    rows = unit_rows(fitted)
    count = min(count, len(rows) - 1)
    ids = np.empty((len(rows), count), np.int64)
    cosine = np.empty((len(rows), count))
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK] @ rows.T
        own = np.arange(len(part))
        part[own, start + own] = -np.inf
        order = np.argsort(-part, axis=1, kind="stable")[:, :count]
        ids[start : start + _BLOCK] = order
        cosine[start : start + _BLOCK] = np.take_along_axis(part, order, axis=1)
    return Neighbors(ids, cosine)


@dataclass(frozen=True, slots=True, eq=False)
class RankedPairs:
    """Pairs, strongest first.

    Attributes:
        first: First members `[k]`.
        second: Second members `[k]`.
        strength: Strengths `[k]`.
    """

    first: AnyArray
    second: AnyArray
    strength: AnyArray

    def __len__(self) -> int:
        return len(self.first)


@checked(DatamodelsError)
def near_duplicates(fitted: Datamodels, *, threshold: float = 0.8) -> RankedPairs:
    """Find pairs of targets whose datamodels are nearly equal.

    Two copies of an image depend on the same training examples, however their pixels differ.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        threshold: Minimum cosine.

    Returns:
        Pairs of targets with their cosines.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(400, 20, 3)
        >>> twice = np.concatenate([data.outputs, data.outputs[:, :1] + 1], axis=1)
        >>> pairs = near_duplicates(fit(data.masks, twice), threshold=0.99)
        >>> (0, 3) in zip(pairs.first.tolist(), pairs.second.tolist())
        True
    """
    rows = unit_rows(fitted)
    first, second, cosine = [], [], []
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK] @ rows.T
        i, j = np.nonzero(np.triu(part >= threshold, k=start + 1))
        first.append(i + start)
        second.append(j)
        cosine.append(part[i, j])
    return _ordered(np.concatenate(first), np.concatenate(second), np.concatenate(cosine))


@checked(DatamodelsError)
def leakage(fitted: Datamodels, *, threshold: float = 8.0) -> RankedPairs:
    """Find targets with a training example whose weight stands out from all others.

    A test image that is also in the training set has such a weight. The deviation is computed from nonzero weights, so a sparse fit is not an alarm.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        threshold: Minimum weight in robust standard deviations of the target's weights.

    Returns:
        Pairs of a target (`first`) and an example (`second`), with the weight in robust standard deviations.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(600, 40, 3, large=0, tail=0.05)
        >>> copied = data.outputs + 4.0 * data.masks[:, [7]] * np.array([0, 1, 0])
        >>> pairs = leakage(fit(data.masks, copied, penalty="ridge"))
        >>> pairs.first.tolist(), pairs.second.tolist()
        ([1], [7])
    """
    first, second, strength = [], [], []
    for target, weights in enumerate(fitted.weights.T.astype(np.float64)):
        there = np.flatnonzero(weights)
        # Fewer weights than this have no usual size to stand out from.
        if len(there) < 5:
            continue
        values = weights[there]
        middle = np.median(values)
        # A normal distribution's standard deviation in parts of its median absolute deviation.
        deviation = 1.4826 * np.median(np.abs(values - middle))
        if deviation == 0:
            continue
        score = (values - middle) / deviation
        out = np.flatnonzero(score >= threshold)
        first += [target] * len(out)
        second += there[out].tolist()
        strength += score[out].tolist()
    return _ordered(np.array(first, np.int64), np.array(second, np.int64), np.array(strength))


def _ordered(first: AnyArray, second: AnyArray, strength: AnyArray) -> RankedPairs:
    order = np.lexsort((second, first, -strength))
    return RankedPairs(first[order], second[order], strength[order])


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Principal components of the targets' datamodels, strongest first.

    Attributes:
        share: Shares of the variance `[k]`.
        targets: Targets along each component `[t, k]`.
        examples: Examples along each component `[n, k]`.
        highest: Targets at the positive end `[k, extremes]`.
        lowest: Targets at the negative end `[k, extremes]`.
    """

    share: AnyArray
    targets: AnyArray
    examples: AnyArray
    highest: AnyArray
    lowest: AnyArray


@checked(DatamodelsError)
def components(
    fitted: Datamodels, count: PositiveInt = 10, *, extremes: NonNegativeInt = 5
) -> Components:
    """Compute principal components of the targets' weights, each scaled to length 1.

    The sign of a component makes its largest example positive. Costs t n min(t, n).

    Args:
        fitted: The datamodels, from `fit` or `load`.
        count: Number of components.
        extremes: Targets to list at each end.

    Returns:
        The components.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 20, 6)
        >>> components(fit(data.masks, data.outputs), 3, extremes=2).highest.shape
        (3, 2)
    """
    return principal(unit_rows(fitted), count, extremes)


def principal(rows: AnyArray, count: int, extremes: int) -> Components:
    """Compute the principal components of any rows `[t, n]`."""
    centred = rows - rows.mean(axis=0)
    target_vectors, strength, example_vectors = np.linalg.svd(centred, full_matrices=False)
    count = min(count, len(strength))
    largest = np.abs(example_vectors[:count]).argmax(axis=1)
    sign = np.where(example_vectors[np.arange(count), largest] < 0, -1.0, 1.0)
    targets = target_vectors[:, :count] * strength[:count] * sign
    power = strength**2
    total = power.sum()
    order = np.argsort(-targets, axis=0, kind="stable").T
    extremes = min(extremes, len(rows))
    return Components(
        power[:count] / total if total > 0 else np.zeros(count),
        targets,
        (example_vectors[:count] * sign[:, None]).T,
        order[:, :extremes],
        order[:, ::-1][:, :extremes],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Clusters of targets, numbered by size.

    Attributes:
        labels: Cluster of each target `[t]`.
        sizes: Sizes `[k]`.
        eigenvalues: Smallest eigenvalues of the graph Laplacian `[k + 1]`; a jump after the k-th suggests k clusters.
    """

    labels: AnyArray
    sizes: AnyArray
    eigenvalues: AnyArray


@checked(DatamodelsError)
def clusters(
    fitted: Datamodels, count: int, *, near: PositiveInt = 10, seed: NonNegativeInt = 0
) -> Clusters:
    """Cluster the targets spectrally: k-means on the eigenvectors of a nearest-neighbor graph.

    Costs t^2 n and t^3.

    Args:
        fitted: The datamodels, from `fit` or `load`.
        count: Number of clusters.
        near: Neighbors that each target is joined with, by cosine.
        seed: Seed of k-means.

    Returns:
        Labels, sizes and eigenvalues.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 20, 2)
        >>> like = data.outputs[:, [0, 1, 0, 1, 0]] + np.arange(5)
        >>> clusters(fit(data.masks, like), 2).labels.tolist()
        [0, 1, 0, 1, 0]
    """
    rows = unit_rows(fitted)
    t = len(rows)
    if not 1 <= count <= t:
        raise DatamodelsError(
            "count exceeds the number of targets",
            code="datamodels.cluster_count",
            found=count,
            expected=f"1 to {t}",
        )
    cosine = np.maximum(rows @ rows.T, 0.0)
    np.fill_diagonal(cosine, 0.0)
    order = np.argsort(-cosine, axis=1, kind="stable")[:, : min(near, t - 1)]
    graph = np.zeros_like(cosine)
    np.put_along_axis(graph, order, np.take_along_axis(cosine, order, axis=1), axis=1)
    graph = np.maximum(graph, graph.T)
    degree = graph.sum(axis=1)
    scale = np.divide(1, np.sqrt(degree), out=np.zeros(t), where=degree > 0)
    laplacian = np.eye(t) - scale[:, None] * graph * scale
    values, vectors = np.linalg.eigh(laplacian)
    places = vectors[:, :count]
    length = np.linalg.norm(places, axis=1, keepdims=True)
    places = np.divide(places, length, out=np.zeros_like(places), where=length > 0)
    labels = _by_size(_k_means(places, count, np.random.default_rng(seed)), count)
    return Clusters(labels, np.bincount(labels, minlength=count), values[: count + 1])


def _k_means(places: AnyArray, count: int, rng: np.random.Generator) -> AnyArray:
    """Return the labels `[t]` of the best of ten k-means++ runs."""
    best, least = np.zeros(len(places), np.int64), np.inf
    for _ in range(10):
        centres = places[[int(rng.integers(len(places)))]]
        while len(centres) < count:
            far = ((places[:, None] - centres) ** 2).sum(axis=2).min(axis=1)
            chance = far / far.sum() if far.sum() > 0 else np.full(len(places), 1 / len(places))
            centres = np.concatenate([centres, places[[int(rng.choice(len(places), p=chance))]]])
        labels = np.full(len(places), -1)
        for _ in range(100):
            distance = ((places[:, None] - centres) ** 2).sum(axis=2)
            nearest = distance.argmin(axis=1)
            if np.array_equal(nearest, labels):
                break
            labels = nearest
            for group in np.unique(labels):
                centres[group] = places[labels == group].mean(axis=0)
        error = float(((places - centres[labels]) ** 2).sum())
        if error < least:
            best, least = labels, error
    return best


def _by_size(labels: AnyArray, count: int) -> AnyArray:
    """Renumber clusters by size; equal sizes by their first target."""
    sizes = np.bincount(labels, minlength=count)
    first = [
        int((labels == group).argmax()) if sizes[group] else len(labels) for group in range(count)
    ]
    order = np.lexsort((np.array(first), -sizes))
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return place[labels]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Comparison of two classes of models.

    Attributes:
        agreement: Cosine of both datamodels of each target `[t]`.
        only_first: Components of what only the first class uses.
        only_second: Components of what only the second class uses.
    """

    agreement: AnyArray
    only_first: Components
    only_second: Components


@checked(DatamodelsError)
def compare(
    first: Datamodels, second: Datamodels, count: PositiveInt = 5, *, extremes: NonNegativeInt = 5
) -> Comparison:
    """Compare two classes of models by their datamodels of the same targets (ModelDiff).

    From each target's weights under one class, the part along its weights under the other is removed. The principal components of the remainder
    are training directions that matter to one class only. Costs t n min(t, n).

    Args:
        first: Datamodels of the first class.
        second: Datamodels of the second class.
        count: Components per class.
        extremes: Targets to list at each end.

    Returns:
        Agreement and components.

    Example:
        >>> from gradkeep.datamodels import fit, planted
        >>> data = planted(300, 20, 4)
        >>> fitted = fit(data.masks, data.outputs)
        >>> compare(fitted, fitted).agreement.round(6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if first.weights.shape != second.weights.shape:
        raise DatamodelsError(
            "only fits of the same examples and targets can be compared",
            code="datamodels.not_comparable",
            found=f"{list(first.weights.shape)} and {list(second.weights.shape)}",
        )
    a, b = unit_rows(first), unit_rows(second)
    agreement = (a * b).sum(axis=1)
    return Comparison(
        agreement,
        principal(a - agreement[:, None] * b, count, extremes),
        principal(b - agreement[:, None] * a, count, extremes),
    )
