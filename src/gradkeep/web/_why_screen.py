"""The screen Why: a query and the training rows that helped and hurt it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import Depends

from gradkeep._display import pick_fields
from gradkeep.errors import GradkeepError, MissingRowsError
from gradkeep.web._background import BusyError
from gradkeep.web._http import (
    Captures,
    Count,
    Name,
    Row,
    Rows,
    Search,
    Source,
    Sources,
    Start,
    TopK,
    error_problem,
)
from gradkeep.web._score_sources import compute_scores, default_source, find_source
from gradkeep.web._served import RELABELED_SPLIT, row_views
from gradkeep.web._store_screen import find_lds

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.web._served import RowTable, ServedStore

    AnyArray = np.ndarray[Any, np.dtype[Any]]

QueryFilter = Literal["all", "wrong", "unsure"]
CapturesParameter = Annotated[Captures, Depends()]


def list_queries(
    served: ServedStore,
    run: Name = "main",
    split: Name = "test",
    name: Name = "main",
    show: QueryFilter = "all",
    search: Search = "",
    start: Start = 0,
    count: Count = 40,
) -> dict[str, Any]:
    """Return matching queries; wrong predictions are sorted by loss."""
    table = served.table(run, split, name)
    positions = _positions_by_filter(table)
    matching, note = _search(served, table, positions[show], search.strip())
    ids = table.ids[matching[start : start + count]].tolist()
    return {
        "total": len(table.ids),
        "wrong": len(positions["wrong"]),
        "unsure": len(positions["unsure"]),
        "matching": len(matching),
        "rows": row_views(served, table, ids),
        "note": note,
    }


def random_query(
    served: ServedStore,
    run: Name = "main",
    split: Name = "test",
    name: Name = "main",
    show: QueryFilter = "wrong",
) -> dict[str, Any]:
    """Return a random query that passes a filter."""
    table = served.table(run, split, name)
    positions = _positions_by_filter(table)[show]
    if not len(positions):
        raise MissingRowsError(f"no query of {split!r} is {show}", code="web.no_query")
    return row_views(served, table, [int(table.ids[random.choice(positions.tolist())])])[0]


def explain_query(
    served: ServedStore,
    captures: CapturesParameter,
    query: Row,
    source: Sources = [],  # noqa: B006 - FastAPI copies it
    k: TopK = 8,
) -> dict[str, Any]:
    """Return what one or two sources say about a query."""
    table = served.table(captures.run, captures.queries, captures.name)
    (view,) = row_views(served, table, [query])
    if not view["known"]:
        raise MissingRowsError(
            f"{captures.queries!r} has no row {query}",
            code="web.unknown_row",
            found=f"ids {table.ids[:3].tolist()} ... {table.ids[-1:].tolist()}",
        )
    probabilities = None
    if "probabilities" in table.block.names:
        probabilities = table.block.read([query], ["probabilities"])["probabilities"][0]
    sources = source[:2] or [default_source(served, captures)]
    return {
        "query": view,
        **pick_fields(captures, "queries", "train"),
        "probabilities": probabilities,
        "classes": served.class_names(captures.queries),
        "explained": _captured_labels(served, captures, query),
        "answers": [_source_answer(served, captures, one, query, k) for one in sources],
    }


def show_layers(
    served: ServedStore, captures: CapturesParameter, query: Row, source: Source, k: TopK = 8
) -> dict[str, Any]:
    """Return each layer's part of the scores; the parts of a row add up to its score."""
    score_source = find_source(served, source)
    scores = compute_scores(served, score_source, captures, query, per_layer=True)
    if scores.per_layer is None:
        raise MissingRowsError(
            "these scores have no parts by layer",
            code="web.no_layers",
            fix=f"gk.attribute(store, method={score_source.method!r}, per_layer=True, save=NAME)",
        )
    at = int(np.flatnonzero(scores.query_ids == query)[0])
    parts = np.asarray(scores.per_layer[:, at], np.float64)
    rows = [*scores.top(k, query=query).ids, *scores.bottom(k, query=query).ids]
    totals = np.abs(parts).sum(axis=1)
    return {
        "layers": scores.layers,
        "shares": totals / max(float(totals.sum()), 1e-30),
        "rows": [int(row) for row in rows],
        "parts": [parts[:, int(np.flatnonzero(scores.train_ids == row)[0])] for row in rows],
    }


def show_groups(
    served: ServedStore, captures: CapturesParameter, query: Row, source: Source
) -> dict[str, Any]:
    """Return groups of training rows that act alike on the query."""
    scores = compute_scores(served, find_source(served, source), captures, query)
    train = served.table(captures.run, captures.train, captures.name)

    def compute(_: Any) -> dict[str, Any]:
        from gradkeep.evaluate._groups import groups

        result = groups(scores, query)
        views = [
            {
                **pick_fields(group, "name", "share", "helps"),
                "size": len(group.ids),
                "ids": group.ids.tolist(),
                "rows": row_views(served, train, group.ids[:8].tolist()),
            }
            for group in result.groups
        ]
        return {"groups": views, "rest": result.rest}

    version = served.sealed(captures.run, captures.name)
    key = ("groups", source, captures, version, query)
    return served.tasks.get(key, f"grouping the training rows of query {query}", compute)


def show_tokens(
    served: ServedStore, captures: CapturesParameter, query: Row, row: Rows
) -> dict[str, Any]:
    """Return each token's part of the scores of some training rows."""
    checkpoints = served.checkpoints(captures.run, captures.name, captures.queries, captures.train)

    def compute(_: Any) -> dict[str, Any]:
        from gradkeep.attribution._tokens import attribute_tokens

        parts = attribute_tokens(
            served.store,
            ids=[query],
            train_ids=row,
            queries=captures.queries,
            train=captures.train,
            run=captures.run,
            name=captures.name,
            checkpoints=checkpoints[-1] if checkpoints else None,
        )
        preview = served.preview(captures.train)
        rows = [
            {
                "row": one,
                "values": parts.of(query, one),
                "tokens": [] if preview is None else list(preview.show(one).tokens),
            }
            for one in row
        ]
        return {"method": parts.method, "rows": rows}

    version = served.sealed(captures.run, captures.name)
    key = ("tokens", captures, version, query, tuple(row))
    return served.tasks.get(key, "attributing tokens", compute)


def _source_answer(
    served: ServedStore, captures: Captures, source_id: str, query: int, k: int
) -> dict[str, Any]:
    """Return the scores of one source, why there are none, or how far they are."""
    answer: dict[str, Any] = {
        **dict.fromkeys(("source", "problem", "working", "judged", "shape", "confidence")),
        **dict.fromkeys(("done", "total", "rows", "foreign"), 0),
        **dict.fromkeys(("checkpoints", "helped", "hurt"), ()),
        "scale": "",
        "exact": True,
        "approximate": None,
    }
    try:
        source = answer["source"] = find_source(served, source_id)
        scores = compute_scores(served, source, captures, query)
        judged = find_lds(served, source.method)
        return answer | {"judged": judged} | _score_view(served, captures, scores, query, k)
    except BusyError as working:
        return answer | {"working": working.what, "done": working.done, "total": working.total}
    except GradkeepError as error:
        return answer | {"problem": error_problem(error)}


def _score_view(
    served: ServedStore, captures: Captures, scores: Scores, query: int, k: int
) -> dict[str, Any]:
    values = np.asarray(scores.of(query), np.float64)
    absolute = float(np.abs(values).sum())
    top, bottom = scores.top(k, query=query), scores.bottom(k, query=query)
    helped = [(i, v) for i, v in zip(top.ids.tolist(), top.values.tolist(), strict=True) if v > 0]
    hurt = [
        (i, v) for i, v in zip(bottom.ids.tolist(), bottom.values.tolist(), strict=True) if v < 0
    ]
    train = served.table(captures.run, captures.train, captures.name)
    decisions = served.standing_decisions(train)
    views = row_views(served, train, [row for row, _ in (*helped, *hurt)])
    rows = [
        {
            "row": view,
            "score": score,
            "share": score / absolute if absolute else 0.0,
            "decision": decisions[row].action if row in decisions else None,
        }
        for view, (row, score) in zip(views, (*helped, *hurt), strict=True)
    ]
    at = int(np.flatnonzero(scores.query_ids == query)[0])
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    counts, _ = np.histogram(values, bins=48, range=(low, high) if high > low else (-1, 1))
    return {
        **pick_fields(scores, "checkpoints", "scale", "exact", "approximate"),
        "rows": len(values),
        "absolute": absolute,
        "positive": float(values[values > 0].sum() / absolute) if absolute else 0.0,
        "confidence": None if scores.confidence is None else float(scores.confidence[at]),
        "shape": {"low": low, "high": high, "counts": counts},
        "helped": rows[: len(helped)],
        "hurt": rows[len(helped) :],
        # Rows that the capture does not have: the scores are of another one.
        "foreign": sum(not view["known"] for view in views),
    }


def _positions_by_filter(table: RowTable) -> dict[str, AnyArray]:
    """Return positions of all, wrong and unsure queries, the most striking first."""
    everything = np.arange(len(table.ids))
    positions = {"all": everything, "wrong": everything[:0], "unsure": everything[:0]}
    columns = table.columns
    if "label" in columns and "predicted" in columns:
        wrong = everything[columns["label"] != columns["predicted"]]
        if "loss" in columns:
            wrong = wrong[np.argsort(-columns["loss"][wrong], kind="stable")]
        positions["wrong"] = wrong
    if table.probability is not None:
        unsure = everything[(table.probability > 0.1) & (table.probability < 0.9)]
        distance = np.abs(table.probability[unsure] - 0.5)
        positions["unsure"] = unsure[np.argsort(distance, kind="stable")]
    return positions


def _search(
    served: ServedStore, table: RowTable, positions: AnyArray, search: str
) -> tuple[AnyArray, str | None]:
    """Filter positions by the start of an id, a label's name or a text; and say what was skipped."""
    if not search:
        return positions, None
    lowered, note = search.lower(), None
    hits = np.zeros(len(table.ids), bool)
    if search.isdecimal():
        hits |= np.char.startswith(table.ids.astype(str), search)
    classes = served.class_names(table.key.split)
    if classes is not None and "label" in table.columns:
        labels = [label for label, name in enumerate(classes) if lowered in name.lower()]
        hits |= np.isin(table.columns["label"], labels)
    if table.block.manifest.bytes > 32 << 20 and len(table.ids) > 20_000:
        note = "the texts of this many rows are not searched; search by id" if table.texts else None
    else:
        for name in table.texts:
            hits |= np.array([lowered in text.lower() for text in table.block.column(name)], bool)
    return positions[hits[positions]], note


def _captured_labels(served: ServedStore, captures: Captures, query: int) -> list[dict[str, Any]]:
    """Return the labels that the query was captured with, in splits such as `test-as-3`."""
    labels = []
    base = captures.queries.partition(RELABELED_SPLIT)[0]
    for split in sorted({split for _, split, _ in served.sealed(captures.run, captures.name)}):
        if split != base and not split.startswith(base + RELABELED_SPLIT):
            continue
        table = served.table(captures.run, split, captures.name)
        at = int(table.positions([query])[0])
        if at >= 0 and "label" in table.columns:
            label = table.columns["label"][at].item()
            name = served.label_name(split, label)
            labels.append({"queries": split, "label": label, "label_name": name})
    return labels
