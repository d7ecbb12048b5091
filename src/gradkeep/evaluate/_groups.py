"""Groups of rows that act together, and selections of rows."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._display import TextDisplay
from gradkeep._surroundings import install_hint
from gradkeep.errors import EvaluationError, GradkeepError, MissingExtraError
from gradkeep.evaluate._lds import places_of
from gradkeep.evaluate._verified import verify_rows
from gradkeep.query import gradients
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._evaluation import Evaluation
    from gradkeep.evaluate._recipe import Recipe

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_LEAST = 3
"""Rows of the smallest group."""
_SHARED = 0.6
"""A group is named by what so many of its rows have."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowGroup(TextDisplay):
    """Some training rows that act alike on what is asked about."""

    ids: AnyArray
    """`[K]`, the strongest first"""
    scores: AnyArray
    """`[K]`: summed over the queries asked about"""
    share: float
    """Of all that helped (or harmed) what these rows did."""
    name: str
    """What they share."""
    verified: Evaluation | None = None
    """What retraining without them did, beside random rows, if that was asked for."""

    @property
    def helps(self) -> bool:
        """Whether the rows helped."""
        return bool(self.scores.sum() > 0)

    @property
    def effect(self) -> float:
        """What removing them is predicted to change, in the scale of the scores."""
        return -float(self.scores.sum())

    def __str__(self) -> str:
        did = "helped" if self.helps else "harmed"
        told = f"{len(self.ids)} rows, {self.share:.0%} of what {did}: {self.name}"
        return told if self.verified is None else f"{told}\n    {self.verified}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowGroups(TextDisplay):
    """A few groups that together explain a query or several, those that helped first."""

    queries: AnyArray
    """`[Q]`: the ids asked about"""
    groups: tuple[RowGroup, ...]
    rest: int
    """Strong rows in none of these groups."""

    def __str__(self) -> str:
        asked = ", ".join(str(number) for number in self.queries[:5].tolist())
        more = f" and {len(self.queries) - 5} more" if len(self.queries) > 5 else ""
        lines = [f"query {asked}{more}: {len(self.groups)} groups, {self.rest} strong rows in none"]
        return "\n".join([*lines, *(f"  {group}" for group in self.groups)])


@checked(EvaluationError)
def groups(
    scores: Scores,
    query: Any = None,
    *,
    count: int = 5,
    most: int = 100,
    columns: Mapping[str, Sequence[Any]] | None = None,
    features: Any = None,
    recipe: Recipe | None = None,
    seeds: int = 3,
    **options: Any,
) -> RowGroups:
    """The `count` strongest groups of rows that helped a query, and as many that harmed it.

    `query` is an id, a list of ids, or by default all of them.
    The `most` strongest rows of each side are clustered (HDBSCAN) by the cosines of their gradients, or
    of `features` `[N, D]`, and named by what most of a group shares: labels, and `columns`
    of the training rows (a source, a text, of which the words are taken). With a `recipe` each group
    is left out in turn and the model trained again, beside as many random rows (`options` are those of
    `gk.farm.run`). Cost: most x most products of gradients; with a recipe, (groups + 5) x seeds trainings.
    """
    _arguments.count("count", count, error=EvaluationError, least=1)
    _arguments.count("most", most, error=EvaluationError, least=_LEAST)
    asked = np.arange(len(scores.query_ids))
    if query is not None:
        ids = [query] if isinstance(query, int | np.integer) else query
        asked = np.unique(places_of("query", ids, scores.query_ids))
    total = np.asarray(scores.values, np.float64)[asked].sum(axis=0)
    shared = _columns(scores, columns)
    found: list[RowGroup] = []
    rest = 0
    for sign in (1, -1):
        order = np.argsort(-sign * total, kind="stable")[:most]
        order = order[sign * total[order] > 0]
        strength = np.abs(total[sign * total > 0]).sum()
        marks = _clusters(_distances(scores, order, features))
        made = []
        for mark in range(marks.max(initial=-1) + 1):
            rows = order[marks == mark]
            share = float(np.abs(total[rows]).sum() / strength)
            named = _named(rows, shared)
            made.append(RowGroup(scores.train_ids[rows], total[rows], share, named))
        strongest = sorted(made, key=lambda group: -group.share)[:count]
        rest += len(order) - sum(len(group.ids) for group in strongest)
        found += strongest
    if recipe is not None:
        wanted: Any = {"scores": scores, "queries": scores.query_ids[asked], "seeds": seeds}
        found = [
            dataclasses.replace(one, verified=verify_rows(one.ids, recipe, **wanted, **options))
            for one in found
        ]
    return RowGroups(scores.query_ids[asked], tuple(found), rest)


def _distances(scores: Scores, rows: AnyArray, features: Any) -> AnyArray:
    """How unlike some rows are `[K, K]`, from 0 to 2: one minus the cosine of their gradients.

    Of their features where some are given; of how they act on all queries where no gradients can be
    compared.
    """
    if features is not None:
        told = _arguments.array("features", features, error=EvaluationError).astype(np.float64)
        if told.ndim != 2 or len(told) != len(scores.train_ids):
            raise EvaluationError(
                "features are a row of numbers for each training row",
                found=list(told.shape),
                expected=f"[{len(scores.train_ids)}, D]",
            )
        return 1 - _cosines((told - told.mean(axis=0))[rows])
    if scores.store is not None and scores.checkpoints:
        try:
            # The last so many checkpoints tell how alike rows are.
            kept = [_alike(scores, place, rows) for place in scores.checkpoints[-3:]]
            return np.asarray(1 - np.mean(kept, axis=0))
        except GradkeepError:
            pass  # coordinates that no cosine can be made of, or a capture that is gone
    return 1 - _cosines(np.asarray(scores.values, np.float64).T[rows])


def _alike(scores: Scores, place: str, rows: AnyArray) -> AnyArray:
    """Cosines of the gradients of some rows at one checkpoint."""
    assert scores.store is not None
    run, _, checkpoint = place.rpartition("/")
    kept = gradients(scores.store, split=scores.train, checkpoints=checkpoint, run=run or "main")
    at = kept.positions(scores.train_ids[rows]).tolist()
    pair = GradientPair(kept, kept)
    engine = ProductEngine([pair], positions=at, rows=at, answer=8 * len(at) ** 2)
    products = np.zeros((len(at), len(at)))
    for tile in engine.tiles():
        high, wide = tile.values.shape[1:]
        columns = slice(tile.train_start, tile.train_start + wide)
        products[tile.query_start : tile.query_start + high, columns] = tile.values[0].numpy()
    lengths = np.sqrt(np.maximum(products.diagonal(), 0))
    return np.asarray(products / np.maximum(np.outer(lengths, lengths), 1e-30))


def _cosines(told: AnyArray) -> AnyArray:
    unit = told / np.maximum(np.linalg.norm(told, axis=1, keepdims=True), 1e-30)
    return np.asarray(unit @ unit.T)


def _clusters(distances: AnyArray) -> AnyArray:
    """Which cluster each row is in, -1 for none."""
    try:
        from sklearn.cluster import HDBSCAN
    except ImportError as error:
        raise MissingExtraError("groups need scikit-learn", fix=install_hint("demo")) from error
    if len(distances) < 2 * _LEAST:
        return np.full(len(distances), 0 if len(distances) >= _LEAST else -1)
    even = np.clip((distances + distances.T) / 2, 0, 2)
    np.fill_diagonal(even, 0)
    found = HDBSCAN(min_cluster_size=_LEAST, metric="precomputed", copy=True).fit_predict(even)
    return np.asarray(found)


def _columns(scores: Scores, columns: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    given: dict[str, list[Any]] = {}
    if scores.train_labels is not None:
        given["label"] = np.asarray(scores.train_labels).tolist()
    for name, values in (columns or {}).items():
        _arguments.instance(f"columns[{name!r}]", values, Sequence, error=EvaluationError)
        if len(values) != len(scores.train_ids):
            raise EvaluationError(
                f"the column {name!r} is not of the training rows",
                found=f"{len(values)} values",
                expected=len(scores.train_ids),
            )
        given[name] = list(values)
    return given


def _named(rows: AnyArray, columns: dict[str, list[Any]]) -> str:
    """What most of the rows share and most others do not."""
    told = []
    for name, values in columns.items():
        own = [values[row] for row in rows]
        if all(isinstance(value, str) and " " in value for value in own):
            words = _words(own, values)
            told += [f"{name} with {', '.join(words)}"] if words else []
            continue
        value, count = Counter(own).most_common(1)[0]
        share, usual = count / len(own), values.count(value) / len(values)
        if share >= _SHARED and share > 1.5 * usual:
            told.append(f"{name} {value} ({share:.0%})")
    return ", ".join(told) or "nothing in common that was kept"


def _words(own: list[str], every: list[Any]) -> list[str]:
    """The words that most of these texts have, the rarest elsewhere first."""
    have = Counter(word for text in own for word in set(text.lower().split()))
    usual = Counter(word for text in every for word in set(str(text).lower().split()))
    shared = [word for word, count in have.items() if count >= _SHARED * len(own)]
    return sorted(shared, key=lambda word: (usual[word] / have[word], word))[:3]


_CLOSE = 0.95
"""A cosine of gradients above which two rows are taken for copies."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Training rows that something should be done about, each with its reason."""

    ids: AnyArray
    """`[K]`, the first to act on first"""
    values: AnyArray
    """`[K]`"""
    reasons: tuple[str, ...]
    suggested: tuple[str, ...] | None = None
    """What each label should be, where something is suggested."""

    def __len__(self) -> int:
        return len(self.ids)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file of ids, values and reasons."""
        columns = ["id", "value", "reason"] + (["suggested"] if self.suggested is not None else [])
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(columns)
            for at, number in enumerate(self.ids.tolist()):
                row = [number, f"{float(self.values[at]):.6g}", self.reasons[at]]
                out.writerow(row + ([self.suggested[at]] if self.suggested is not None else []))


@checked(EvaluationError)
def select_rows(scores: Scores, keep: float, *, kinds: Any = None) -> ChosenRows:
    """The rows most worth training on for what was asked: `keep` of them, or that share.

    Each query's scores are standardised and averaged within its kind (its label, or `kinds` `[Q]`);
    a row counts by the kind that it serves best, so that no kind is left without rows (as LESS does
    over its subtasks). Cost: Q x N.

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
    given = kinds if kinds is not None else scores.query_labels
    names = np.zeros(len(scores.query_ids), int)
    if given is not None:
        names = _arguments.array(
            "kinds", given, error=EvaluationError, kinds="biufUS", expected="numbers or words"
        )
    if names.shape != scores.query_ids.shape:
        raise EvaluationError(
            "kinds are one for each query", found=list(names.shape), expected=len(scores.query_ids)
        )
    values = np.asarray(scores.values, np.float64)
    spread = values.std(axis=1, keepdims=True)
    centred = values - values.mean(axis=1, keepdims=True)
    standard = np.divide(centred, spread, out=np.zeros_like(values), where=spread > 0)
    every = np.unique(names)
    by_kind = np.stack([standard[names == one].mean(axis=0) for one in every])
    best, serves = by_kind.max(axis=0), by_kind.argmax(axis=0)
    order = np.argsort(-best, kind="stable")[:count]
    told = (
        [f"helps queries of kind {every[serves[row]]}" for row in order] if len(every) > 1 else []
    )
    reasons = told or [f"helps the {scores.queries} queries" for _ in order]
    return ChosenRows(scores.train_ids[order], best[order], tuple(reasons))


@checked(EvaluationError)
def find_leaks(cosines: Scores, *, above: float = _CLOSE) -> ChosenRows:
    """Training rows that are as good as copies of a query: cosines of gradients above a bound.

    `cosines` are scores of the method `cos` (or of `similarity`). A row that several queries name is
    listed with the closest. Cost: Q x N.
    """
    _arguments.number("above", above, error=EvaluationError, least=-1, most=1)
    values = np.asarray(cosines.values)
    if np.abs(values).max(initial=0) > 1 + 1e-3:
        raise EvaluationError(
            "leaks are found by cosines, which lie between -1 and 1",
            found=f"scores of {cosines.method} up to {float(np.abs(values).max()):.3g}",
            fix='pass gk.attribute(store, method="cos")',
        )
    best, nearest = values.max(axis=0), values.argmax(axis=0)
    order = np.argsort(-best, kind="stable")
    order = order[best[order] >= above]
    reasons = [
        f"cosine {best[row]:.3f} with {cosines.queries} {cosines.query_ids[nearest[row]]}"
        for row in order
    ]
    return ChosenRows(cosines.train_ids[order], best[order], tuple(reasons))
