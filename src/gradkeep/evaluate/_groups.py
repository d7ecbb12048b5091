"""Groups of rows that act together, and selections of rows."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, NonNegativeInt, PositiveInt, checked
from gradkeep._display import TextDisplay
from gradkeep._environment import import_extra
from gradkeep.curvature._project import project
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._lds import places_of
from gradkeep.evaluate._removal import verify_rows
from gradkeep.query import gradients
from gradkeep.query._engine import GradientPair, ProductEngine
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from gradkeep.attribution._scores import Scores
    from gradkeep.datamodels import Datamodels
    from gradkeep.evaluate._evaluation import Evaluation
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_LEAST = 3
"""Fewest rows of a group."""
_SHARED = 0.6
"""Share of a group's rows that must have a property for it to name the group."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowGroup(TextDisplay):
    """Training rows with similar effects on the queries.

    Attributes:
        ids: Ids of the rows `[K]`, the strongest first.
        scores: Scores `[K]`, summed over the queries.
        share: Share of all help (or harm) that is due to these rows.
        name: What they have in common.
        verified: Effect of retraining without them compared with random rows, if requested.
    """

    ids: AnyArray
    scores: AnyArray
    share: float
    name: str
    verified: Evaluation | None = None

    @property
    def helps(self) -> bool:
        """True if the rows helped."""
        return bool(self.scores.sum() > 0)

    @property
    def effect(self) -> float:
        """Predicted change if they are removed, in the scale of the scores."""
        return -float(self.scores.sum())

    def __str__(self) -> str:
        effect = "help" if self.helps else "harm"
        text = f"{len(self.ids)} rows, {self.share:.0%} of all {effect}: {self.name}"
        return text if self.verified is None else f"{text}\n    {self.verified}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowGroups(TextDisplay):
    """Groups that together explain some queries, those that helped first.

    Attributes:
        queries: Ids of the queries `[Q]`.
        groups: The groups.
        rest: Number of strong rows in none of the groups.
    """

    queries: AnyArray
    groups: tuple[RowGroup, ...]
    rest: int

    def __str__(self) -> str:
        query_ids = ", ".join(str(number) for number in self.queries[:5].tolist())
        more = f" and {len(self.queries) - 5} more" if len(self.queries) > 5 else ""
        lines = [
            f"query {query_ids}{more}: {len(self.groups)} groups, {self.rest} strong rows in none"
        ]
        return "\n".join([*lines, *(f"  {group}" for group in self.groups)])


@checked(EvaluationError)
def groups(
    scores: Scores,
    query: Any = None,
    *,
    count: PositiveInt = 5,
    most: Annotated[int, Limits(_LEAST)] = 100,
    columns: Mapping[str, Sequence[Any]] | None = None,
    features: Any = None,
    recipe: Recipe | None = None,
    seeds: int = 3,
    **options: Any,
) -> RowGroups:
    """Find the strongest groups of rows that helped some queries, and of those that harmed them.

    The `most` strongest rows of each side are clustered (HDBSCAN) by the cosines of their gradients, or of
    `features`, and named by what most rows of a group have in common. Cost: most x most products of gradients;
    with a recipe, (groups + 5) x seeds trainings.

    Args:
        scores: Scores `[Q, N]`.
        query: Id of a query, or several; all by default.
        count: Number of groups of each side.
        most: Number of strongest rows of each side.
        columns: Properties of the training rows by name, such as a source or a text; labels are included.
        features: Features `[N, D]` to cluster by instead of gradients.
        recipe: Retrain without each group, and without as many random rows, to verify its effect.
        seeds: Trainings per group, at least 2; 3 for an interval.
        options: Options of `gk.farm.run`.

    Returns:
        The groups.

    Raises:
        EvaluationError: A query was not scored, or a column has the wrong length.
        MissingExtraError: scikit-learn is not installed.
    """
    query_positions = np.arange(len(scores.query_ids))
    if query is not None:
        ids = [query] if isinstance(query, int | np.integer) else query
        query_positions = np.unique(places_of("query", ids, scores.query_ids))
    total = np.asarray(scores.values, np.float64)[query_positions].sum(axis=0)
    shared = _columns(scores, columns)
    chosen: list[RowGroup] = []
    rest = 0
    for sign in (1, -1):
        order = np.argsort(-sign * total, kind="stable")[:most]
        order = order[sign * total[order] > 0]
        strength = np.abs(total[sign * total > 0]).sum()
        marks = _clusters(_distances(scores, order, features))
        candidates = []
        for mark in range(marks.max(initial=-1) + 1):
            rows = order[marks == mark]
            share = float(np.abs(total[rows]).sum() / strength)
            named = _named(rows, shared)
            candidates.append(RowGroup(scores.train_ids[rows], total[rows], share, named))
        strongest = sorted(candidates, key=lambda group: -group.share)[:count]
        rest += len(order) - sum(len(group.ids) for group in strongest)
        chosen += strongest
    if recipe is not None:
        arguments: Any = {"scores": scores, "queries": scores.query_ids[query_positions]}
        arguments |= {"seeds": seeds, **options}
        chosen = [
            dataclasses.replace(group, verified=verify_rows(group.ids, recipe, **arguments))
            for group in chosen
        ]
    return RowGroups(scores.query_ids[query_positions], tuple(chosen), rest)


def _distances(scores: Scores, rows: AnyArray, features: Any) -> AnyArray:
    """Compute distances of rows `[K, K]`, 0 to 2: one minus the cosine of their gradients.

    Uses features if passed, or the effects on all queries if gradients cannot be compared.
    """
    if features is not None:
        shape = (len(scores.train_ids), "D")
        values = _arguments.array(
            "features", features, error=EvaluationError, shape=shape, code="evaluate.wrong_features"
        ).astype(np.float64)
        return 1 - _cosines((values - values.mean(axis=0))[rows])
    if scores.store is not None and scores.checkpoints:
        try:
            # Average over the last three checkpoints.
            cosines = [_gradient_cosines(scores, place, rows) for place in scores.checkpoints[-3:]]
            return np.asarray(1 - np.mean(cosines, axis=0))
        except GradkeepError:
            pass  # coordinates without cosines, or a deleted capture
    return 1 - _cosines(np.asarray(scores.values, np.float64).T[rows])


def _gradient_cosines(scores: Scores, place: str, rows: AnyArray) -> AnyArray:
    """Compute the cosines of the gradients of some rows at one checkpoint."""
    assert scores.store is not None
    run, _, checkpoint = place.rpartition("/")
    stored = gradients(scores.store, split=scores.train, checkpoints=checkpoint, run=run or "main")
    at = stored.positions(scores.train_ids[rows]).tolist()
    pair = GradientPair(stored, stored)
    engine = ProductEngine([pair], positions=at, rows=at, answer=8 * len(at) ** 2)
    products = engine.matrix().double().numpy()
    lengths = np.sqrt(np.maximum(products.diagonal(), 0))
    return np.asarray(products / np.maximum(np.outer(lengths, lengths), 1e-30))


def _cosines(rows: AnyArray) -> AnyArray:
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return np.asarray(unit @ unit.T)


def _clusters(distances: AnyArray) -> AnyArray:
    """Return the cluster of each row, -1 for none."""
    cluster = import_extra("sklearn.cluster", extra="demo", what="a search for groups")
    if len(distances) < 2 * _LEAST:
        return np.full(len(distances), 0 if len(distances) >= _LEAST else -1)
    even = np.clip((distances + distances.T) / 2, 0, 2)
    np.fill_diagonal(even, 0)
    labels = cluster.HDBSCAN(min_cluster_size=_LEAST, metric="precomputed", copy=True).fit_predict(
        even
    )
    return np.asarray(labels)


def _columns(scores: Scores, columns: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    if scores.train_labels is not None:
        by_name["label"] = np.asarray(scores.train_labels).tolist()
    for name, values in (columns or {}).items():
        _arguments.instance(f"columns[{name!r}]", values, Sequence, error=EvaluationError)
        if len(values) != len(scores.train_ids):
            raise EvaluationError(
                f"the column {name!r} does not have one value for each training row",
                code="evaluate.wrong_column",
                found=f"{len(values)} values",
                expected=len(scores.train_ids),
            )
        by_name[name] = list(values)
    return by_name


def _named(rows: AnyArray, columns: dict[str, list[Any]]) -> str:
    """Describe what most of the rows share and most others do not."""
    parts = []
    for name, values in columns.items():
        own = [values[row] for row in rows]
        if all(isinstance(value, str) and " " in value for value in own):
            words = _words(own, values)
            parts += [f"{name} with {', '.join(words)}"] if words else []
            continue
        value, count = Counter(own).most_common(1)[0]
        share, usual = count / len(own), values.count(value) / len(values)
        if share >= _SHARED and share > 1.5 * usual:
            parts.append(f"{name} {value} ({share:.0%})")
    return ", ".join(parts) or "no common property"


def _words(own: list[str], every: list[Any]) -> list[str]:
    """Return the words that most of these texts have, the rarest elsewhere first."""
    have = Counter(word for text in own for word in set(text.lower().split()))
    usual = Counter(word for text in every for word in set(str(text).lower().split()))
    shared = [word for word, count in have.items() if count >= _SHARED * len(own)]
    return sorted(shared, key=lambda word: (usual[word] / have[word], word))[:3]


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Training rows to act on, each with its reason.

    Attributes:
        ids: Ids of the rows `[K]`, the most important first.
        values: Value of each row `[K]`.
        reasons: Reason for each row.
        suggested: Suggested label of each row.
    """

    ids: AnyArray
    values: AnyArray
    reasons: tuple[str, ...]
    suggested: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file of ids, values and reasons.

        Args:
            path: The file.
        """
        columns = ["id", "value", "reason"] + (["suggested"] if self.suggested is not None else [])
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(columns)
            for at, number in enumerate(self.ids.tolist()):
                row = [number, f"{float(self.values[at]):.6g}", self.reasons[at]]
                out.writerow(row + ([self.suggested[at]] if self.suggested is not None else []))


@checked(EvaluationError)
def select_rows(scores: Scores, keep: float, *, kinds: Any = None) -> ChosenRows:
    """Select the training rows that help the queries most.

    Each query's scores are standardized and averaged within its kind; a row counts by the kind that it helps
    most, so that no kind is left without rows (as LESS does with subtasks). Cost: Q x N.

    Args:
        scores: Scores `[Q, N]`.
        keep: Number of rows, or their share as a float.
        kinds: Kind of each query `[Q]`; its label by default.

    Returns:
        The rows, the most helpful first.

    Raises:
        EvaluationError: `kinds` has the wrong length.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> scores = Scores(np.eye(3, 9, dtype=np.float32), np.arange(3), np.arange(9))
        >>> select_rows(scores, 3, kinds=["a", "b", "c"]).ids.tolist()
        [0, 1, 2]
    """
    total = len(scores.train_ids)
    if isinstance(keep, float):
        share = _arguments.number("keep", keep, error=EvaluationError, above=0, most=1)
        count = max(1, round(share * total))
    else:
        count = _arguments.count("keep", keep, error=EvaluationError, least=1, most=total)
    kind_values = kinds if kinds is not None else scores.query_labels
    names = np.zeros(len(scores.query_ids), int)
    if kind_values is not None:
        names = _arguments.array(
            "kinds",
            kind_values,
            error=EvaluationError,
            kinds="biufUS",
            expected="numbers or words",
            shape=(len(scores.query_ids),),
            code="evaluate.wrong_kinds",
        )
    values = np.asarray(scores.values, np.float64)
    spread = values.std(axis=1, keepdims=True)
    centered = values - values.mean(axis=1, keepdims=True)
    standard = np.divide(centered, spread, out=np.zeros_like(values), where=spread > 0)
    unique_kinds = np.unique(names)
    by_kind = np.stack([standard[names == kind].mean(axis=0) for kind in unique_kinds])
    best, serves = by_kind.max(axis=0), by_kind.argmax(axis=0)
    order = np.argsort(-best, kind="stable")[:count]
    kind_reasons = (
        [f"helps queries of kind {unique_kinds[serves[row]]}" for row in order]
        if len(unique_kinds) > 1
        else []
    )
    reasons = kind_reasons or [f"helps the {scores.queries} queries" for _ in order]
    return ChosenRows(scores.train_ids[order], best[order], tuple(reasons))


@checked(EvaluationError)
def find_leaks(
    cosines: Scores, *, above: Annotated[float, Limits(least=-1, most=1)] = 0.95
) -> ChosenRows:
    """Find training rows that are nearly copies of a query, by the cosine of their gradients.

    A row that is close to several queries is listed with the closest. Cost: Q x N.

    Args:
        cosines: Scores of the method `cos` or `similarity`.
        above: Smallest cosine.

    Returns:
        The rows, the closest first.

    Raises:
        EvaluationError: The scores are not cosines.
    """
    values = np.asarray(cosines.values)
    if np.abs(values).max(initial=0) > 1 + 1e-3:
        raise EvaluationError(
            "find_leaks needs cosines, which are between -1 and 1",
            code="evaluate.not_cosines",
            found=f"scores of {cosines.method} up to {float(np.abs(values).max()):.3g}",
            fix='Pass gk.attribute(store, method="cos").',
        )
    best, nearest = values.max(axis=0), values.argmax(axis=0)
    order = np.argsort(-best, kind="stable")
    order = order[best[order] >= above]
    reasons = [
        f"cosine {best[row]:.3f} with {cosines.queries} {cosines.query_ids[nearest[row]]}"
        for row in order
    ]
    return ChosenRows(cosines.train_ids[order], best[order], tuple(reasons))


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


@checked(EvaluationError)
def map_rows(
    store: Store | str | os.PathLike[str],
    *,
    split: str = "train",
    checkpoints: str | None = None,
    run: str = "main",
    name: str = "main",
    clusters: PositiveInt = 8,
    most: Annotated[int, Limits(2)] = 4000,
    seed: NonNegativeInt = 0,
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
    opened = open_store(store, create=False)
    stored = gradients(opened, split=split, checkpoints=checkpoints, run=run, name=name)
    block, rows = stored.block, _sample(len(stored), most, seed)
    # Cosines of 256-dimensional projections have an error of about 0.06.
    low = np.asarray(project(stored, Projection(dim=256), rows=rows))
    labels = np.asarray(block.column("label"))[rows] if "label" in block.names else None
    of = f"gradients of {split} at {stored.key.checkpoint}"
    return _build_map(low, block.ids[rows], labels, len(stored), of, clusters, seed)


@checked(EvaluationError)
def map_targets(
    datamodels: Datamodels,
    *,
    clusters: PositiveInt = 8,
    most: Annotated[int, Limits(2)] = 4000,
    seed: NonNegativeInt = 0,
) -> RowMap:
    """Map targets of datamodels by the training examples that they depend on.

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 20, 6)
    >>> map_targets(fit(data.masks, data.outputs), clusters=2).places.shape
    (6, 2)
    """
    weights = np.asarray(datamodels.weights.T)
    rows = _sample(len(weights), most, seed)
    of = f"datamodels of {datamodels.num_models} models"
    return _build_map(weights[rows], rows, None, len(weights), of, clusters, seed)


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
    cluster = import_extra("sklearn.cluster", extra="demo", what="a search for clusters")
    count = min(count, len(np.unique(along, axis=0)))
    marks = cluster.KMeans(count, n_init=4, random_state=seed).fit_predict(along)
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
