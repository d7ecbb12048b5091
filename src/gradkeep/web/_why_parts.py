"""Below one answer to why: what layers, groups of rows and tokens add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import MissingRows
from gradkeep.web._row_views import RowView, row_views
from gradkeep.web._score_sources import Asked, scores_for, source_named

if TYPE_CHECKING:
    from gradkeep.web._served import ServedStore


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
