"""Rows of gradients in a store: those that were put, and those that a script assigned."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.lib.format import open_memmap

from gradkeep.errors import MissingRows
from gradkeep.store import Array, Schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from gradkeep.store import Rows, Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]


class KeptGradients:
    """Up to `count` projected gradients `[k]`, with a weight each, put in any order and parts."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        count: int,
        dim: int,
        half: bool,
        fingerprints: Mapping[str, str],
    ) -> None:
        self.name, self.count, self.dim = name, count, dim
        self._store = store
        self.mark = fingerprints.get("weights")
        """The fingerprint of the weights that the gradients are of."""
        self._schema = Schema(
            (
                Array("rows", "int64", kind="data", ragged=True),
                Array(
                    "grads",
                    shape=(dim,),
                    kind="projection",
                    ragged=True,
                    encoding="float16-scaled" if half else "plain",
                ),
                Array("weight", kind="data", ragged=True),
            ),
            rows_per_segment=1,
            fingerprints={**fingerprints, "count": str(count)},
        )
        self._rows: Rows = store.rows(name, self._schema, num_rows=count)
        self._where: dict[int, Ids] = {}
        """The ids in each file that was seen."""
        self._file = np.full(count, -1, np.int64)
        """Which file holds each row; -1: none that was seen."""
        self.refresh()

    @property
    def done(self) -> Mask:
        """Which rows are there `[count]`, as far as was seen."""
        return np.asarray(self._file >= 0, np.bool_)

    @property
    def version(self) -> int:
        """How many files were seen."""
        return len(self._where)

    @property
    def complete(self) -> bool:
        """Whether all rows are there."""
        return bool((self._file >= 0).all())

    def refresh(self) -> None:
        """See what other processes have put meanwhile."""
        new = [row for row in self._rows.done().tolist() if row not in self._where]
        if not new:
            return
        ids = self._rows.read(new, ["rows"])["rows"]
        for place, row in enumerate(new):
            self._saw(row, ids[place])

    def put(self, ids: Ids, grads: Tensor, weights: Tensor | None) -> None:
        """Keep these rows, except those that are there; returns when they are durable."""
        values = grads.detach().cpu().float().numpy()
        beside = np.zeros(len(ids), np.float32)
        if weights is not None:
            beside = weights.detach().cpu().float().numpy().reshape(len(ids))
        self.refresh()
        left = self._file[ids] < 0
        while left.any():
            some = ids[left]
            first = int(some.min())
            arrays = {"rows": some, "grads": values[left], "weight": beside[left]}
            if self._rows.put(first, arrays, differing="keep"):
                self._saw(first, some)
            else:
                self.refresh()  # another process was first with some of them
            left = self._file[ids] < 0

    def read(self, ids: Ids) -> Tensor:
        """The gradients `[len(ids), k]`, float32."""
        out = np.empty((len(ids), self.dim), np.float32)
        for rows, places, grads in self._found(ids, "grads"):
            out[places] = grads[rows]
        return torch.from_numpy(out)

    def weights(self, ids: Ids | None = None) -> Tensor:
        """The weights `[len(ids)]` of these rows, or of all, float32."""
        wanted = np.arange(self.count) if ids is None else ids
        out = np.empty(len(wanted), np.float32)
        for rows, places, values in self._found(wanted, "weight"):
            out[places] = values[rows]
        return torch.from_numpy(out)

    def _found(self, ids: Ids, name: str) -> Any:
        """(rows in the file, places in the answer, the file's values) of every file needed."""
        files = self._file[ids]
        if (files < 0).any():
            raise MissingRows(
                "rows that were not put",
                path=self._rows.path,
                found=f"no row {', '.join(map(str, ids[files < 0][:5]))}",
            )
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            own = self._where[file]
            order = np.argsort(own, kind="stable")
            rows = order[np.searchsorted(own, ids[places], sorter=order)]
            yield rows, places, self._rows.read([file], [name])[name].values

    def drop(self) -> None:
        """Delete the gradients, not their description."""
        keys = _files_below(self._store, self._rows.folder, inner=True)
        self._store.backend.delete(keys, durability=self._store.durability)
        # Opened again: how many rows there may be was among the files.
        self._rows = self._store.rows(self.name, self._schema, num_rows=self.count)
        self._where = {}
        self._file[:] = -1

    def _saw(self, row: int, ids: Ids) -> None:
        self._where[row] = own = np.asarray(ids, np.int64)
        before = self._file[own]
        # Rows that two processes computed in the same moment: every reader takes the same ones.
        self._file[own[(before < 0) | (before > row)]] = row


def delete_rows(store: Store, name: str) -> None:
    """Delete a set of rows: what they hold first, their description last."""
    top = store.rows(name).folder
    for inner in (True, False):
        store.backend.delete(_files_below(store, top, inner=inner), durability=store.durability)


def _files_below(store: Store, top: str, *, inner: bool) -> list[str]:
    """The keys in the folders below a folder, or those in itself."""
    keys, folders = [], [top]
    while folders:
        folder = folders.pop()
        for entry in store.backend.list(folder):
            key = f"{folder}/{entry.name}"
            if entry.is_folder:
                folders.append(key)
            elif (folder != top) == inner:
                keys.append(key)
    return keys


@contextlib.contextmanager
def replaced_file(path: Path, shape: tuple[int, int]) -> Iterator[Any]:
    """A map `[n, m]` of zeros to fill; the file has its name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        values = open_memmap(temp, "w+", np.float32, shape)
        yield values
        values.flush()
        del values
        _sync(temp)
        os.replace(temp, path)
        _sync(path.parent)
    finally:
        temp.unlink(missing_ok=True)


def mapped_file(path: Path) -> Any:
    """The matrix, mapped; changes to it stay in this process."""
    return np.load(path, mmap_mode="c", allow_pickle=False)


def file_digest(path: Path) -> str:
    """The xxh3-128 of a file."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found.update(part)
    return found.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
            # Assignments that there is room for at first.
            self._rows = self._store.rows(self._name, schema, num_rows=1000)
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
