"""Scores: how much each training row helped each query."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import PositiveInt, checked
from gradkeep._display import ResultTable, TableDisplay
from gradkeep._environment import import_extra
from gradkeep._ranks import ranks
from gradkeep.attribution._question import (
    zeros_on_disk_or_in_memory,
)
from gradkeep.attribution._saved_scores import load_scores, save_scores
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradkeep.query._planner import QueryPlan
    from gradkeep.store import Store

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]

_QUERIES = 64
"""Rows of scores that are summed at a time, since scores may be mapped from disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Assignment of rows to documents."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    """`[D]`, in order of first occurrence"""
    names: Any
    """`[D]` texts; None if documents are numbers"""
    order: np.ndarray[Any, np.dtype[np.int64]]
    """`[rows]`: permutation that makes the rows of each document contiguous"""
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """`[D]`: start of each document in that order"""

    def summed(self, values: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
        """Sum over each document's rows along an axis, in float64."""
        together = np.take(values, self.order, axis).astype(np.float64)
        return np.add.reduceat(together, self.starts, axis)


def find_position(ids: Ids, number: int, what: str) -> int:
    """Return the position of an id among the scored ones."""
    places = np.flatnonzero(ids == number)
    if not len(places):
        shown = f"{ids[:3].tolist()} ... {ids[-1:].tolist()}"
        raise AttributionError(
            f"there are no scores of {what} {number}",
            code="attribute.unknown_id",
            found=f"ids {shown}",
        )
    return int(places[0])


def documents_of(name: str, documents: Any, rows: int) -> Documents:
    """Parse the document of each row; raise unless there is one per row."""
    per_row = _arguments.array(
        name,
        documents,
        error=AttributionError,
        kinds="iuUS",
        expected="a number or a text for each row",
        shape=(rows,),
        code="attribute.wrong_documents",
    )
    kinds, first, which = np.unique(per_row, return_index=True, return_inverse=True)
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankedRows(TableDisplay):
    """Training rows for one query, the highest rank first; unpacks into ids and values.

    Attributes:
        ids: Ids of the training rows `[k]`.
        values: Their scores `[k]`.
    """

    ids: Ids
    values: Floats

    def __iter__(self) -> Any:
        return iter((self.ids, self.values))

    def _table(self) -> ResultTable:
        rows = [
            [str(row), f"{value:+.5g}"]
            for row, value in zip(self.ids[:10], self.values[:10], strict=True)
        ]
        more = f", {len(rows)} shown" if len(self.ids) > len(rows) else ""
        caption = f"{len(self.ids)} training rows{more}; positive helped, negative hurt"
        right = frozenset({0, 1})
        return ResultTable(caption, ["train row", "score"], rows, right)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores `[queries, train]`, float32; **positive helps**.

    A positive score means that training on that row lowered the query's loss (raised its output). Scores of
    different methods are on different scales: compare ranks.

    Args:
        values: Scores `[Q, N]`, in memory or mapped from disk.
        query_ids: Ids of the queries `[Q]`.
        train_ids: Ids of the training rows `[N]`.
        method: Name of the method.
        queries: Split of the queries.
        train: Split of the training rows.
        checkpoints: Checkpoints that were used.
        layers: Layers that were used.
        scale: The formula in words.
        exact: True if the formula was computed without approximation.
        approximate: Description of the approximation, or None.
        options: Options of the method, as JSON.
        solved: How linear systems were solved, and to which residual.
        chosen: Option that was chosen by the outcomes of subset models, and how.
        chosen_on: Digests of those subsets: do not evaluate the scores on them.
        query_labels: Labels of the queries `[Q]`, if captured.
        train_labels: Labels of the training rows `[N]`, if captured.
        confidence: Expected agreement `[Q]`, 0 to 1, with the scores of as many other checkpoints.
        per_layer: Scores `[L, Q, N]`, if requested.
        captures: Folder and identity of every capture they were computed from.
        plan: How gradients were multiplied.
        store: Store they were computed from.

    Example:
        >>> scores = Scores(np.array([[1.0, -2.0, 3.0]], np.float32), np.array([7]), np.arange(3))
        >>> scores.top(2, query=7).ids.tolist(), scores.rank(query=7).tolist()
        ([2, 0], [2, 3, 1])
    """

    values: Floats
    query_ids: Ids
    train_ids: Ids
    method: str = "given"
    queries: str = "test"
    train: str = "train"
    checkpoints: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    scale: str = ""
    exact: bool = True
    approximate: str | None = None
    options: str = "{}"
    solved: str | None = None
    chosen: str | None = None
    chosen_on: tuple[str, ...] = field(default=(), repr=False)
    query_labels: Any = None
    train_labels: Any = None
    confidence: Floats | None = None
    per_layer: Floats | None = None
    captures: Mapping[str, str] = field(default_factory=dict, repr=False)
    plan: QueryPlan | None = field(default=None, repr=False)
    store: Store | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("values", "query_ids", "train_ids"):
            value = getattr(self, name)
            _arguments.instance(name, value, np.ndarray, error=AttributionError)
        if self.query_ids.ndim != 1 or self.train_ids.ndim != 1:
            raise AttributionError(
                "ids must be one-dimensional",
                code="attribute.wrong_shape",
                expected="arrays [Q] and [N]",
            )
        if self.values.shape != (len(self.query_ids), len(self.train_ids)):
            raise AttributionError(
                "scores need one row per query and one column per training row",
                code="attribute.wrong_shape",
                found=f"shape {list(self.values.shape)}",
                expected=f"[{len(self.query_ids)}, {len(self.train_ids)}]",
            )

    def numpy(self) -> Floats:
        """Return the scores `[queries, train]`."""
        return self.values

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of training rows."""
        return self.values.shape[0], self.values.shape[1]

    @checked(AttributionError)
    def top(self, k: int, *, query: int) -> RankedRows:
        """Return the `k` training rows that helped a query most.

        Args:
            k: Number of rows.
            query: Id of the query.

        Returns:
            Ids and scores `[k]`, the largest first.

        Raises:
            AttributionError: The query was not scored.
        """
        return self._ranked(k, query, sign=-1)

    @checked(AttributionError)
    def bottom(self, k: int, *, query: int) -> RankedRows:
        """Return the `k` training rows that harmed a query most.

        Args:
            k: Number of rows.
            query: Id of the query.

        Returns:
            Ids and scores `[k]`, the smallest first.

        Raises:
            AttributionError: The query was not scored.
        """
        return self._ranked(k, query, sign=1)

    @checked(AttributionError)
    def of(self, query: int) -> Floats:
        """Return the scores of one query.

        Args:
            query: Id of the query.

        Returns:
            Scores `[N]`.

        Raises:
            AttributionError: The query was not scored.
        """
        row: Floats = self.values[find_position(self.query_ids, query, "query")]
        return row

    @checked(AttributionError)
    def rank(self, *, query: int) -> Ids:
        """Return the rank of every training row for one query.

        Args:
            query: Id of the query.

        Returns:
            Ranks `[N]`; 1 helped most.
        """
        places = np.empty(len(self.train_ids), np.int64)
        order = np.argsort(-self.of(query), kind="stable")
        places[order] = np.arange(1, len(order) + 1)
        return places

    @checked(AttributionError)
    def by_document(self, train: Any = None, *, queries: Any = None) -> Scores:
        """Sum the scores of chunks to scores of documents `[queries, documents]`.

        Args:
            train: Document of each training row `[N]`. Integers are the new ids; texts are the new labels, and
                the ids count them. Rows with the same value are one document; documents are in order of first
                occurrence.
            queries: Document of each query `[Q]`.

        Returns:
            The summed scores.

        Raises:
            AttributionError: The number of documents differs from the number of rows.

        Example:
            >>> scores = Scores(np.array([[1.0, -2.0, 3.0]], np.float32), np.array([7]), np.arange(3))
            >>> summed = scores.by_document([5, 4, 5])
            >>> summed.train_ids.tolist(), summed.numpy().tolist()
            ([5, 4], [[4.0, -2.0]])
        """
        if train is None and queries is None:
            raise AttributionError(
                "by_document needs documents",
                code="attribute.no_documents",
                fix="Call scores.by_document(documents) with one document for each row.",
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
        """Save the scores in a store; saving the same scores again does nothing.

        Args:
            name: Name of the scores.
            store: The store; by default the one they were computed from.

        Raises:
            AttributionError: There is no store, or the name is invalid.
            SchemaMismatchError: Other scores have that name.
        """
        where = store or self.store
        if where is None:
            raise AttributionError(
                "there is no store to save to",
                code="attribute.no_store",
                fix="Pass store=gk.open(...).",
            )
        save_scores(where, name, self)

    @classmethod
    @checked(AttributionError)
    def load(cls, store: Store, name: str, *, ids: Any = None) -> Scores:
        """Load saved scores; those that do not fit in memory are mapped from disk.

        Args:
            store: The store.
            name: Name of the scores.
            ids: Ids of queries to load; all by default.

        Returns:
            The scores.

        Raises:
            AttributionError: There are no such scores, or a capture that they were computed from holds other
                rows now.
        """
        return load_scores(store, name, cls, ids)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row per query id and a column per training id."""
        pandas = import_extra("pandas", extra="sql", what="a data frame")
        rows = pandas.Index(self.query_ids, name="query")
        columns = pandas.Index(self.train_ids, name="train")
        return pandas.DataFrame(self.values, index=rows, columns=columns)

    @checked(AttributionError)
    def to_arrow(self, *, k: PositiveInt | None = None) -> Any:
        """Return a `pyarrow.Table` of query, train and score.

        Args:
            k: Only the `k` most helpful rows of each query; all by default.

        Returns:
            The table.
        """
        pyarrow = import_extra("pyarrow", extra="sql", what="an Arrow table")
        count = len(self.train_ids) if k is None else min(k, len(self.train_ids))
        parts = []
        for query, row in zip(self.query_ids, self.values, strict=True):
            order = np.argsort(-row, kind="stable")[:count]
            columns = [np.full(count, query), self.train_ids[order], np.asarray(row[order])]
            parts.append(pyarrow.record_batch(columns, names=["query", "train", "score"]))
        return pyarrow.Table.from_batches(parts)

    @checked(AttributionError)
    def plot(self, *, query: int, k: PositiveInt = 10) -> Any:
        """Plot the rows that helped and harmed a query most.

        Args:
            query: Id of the query.
            k: Number of rows of each kind.

        Returns:
            A `matplotlib` figure.
        """
        matplotlib = import_extra("matplotlib.figure", extra="remat", what="a plot")
        row = self.of(query)
        order = np.argsort(-row, kind="stable")
        order = np.concatenate([order[:k], order[max(k, len(order) - k) :]])
        values = row[order]
        figure = matplotlib.Figure(figsize=(6.4, 0.25 * len(order) + 1), layout="constrained")
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

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        """Index the values `[Q, N]` by position, like an array."""
        return self.values[index]

    def __iter__(self) -> Iterator[Floats]:
        """Iterate over the scores `[N]` of each query."""
        return iter(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Convert to a numpy array `[Q, N]`."""
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def _repr_html_(self) -> str:
        from gradkeep.attribution._show import show  # imports this module

        return show(self).html

    def _ranked(self, k: int, query: int, *, sign: int) -> RankedRows:
        _arguments.count("k", k, error=AttributionError)
        row = self.of(query)
        order = np.argsort(sign * row, kind="stable")[:k]
        return RankedRows(self.train_ids[order], row[order])


@checked(AttributionError)
def combine(scores: Sequence[Scores], *, how: Literal["mean", "borda"] = "mean") -> Scores:
    """Combine several scores of the same queries and rows; costs C x Q x N (log N for ranks).

    Args:
        scores: The scores.
        how: `mean`: each query's scores are standardized, so that every method has the same weight, then
            averaged. `borda`: each query's rows are ranked, and their mean rank is scaled to -1 to 1.

    Returns:
        Combined scores `[Q, N]`.

    Raises:
        AttributionError: The scores are of different queries or rows.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> one = Scores(np.array([[1.0, 2.0, 9.0]], np.float32), np.array([0]), np.arange(3))
        >>> combine([one, one], how="borda").values.tolist()
        [[-1.0, 0.0, 1.0]]
    """
    if len(scores) == 0:
        raise AttributionError(
            "there are no scores to combine", code="attribute.nothing_to_combine"
        )
    first = scores[0]
    for other in scores[1:]:
        for part in ("query_ids", "train_ids"):
            if not np.array_equal(getattr(first, part), getattr(other, part)):
                raise AttributionError(
                    f"scores of different {part.replace('_', ' ')} cannot be combined",
                    code="attribute.different_ids",
                    found=f"{len(getattr(first, part))} and {len(getattr(other, part))}",
                    fix="Use the same queries and training rows for all methods.",
                )
    values = zeros_on_disk_or_in_memory(first.shape)
    turn = _standardize if how == "mean" else _rank_scaled
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


def _standardize(row: Floats) -> Any:
    spread = float(row.std(dtype=np.float64))
    return (row - row.mean(dtype=np.float64)) / (spread or 1.0)


def _rank_scaled(row: Floats) -> Any:
    return 2 * ranks(row[:, None])[:, 0] / max(1, len(row) - 1) - 1
