"""What a script assigns to the rows of an array: the latest of each row, kept in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak._kept_rows import delete_rows
from gradkeep.store import Array, Schema

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gradkeep.compat.trak._kept_rows import KeptGradients
    from gradkeep.store import Rows, Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]

_ROOM = 1000
"""Assignments that there is room for at first."""


class AssignedRows:
    """Assignments to rows of an array `[count, dim]`; of each row the last one counts.

    Each is one file with a checksum, there as a whole or not at all, durable when `assign`
    returns. Nothing is made in the store before the first.
    """

    def __init__(self, store: Store, name: str, *, count: int, dim: int) -> None:
        self.count, self.dim = count, dim
        self._store, self._name = store, name
        self._rows: Rows | None = None
        self._seen: set[int] = set()
        self._number = np.full(count, -1, np.int64)
        """Which assignment each row has its values of; -1: none."""
        self._where: dict[int, Ids] = {}
        self._single = np.full((count, 1), np.nan, np.float32) if dim == 1 else None
        """The values themselves if they are one a row: flags are asked for at every batch."""

    @property
    def there(self) -> Mask:
        """Which rows were assigned to `[count]`, as far as was seen."""
        return np.asarray(self._number >= 0, np.bool_)

    @property
    def version(self) -> int:
        """How many assignments were seen."""
        return len(self._seen)

    def look(self, names: Collection[str]) -> None:
        """See what was assigned, or cleared, by other processes; `names` are the store's sets."""
        there = self._name in names
        if there and self._rows is None:
            self._rows = self._store.rows(self._name)
        elif not there:
            self._forget()
        self.refresh()

    def refresh(self) -> None:
        """See what was assigned since, if anything ever was."""
        if self._rows is None:
            return
        new = [number for number in self._rows.done().tolist() if number not in self._seen]
        if new:
            names = ["rows"] if self._single is None else ["rows", "values"]
            found = self._rows.read(new, names)
            for place, number in enumerate(new):
                self._saw(number, *(found[name][place] for name in names))

    def assign(self, ids: Ids, values: Any) -> None:
        """Keep values `[len(ids), dim]`; returns when they are durable."""
        rows = self._begun()
        arrays = {"rows": ids, "values": np.asarray(values, np.float32).reshape(len(ids), self.dim)}
        while True:
            self.refresh()
            number = max(self._seen, default=-1) + 1
            if number >= rows.num_rows:
                rows.grow(2 * rows.num_rows)
            if rows.put(number, arrays, differing="keep"):
                self._saw(number, ids, arrays["values"])
                return

    def read(self, ids: Ids) -> Tensor:
        """The values `[len(ids), dim]` of rows that were assigned to."""
        if self._single is not None:
            return torch.from_numpy(self._single[ids])
        out = np.empty((len(ids), self.dim), np.float32)
        numbers = self._number[ids]
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            own = self._where[number]
            order = np.argsort(own, kind="stable")
            at = order[np.searchsorted(own, ids[places], sorter=order)]
            assert self._rows is not None
            out[places] = self._rows.read([number], ["values"])["values"].values[at]
        return torch.from_numpy(out)

    def clear(self) -> None:
        """Forget all assignments, here and in the store."""
        if self._rows is not None:
            delete_rows(self._store, self._name)
            self._forget()

    def _forget(self) -> None:
        self._rows = None
        self._seen, self._where = set(), {}
        self._number[:] = -1

    def _begun(self) -> Rows:
        if self._rows is None:
            # A row may be assigned to in parts: what it lacks is NaN until then.
            values = Array("values", shape=(self.dim,), kind="data", ragged=True, nan="keep")
            rows = Array("rows", "int64", kind="data", ragged=True)
            schema = Schema((rows, values), rows_per_segment=1)
            self._rows = self._store.rows(self._name, schema, num_rows=_ROOM)
        return self._rows

    def _saw(self, number: int, ids: Ids, values: Any = None) -> None:
        self._seen.add(number)
        self._where[number] = own = np.asarray(ids, np.int64)
        later = self._number[own] < number
        self._number[own[later]] = number
        if self._single is not None:
            self._single[own[later]] = values[later]


class OverlaidRows:
    """Rows that were put, or their weights, and over them what was assigned."""

    def __init__(self, kept: KeptGradients, assigned: AssignedRows, *, weights: bool) -> None:
        self.kept, self.assigned, self._weights = kept, assigned, weights
        self.count, self.dim = kept.count, assigned.dim

    @property
    def there(self) -> Mask:
        """Which rows have values, if only some of them `[count]`."""
        return self.kept.done | self.assigned.there

    @property
    def version(self) -> tuple[int, int]:
        """What changes with every row that is put or assigned to."""
        return self.kept.version, self.assigned.version

    def missing(self, ids: Ids | None = None) -> Ids:
        """Those of these rows, or of all, that have no values, or not all of them."""
        wanted = np.arange(self.count) if ids is None else ids
        lacking = ~self.there[wanted]
        over = self.assigned.there[wanted]
        lacking[over] = ~self.assigned.read(wanted[over]).isfinite().all(1).numpy()
        return wanted[lacking]

    def read(self, ids: Ids) -> Tensor:
        """The values `[len(ids), dim]`, float32."""
        over = self.assigned.there[ids]
        out = torch.empty(len(ids), self.dim)
        if not over.all():
            below = ids[~over]
            out[torch.from_numpy(~over)] = (
                self.kept.weights(below).unsqueeze(1) if self._weights else self.kept.read(below)
            )
        if over.any():
            out[torch.from_numpy(over)] = self.assigned.read(ids[over])
        return out
