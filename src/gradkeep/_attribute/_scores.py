"""Scores: how much each training row helped each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._errors import AttributionError

if TYPE_CHECKING:
    from gradkeep.query import Plan

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
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

    A positive score says that training on that row lowered the query's loss.
    """

    values: Floats
    """`[Q, N]`"""
    query_ids: Ids
    """`[Q]`"""
    train_ids: Ids
    """`[N]`"""
    method: str
    queries: str
    """The split that the queries are from."""
    train: str
    checkpoints: tuple[str, ...]
    layers: tuple[str, ...]
    scale: str
    """The formula, in words."""
    exact: bool
    plan: Plan | None = None
    """How it was computed."""

    def numpy(self) -> Floats:
        """The scores `[queries, train]`."""
        return self.values

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, training rows)"""
        return self.values.shape[0], self.values.shape[1]

    def top(self, k: int, *, query: int) -> Ranked:
        """The `k` training rows that helped a query (by its id) most."""
        return self._ranked(k, query, sign=-1)

    def bottom(self, k: int, *, query: int) -> Ranked:
        """The `k` training rows that harmed a query (by its id) most."""
        return self._ranked(k, query, sign=1)

    def of(self, query: int) -> Floats:
        """The scores `[N]` of one query, by its id."""
        found = np.flatnonzero(self.query_ids == query)
        if not len(found):
            raise AttributionError(
                f"no query with id {query}",
                found=f"ids {self.query_ids[:3].tolist()} ... {self.query_ids[-1:].tolist()}",
            )
        row: Floats = self.values[found[0]]
        return row

    def _ranked(self, k: int, query: int, *, sign: int) -> Ranked:
        row = self.of(query)
        order = np.argsort(sign * row, kind="stable")[: max(0, k)]
        return Ranked(self.train_ids[order], row[order])

    def __repr__(self) -> str:
        at = ", ".join(self.checkpoints)
        return (
            f"Scores({self.method}: {self.shape[0]} of {self.queries} x {self.shape[1]} of "
            f"{self.train} at {at}; {self.scale}; "
            f"{'exact' if self.exact else 'approximate'}, positive helps)"
        )
