"""What a model's gradients are kept in: rows of a store, or files of their own."""

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
    from collections.abc import Mapping

    from torch import Tensor

    from gradkeep.store import Rows, Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]
    from collections.abc import Iterator
    from pathlib import Path


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
