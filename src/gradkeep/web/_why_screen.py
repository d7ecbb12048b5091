"""The Why screen: a query, and the rows that helped and harmed it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.errors import GradkeepError, MissingRows
from gradkeep.web._background import StillWorking
from gradkeep.web._clusters_screen import EvaluationView, lds_of
from gradkeep.web._responses import ProblemView, problem_of
from gradkeep.web._score_sources import (
    Asked,
    ScoreSource,
    default_source,
    scores_for,
    source_named,
)
from gradkeep.web._served import AS_LABEL, RowView, row_views

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.web._served import RowTable, ServedStore

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """What each layer adds to the scores of some rows."""

    layers: tuple[str, ...]
    shares: list[float]
    """Of the sum of absolute parts over all rows, by layer."""
    rows: list[int]
    parts: list[list[float]]
    """By row, then by layer: they add up to the score."""


def split_layers(
    served: ServedStore, asked: Asked, query: int, *, source: str, k: int
) -> LayerSplit:
    """The parts of the layers in a query's scores, of methods whose scores are sums over layers."""
    named = source_named(served, source)
    scores = scores_for(served, named, asked, query, per_layer=True)
    if scores.per_layer is None:
        raise MissingRows(
            "these scores are not told apart by layers",
            fix=f"gk.attribute(store, method={named.method!r}, per_layer=True, save=NAME)",
        )
    at = int(np.flatnonzero(scores.query_ids == query)[0])
    parts = np.asarray(scores.per_layer[:, at], np.float64)
    rows = [*scores.top(k, query=query).ids, *scores.bottom(k, query=query).ids]
    places = [int(np.flatnonzero(scores.train_ids == row)[0]) for row in rows]
    whole = np.abs(parts).sum(axis=1)
    return LayerSplit(
        scores.layers,
        (whole / max(float(whole.sum()), 1e-30)).tolist(),
        [int(row) for row in rows],
        [parts[:, place].tolist() for place in places],
    )


@dataclass(frozen=True, slots=True)
class GroupView:
    """Some training rows that act alike on the query."""

    name: str
    share: float
    helps: bool
    size: int
    ids: list[int]
    rows: list[RowView]


@dataclass(frozen=True, slots=True)
class GroupsView:
    """The groups of a query, those that helped first."""

    groups: list[GroupView]
    rest: int


def group_rows(served: ServedStore, asked: Asked, query: int, *, source: str) -> GroupsView:
    """What `gk.groups` finds for a query."""
    named = source_named(served, source)
    scores = scores_for(served, named, asked, query)
    train = served.table(asked.run, asked.train, asked.name)

    def make(_: Any) -> GroupsView:
        from gradkeep.evaluate._groups import groups

        found = groups(scores, query)
        return GroupsView(
            [
                GroupView(
                    one.name,
                    one.share,
                    one.helps,
                    len(one.ids),
                    one.ids.tolist(),
                    row_views(served, train, one.ids[:8].tolist()),
                )
                for one in found.groups
            ],
            found.rest,
        )

    age = served.sealed(asked.run, asked.name)
    key = ("groups", source, asked, age, query)
    return served.desk.ask(key, f"grouping the rows of {query}", make)


@dataclass(frozen=True, slots=True)
class TokenParts:
    """What each token of a row carries of its score."""

    row: int
    values: list[float]
    tokens: list[str]
    """Empty where nobody said what the tokens are."""


@dataclass(frozen=True, slots=True)
class TokensView:
    """Tokens of some training rows, for one query."""

    method: str
    rows: list[TokenParts]


def split_tokens(served: ServedStore, asked: Asked, query: int, *, rows: list[int]) -> TokensView:
    """What `gk.attribute_tokens` says of some training rows."""
    age = served.sealed(asked.run, asked.name)
    places = served.checkpoints(asked.run, asked.name, asked.queries, asked.train)

    def make(_: Any) -> TokensView:
        from gradkeep.attribution._tokens import attribute_tokens

        found = attribute_tokens(
            served.store,
            ids=[query],
            train_ids=rows,
            queries=asked.queries,
            train=asked.train,
            run=asked.run,
            name=asked.name,
            checkpoints=places[-1] if places else None,
        )
        preview = served.preview(asked.train)
        parts = []
        for row in rows:
            tokens = [] if preview is None else list(preview.show(row).tokens)
            parts.append(TokenParts(row, found.of(query, row).tolist(), tokens))
        return TokensView(found.method, parts)

    key = ("tokens", asked, age, query, tuple(rows))
    return served.desk.ask(key, "telling tokens apart", make)


QueryFilter = Literal["all", "wrong", "unsure"]
_UNSURE = (0.1, 0.9)
_LARGEST_TEXTS = 32 << 20


@dataclass(frozen=True, slots=True)
class QueryList:
    """Some of the queries, and how many there are of each kind."""

    total: int
    wrong: int
    unsure: int
    matching: int
    rows: list[RowView]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A training row with its score for the query."""

    row: RowView
    score: float
    share: float
    """Of the sum of all absolute scores of the query."""
    decision: str | None = None
    """What a person said of its label."""


@dataclass(frozen=True, slots=True)
class ScoreShape:
    """How the scores of all rows are spread."""

    low: float
    high: float
    counts: list[int]


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What one source says about a query; or why it cannot; or how far it is."""

    source: ScoreSource | None
    problem: ProblemView | None = None
    working: str | None = None
    done: int = 0
    total: int = 0
    checkpoints: tuple[str, ...] = ()
    scale: str = ""
    exact: bool = True
    approximate: str | None = None
    rows: int = 0
    """Training rows that were scored."""
    absolute: float = 0.0
    """The sum of all absolute scores, which shares are of."""
    positive: float = 0.0
    """The share of it that helped."""
    confidence: float | None = None
    """From 0 to 1: how far other checkpoints would agree."""
    judged: EvaluationView | None = None
    """How well the method predicts retraining, if that was evaluated."""
    shape: ScoreShape | None = None
    helped: tuple[ScoredRow, ...] = ()
    hurt: tuple[ScoredRow, ...] = ()
    foreign: int = 0
    """Rows shown that the capture does not have: the scores are of another one."""


@dataclass(frozen=True, slots=True)
class ExplainedLabel:
    """A label that the store can explain: another capture of the same query."""

    queries: str
    """The split to ask."""
    label: int | float | None
    label_name: str | None


@dataclass(frozen=True, slots=True)
class WhyView:
    """A query, and what each source says of it."""

    query: RowView
    queries: str
    train: str
    probabilities: list[float] | None
    classes: list[str] | None
    explained: list[ExplainedLabel]
    answers: list[SourceAnswer]


def list_queries(
    served: ServedStore,
    asked: Asked,
    *,
    show: QueryFilter,
    search: str,
    start: int,
    count: int,
) -> QueryList:
    """Queries that match, those with the largest loss first where the model is wrong."""
    table = served.table(asked.run, asked.queries, asked.name)
    kinds = _kinds(table)
    chosen, note = _matching(served, table, kinds[show], search.strip())
    shown = table.ids[chosen[start : start + count]].tolist()
    return QueryList(
        len(table.ids),
        len(kinds["wrong"]),
        len(kinds["unsure"]),
        len(chosen),
        row_views(served, table, shown),
        note,
    )


def random_query(served: ServedStore, asked: Asked, *, show: QueryFilter) -> RowView:
    """A query of one kind, by chance."""
    table = served.table(asked.run, asked.queries, asked.name)
    places = _kinds(table)[show]
    if not len(places):
        raise MissingRows(f"no query of {asked.queries!r} is {show}")
    return row_views(served, table, [int(table.ids[random.choice(places.tolist())])])[0]


def explain(
    served: ServedStore, asked: Asked, query: int, *, sources: list[str], k: int
) -> WhyView:
    """What one or two sources say about a query."""
    table = served.table(asked.run, asked.queries, asked.name)
    (view,) = row_views(served, table, [query])
    if not view.known:
        raise MissingRows(
            f"{asked.queries!r} has no row {query}",
            found=f"ids {table.ids[:3].tolist()} ... {table.ids[-1:].tolist()}",
        )
    named = sources or [default_source(served, asked)]
    preview = served.preview(asked.queries)
    return WhyView(
        query=view,
        queries=asked.queries,
        train=asked.train,
        probabilities=_probabilities(table, query),
        classes=None if preview is None or preview.classes is None else list(preview.classes),
        explained=_explained(served, asked, query),
        answers=[_answer(served, asked, one, query, k) for one in named[:2]],
    )


def _answer(served: ServedStore, asked: Asked, given: str, query: int, k: int) -> SourceAnswer:
    source = None
    try:
        source = source_named(served, given)
        scores = scores_for(served, source, asked, query)
        return _answered(served, asked, source, scores, query, k)
    except StillWorking as working:
        return SourceAnswer(source, working=working.what, done=working.done, total=working.total)
    except GradkeepError as error:
        return SourceAnswer(source, problem=problem_of(error))


def _answered(
    served: ServedStore, asked: Asked, source: ScoreSource, scores: Scores, query: int, k: int
) -> SourceAnswer:
    values = np.asarray(scores.of(query), np.float64)
    absolute = float(np.abs(values).sum())
    helped, hurt = scores.top(k, query=query), scores.bottom(k, query=query)
    train = served.table(asked.run, asked.train, asked.name)
    helped_rows = [(i, v) for i, v in _pairs(helped) if v > 0]
    hurt_rows = [(i, v) for i, v in _pairs(hurt) if v < 0]
    shown = row_views(served, train, [row for row, _ in (*helped_rows, *hurt_rows)])
    said = served.standing_decisions(train)
    made = [
        ScoredRow(
            view,
            score,
            score / absolute if absolute else 0.0,
            said[view.id].action if view.id in said else None,
        )
        for view, (_, score) in zip(shown, (*helped_rows, *hurt_rows), strict=True)
    ]
    place = int(np.flatnonzero(scores.query_ids == query)[0])
    confidence = None if scores.confidence is None else float(scores.confidence[place])
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    counts = np.histogram(values, bins=48, range=(low, high) if high > low else (-1, 1))[0]
    return SourceAnswer(
        source,
        checkpoints=scores.checkpoints,
        scale=scores.scale,
        exact=scores.exact,
        approximate=scores.approximate,
        rows=len(values),
        absolute=absolute,
        positive=float(values[values > 0].sum() / absolute) if absolute else 0.0,
        confidence=confidence,
        judged=lds_of(served, source.method),
        shape=ScoreShape(low, high, counts.tolist()),
        helped=tuple(made[: len(helped_rows)]),
        hurt=tuple(made[len(helped_rows) :]),
        foreign=sum(not view.known for view in shown),
    )


def _pairs(ranked: Any) -> list[tuple[int, float]]:
    return list(zip(ranked.ids.tolist(), ranked.values.tolist(), strict=True))


def _kinds(table: RowTable) -> dict[str, AnyArray]:
    """Positions of all, of wrong and of unsure queries, the most striking first."""
    everything = np.arange(len(table.ids))
    found = {"all": everything, "wrong": everything[:0], "unsure": everything[:0]}
    columns = table.columns
    if "label" in columns and "predicted" in columns:
        wrong = everything[columns["label"] != columns["predicted"]]
        if "loss" in columns:
            wrong = wrong[np.argsort(-columns["loss"][wrong], kind="stable")]
        found["wrong"] = wrong
    if table.probability is not None:
        low, high = _UNSURE
        given = table.probability
        unsure = everything[(given > low) & (given < high)]
        found["unsure"] = unsure[np.argsort(np.abs(given[unsure] - 0.5), kind="stable")]
    return found


def _matching(
    served: ServedStore, table: RowTable, places: AnyArray, search: str
) -> tuple[AnyArray, str | None]:
    """Those whose id begins so, whose label is called so, or whose text says so."""
    if not search:
        return places, None
    hits = np.zeros(len(table.ids), bool)
    if search.isdecimal():
        hits |= np.char.startswith(table.ids.astype(str), search)
    preview = served.preview(table.key.split)
    if preview is not None and preview.classes is not None and "label" in table.columns:
        low = search.lower()
        named = [at for at, name in enumerate(preview.classes) if low in name.lower()]
        hits |= np.isin(table.columns["label"], named)
    note = None
    if table.texts:
        if table.block.manifest.bytes > _LARGEST_TEXTS and len(table.ids) > 20_000:
            note = "texts of so many rows are not searched; search by id"
        else:
            low = search.lower()
            for name in table.texts:
                hits |= np.array([low in text.lower() for text in table.block.column(name)], bool)
    return places[hits[places]], note


def _probabilities(table: RowTable, query: int) -> list[float] | None:
    if "probabilities" not in table.block.names:
        return None
    found = table.block.read([query], ["probabilities"])["probabilities"][0]
    return [float(value) for value in found]


def _explained(served: ServedStore, asked: Asked, query: int) -> list[ExplainedLabel]:
    """The same query as it was captured with other labels, in splits such as `test-as-3`."""
    found = []
    splits = {split for _, split, _ in served.sealed(asked.run, asked.name)}
    base = asked.queries.partition(AS_LABEL)[0]
    for split in sorted(splits):
        if split != base and not split.startswith(base + AS_LABEL):
            continue
        table = served.table(asked.run, split, asked.name)
        at = int(table.positions(np.array([query]))[0])
        if at < 0 or "label" not in table.columns:
            continue
        label = table.columns["label"][at].item()
        preview = served.preview(split)
        name = None if preview is None else preview.name_of(label)
        found.append(ExplainedLabel(split, label, name))
    return found
