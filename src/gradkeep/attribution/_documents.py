"""Documents of several chunks: their rows' scores added up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradkeep import _arguments
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores

    S = TypeVar("S", bound=Scores)

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


def summed_by_document(scores: Scores, train: Any, queries: Any, kind: type[S]) -> S:
    """The scores with the rows, the queries or both added up."""
    if train is None and queries is None:
        raise AttributionError(
            "no documents were given", fix="scores.by_document(documents) with one for each row"
        )
    count, rows = scores.shape
    columns = None if train is None else documents_of("documents", train, rows)
    lines = None if queries is None else documents_of("query_documents", queries, count)
    given = {part.name: getattr(scores, part.name) for part in dataclasses.fields(scores)}
    given["values"] = _summed(scores.values, lines, columns)
    if scores.per_layer is not None:
        given["per_layer"] = np.stack([_summed(one, lines, columns) for one in scores.per_layer])
    if columns is not None:
        given |= {"train_ids": columns.ids, "train_labels": columns.names}
    if lines is not None:
        given |= {"query_ids": lines.ids, "query_labels": lines.names, "confidence": None}
    given["scale"] = f"{scores.scale}, summed over the rows of a document".removeprefix(", ")
    return kind(**given)


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
