"""Scores: how much each training row helped each query."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._ranks import ranks
from gradkeep._surroundings import install_hint
from gradkeep.attribution._accumulator import zeros_on_disk_or_in_memory
from gradkeep.attribution._saved_scores import load_scores, save_scores
from gradkeep.errors import AttributionError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.query._planner import QueryPlan
    from gradkeep.store import Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]


_QUERIES = 64
"""Rows of scores that are summed at a time: they may be mapped from disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Which document each of some rows is of."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    """`[D]`, in the order in which they are first named"""
    names: Any
    """`[D]` texts; None where documents are numbers"""
    order: np.ndarray[Any, np.dtype[np.int64]]
    """`[rows]`: rows of one document beside each other"""
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """`[D]`: where each document begins among those"""

    def summed(self, values: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
        """Sums over each document's rows along an axis, in float64."""
        together = np.take(values, self.order, axis).astype(np.float64)
        return np.add.reduceat(together, self.starts, axis)


def place_of(ids: Ids, number: int, what: str) -> int:
    """The place of an id among those that were scored."""
    places = np.flatnonzero(ids == number)
    if not len(places):
        shown = f"{ids[:3].tolist()} ... {ids[-1:].tolist()}"
        raise AttributionError(f"no {what} with id {number} was scored", found=f"ids {shown}")
    return int(places[0])


def documents_of(name: str, given: Any, rows: int) -> Documents:
    """The documents that rows are said to be of; anything but one for each row is refused."""
    found = _arguments.array(
        name,
        given,
        error=AttributionError,
        kinds="iuUS",
        expected="a number or a text for each row",
    )
    if found.shape != (rows,):
        raise AttributionError(
            f"{name} must name one document for each row",
            found=f"shape {list(found.shape)}",
            expected=f"[{rows}]",
            fix="give them in the order of the rows, scores.train_ids or scores.query_ids",
        )
    kinds, first, which = np.unique(found, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first, kind="stable")
    places = np.empty(len(kinds), np.int64)
    places[by_appearance] = np.arange(len(kinds))
    members = places[which.reshape(-1)]
    order = np.argsort(members, kind="stable")
    counts = np.bincount(members, minlength=len(kinds))
    named = kinds[by_appearance]
    texts = named.dtype.kind in "US"
    return Documents(
        ids=np.arange(len(named)) if texts else named.astype(np.int64),
        names=named if texts else None,
        order=order,
        starts=np.cumsum(counts) - counts,
    )


def _summed(
    values: np.ndarray[Any, Any], lines: Documents | None, columns: Documents | None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    high = len(values)
    wide = values.shape[1] if columns is None else len(columns.ids)
    out = np.empty((high, wide), np.float64 if lines is not None else np.float32)
    for start in range(0, high, _QUERIES):
        some = values[start : start + _QUERIES]
        out[start : start + _QUERIES] = some if columns is None else columns.summed(some, 1)
    return (out if lines is None else lines.summed(out, 0)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RankedRows:
    """Training rows for one query, the most important first."""

    ids: Ids
    """`[k]`"""
    values: Floats
    """`[k]`"""

    def __iter__(self) -> Any:
        return iter((self.ids, self.values))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores `[queries, train]`, float32; **positive helps**.

    A positive score says that training on that row lowered the query's loss (raised its output).
    Scores of different methods are on different scales: compare ranks.

    >>> scores = Scores(np.array([[1.0, -2.0, 3.0]], np.float32), np.array([7]), np.arange(3))
    >>> scores.top(2, query=7).ids.tolist(), scores.rank(query=7).tolist()
    ([2, 0], [2, 3, 1])
    """

    values: Floats
    """`[Q, N]`, in memory or mapped from disk"""
    query_ids: Ids
    """`[Q]`"""
    train_ids: Ids
    """`[N]`"""
    method: str = "given"
    queries: str = "test"
    """The split that the queries are from."""
    train: str = "train"
    checkpoints: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    scale: str = ""
    """The formula, in words."""
    exact: bool = True
    approximate: str | None = None
    """What was approximated, if anything was."""
    options: str = "{}"
    """What the method was told, as JSON."""
    solved: str | None = None
    """How linear systems were solved, where there are any, and to which residual."""
    chosen: str | None = None
    """What was chosen by the outcomes of subset models, and how."""
    chosen_on: tuple[str, ...] = field(default=(), repr=False)
    """The digests of those subsets: scores are not to be judged by what they were chosen by."""
    query_labels: Any = None
    """`[Q]`, where they were kept"""
    train_labels: Any = None
    """`[N]`, where they were kept"""
    confidence: Floats | None = None
    """`[Q]` from 0 to 1: how much the scores would agree with those of as many other checkpoints"""
    per_layer: Floats | None = None
    """`[L, Q, N]`, where it was asked for"""
    captures: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The folder of every capture that they were computed from, with its identity."""
    plan: QueryPlan | None = field(default=None, repr=False)
    """How gradients were multiplied."""
    store: Store | None = field(default=None, repr=False)
    """Where they came from."""

    def __post_init__(self) -> None:
        for name in ("values", "query_ids", "train_ids"):
            value = getattr(self, name)
            _arguments.instance(name, value, np.ndarray, error=AttributionError)
        if self.query_ids.ndim != 1 or self.train_ids.ndim != 1:
            raise AttributionError("ids are one per row", expected="arrays [Q] and [N]")
        if self.values.shape != (len(self.query_ids), len(self.train_ids)):
            raise AttributionError(
                "scores need one row per query and one column per training row",
                found=f"shape {list(self.values.shape)}",
                expected=f"[{len(self.query_ids)}, {len(self.train_ids)}]",
            )

    def numpy(self) -> Floats:
        """The scores `[queries, train]`."""
        return self.values

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, training rows)"""
        return self.values.shape[0], self.values.shape[1]

    @checked(AttributionError)
    def top(self, k: int, *, query: int) -> RankedRows:
        """The `k` training rows that helped a query (by its id) most."""
        return self._ranked(k, query, sign=-1)

    @checked(AttributionError)
    def bottom(self, k: int, *, query: int) -> RankedRows:
        """The `k` training rows that harmed a query (by its id) most."""
        return self._ranked(k, query, sign=1)

    @checked(AttributionError)
    def of(self, query: int) -> Floats:
        """The scores `[N]` of one query, by its id."""
        row: Floats = self.values[place_of(self.query_ids, query, "query")]
        return row

    @checked(AttributionError)
    def rank(self, *, query: int) -> Ids:
        """The place `[N]` of every training row for one query: 1 helped most."""
        places = np.empty(len(self.train_ids), np.int64)
        order = np.argsort(-self.of(query), kind="stable")
        places[order] = np.arange(1, len(order) + 1)
        return places

    @checked(AttributionError)
    def by_document(self, train: Any = None, *, queries: Any = None) -> Scores:
        """Scores `[queries, documents]` of documents whose chunks are the rows: sums over chunks.

        `train` `[N]` says which document each training row is of, `queries` `[Q]` the same of
        queries; a document that is named again is the same one. Whole numbers are the new ids;
        texts are the new labels, and ids count them. Documents come in the order in which they
        are first named.

        >>> scores = Scores(np.array([[1.0, -2.0, 3.0]], np.float32), np.array([7]), np.arange(3))
        >>> summed = scores.by_document([5, 4, 5])
        >>> summed.train_ids.tolist(), summed.numpy().tolist()
        ([5, 4], [[4.0, -2.0]])
        """
        if train is None and queries is None:
            raise AttributionError(
                "no documents were given", fix="scores.by_document(documents) with one for each row"
            )
        count, rows = self.shape
        columns = None if train is None else documents_of("documents", train, rows)
        lines = None if queries is None else documents_of("query_documents", queries, count)
        changes: dict[str, Any] = {"values": _summed(self.values, lines, columns)}
        if self.per_layer is not None:
            changes["per_layer"] = np.stack([_summed(x, lines, columns) for x in self.per_layer])
        if columns is not None:
            changes |= {"train_ids": columns.ids, "train_labels": columns.names}
        if lines is not None:
            changes |= {"query_ids": lines.ids, "query_labels": lines.names, "confidence": None}
        changes["scale"] = f"{self.scale}, summed over the rows of a document".removeprefix(", ")
        return dataclasses.replace(self, **changes)

    @checked(AttributionError)
    def save(self, name: str, *, store: Store | None = None) -> None:
        """Keep the scores in the store that they came from, or in another.

        Saving the same again is free; other scores under that name are refused. Costs their bytes,
        streamed.
        """
        where = store or self.store
        if where is None:
            raise AttributionError("no store to save to", fix="pass store=gk.open(...)")
        save_scores(where, name, self)

    @classmethod
    @checked(AttributionError)
    def load(cls, store: Store, name: str, *, ids: Any = None) -> Scores:
        """Read scores saved under a name; what does not fit in memory is mapped from disk.

        Args:
            store: The store that they were saved in.
            name: The name that they were saved under.
            ids: Queries to read; all by default.

        Raises:
            AttributionError: There are no such scores, or a capture that they were computed from
                holds other rows by now.
        """
        return load_scores(store, name, cls, ids)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: a row per query id, a column per training id."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("data frames need pandas", fix=install_hint("sql")) from error
        rows = pandas.Index(self.query_ids, name="query")
        columns = pandas.Index(self.train_ids, name="train")
        return pandas.DataFrame(self.values, index=rows, columns=columns)

    @checked(AttributionError)
    def to_arrow(self, *, k: int | None = None) -> Any:
        """A `pyarrow.Table` of query, train and score; with `k` only the k most helpful of each."""
        if k is not None:
            _arguments.count("k", k, error=AttributionError, least=1)
        try:
            import pyarrow
        except ImportError as error:
            raise MissingExtraError("Arrow tables need pyarrow", fix=install_hint("sql")) from error
        count = len(self.train_ids) if k is None else min(k, len(self.train_ids))
        parts = []
        for query, row in zip(self.query_ids, self.values, strict=True):
            order = np.argsort(-row, kind="stable")[:count]
            columns = [np.full(count, query), self.train_ids[order], np.asarray(row[order])]
            parts.append(pyarrow.record_batch(columns, names=["query", "train", "score"]))
        return pyarrow.Table.from_batches(parts)

    @checked(AttributionError)
    def plot(self, *, query: int, k: int = 10) -> Any:
        """A `matplotlib` figure of the k rows that helped and that harmed a query most."""
        _arguments.count("k", k, error=AttributionError, least=1)
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError(
                "pictures need matplotlib", fix=install_hint("remat")
            ) from error
        row = self.of(query)
        order = np.argsort(-row, kind="stable")
        order = np.concatenate([order[:k], order[max(k, len(order) - k) :]])
        values = row[order]
        figure = Figure(figsize=(6.4, 0.25 * len(order) + 1), layout="constrained")
        axes = figure.subplots()
        axes.barh(np.arange(len(order)), values, color=np.where(values > 0, "#2b6cb0", "#c05621"))
        names = [f"{self.train} {number}" for number in self.train_ids[order]]
        if self.train_labels is not None:
            labels = np.asarray(self.train_labels)[order]
            names = [f"{name} ({label})" for name, label in zip(names, labels, strict=True)]
        axes.set_yticks(np.arange(len(order)), names, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="0.4", linewidth=0.8)
        axes.set_xlabel(f"{self.method}: positive helped, negative harmed")
        axes.set_title(f"{self.queries} {query}")
        return figure

    def __repr__(self) -> str:
        at = ", ".join(self.checkpoints[:4]) + (" ..." if len(self.checkpoints) > 4 else "")
        true = "exact" if self.exact else f"approximate ({self.approximate or self.method})"
        return (
            f"Scores({self.method}: {self.shape[0]} of {self.queries} x {self.shape[1]} of "
            f"{self.train} at {at}; {self.scale}; {true}, positive helps)"
        )

    def _repr_html_(self) -> str:
        from gradkeep.attribution._shown_scores import show  # which knows what scores are

        return show(self).html

    def _ranked(self, k: int, query: int, *, sign: int) -> RankedRows:
        _arguments.count("k", k, error=AttributionError)
        row = self.of(query)
        order = np.argsort(sign * row, kind="stable")[:k]
        return RankedRows(self.train_ids[order], row[order])


@checked(AttributionError)
def combine(scores: Sequence[Scores], *, how: Literal["mean", "borda"] = "mean") -> Scores:
    """One set of scores `[Q, N]` from several of the same queries and rows.

    `mean`: each query's scores are centred and divided by their standard deviation, so that every
    method counts the same, then averaged. `borda`: each query's rows are ranked, and their mean
    rank is scaled to run from -1 to 1. Costs C x Q x N (log N for ranks).

    >>> from gradkeep.attribution._scores import Scores
    >>> one = Scores(np.array([[1.0, 2.0, 9.0]], np.float32), np.array([0]), np.arange(3))
    >>> combine([one, one], how="borda").values.tolist()
    [[-1.0, 0.0, 1.0]]
    """
    if how not in ("mean", "borda"):
        raise AttributionError(f"no way to combine called {how!r}", expected="'mean' or 'borda'")
    if len(scores) == 0:
        raise AttributionError("no scores to combine")
    first = scores[0]
    for other in scores[1:]:
        for part in ("query_ids", "train_ids"):
            if not np.array_equal(getattr(first, part), getattr(other, part)):
                raise AttributionError(
                    f"scores of different {part.replace('_', ' ')} cannot be combined",
                    found=f"{len(getattr(first, part))} and {len(getattr(other, part))}",
                    fix="ask all methods about the same queries and training rows",
                )
    values = zeros_on_disk_or_in_memory(first.shape)
    turn = _standard if how == "mean" else _places
    for row in range(len(values)):
        values[row] = np.mean([turn(one.values[row]) for one in scores], 0)
    names = ", ".join(one.method for one in scores)
    return dataclasses.replace(
        first,
        values=values,
        method=f"{how} of {names}",
        checkpoints=tuple(dict.fromkeys(c for one in scores for c in one.checkpoints)),
        scale="mean of standardised scores" if how == "mean" else "mean rank, from -1 to 1",
        exact=all(one.exact for one in scores),
        approximate=next((one.approximate for one in scores if one.approximate), None),
        options="{}",
        chosen=None,
        chosen_on=tuple(dict.fromkeys(one for part in scores for one in part.chosen_on)),
        confidence=None,
        per_layer=None,
        captures={folder: one for part in scores for folder, one in part.captures.items()},
        plan=None,
    )


def _standard(row: Floats) -> Any:
    spread = float(row.std(dtype=np.float64))
    return (row - row.mean(dtype=np.float64)) / (spread or 1.0)


def _places(row: Floats) -> Any:
    return 2 * ranks(row[:, None])[:, 0] / max(1, len(row) - 1) - 1
