"""Rows of gradients in a store, written in parts by any number of processes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.errors import AttributionError, MissingRowsError
from gradkeep.store import Array, Schema
from gradkeep.store.catalog._scan import keys_below

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gradkeep.store import Encoding, Rows, Store

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Ids = np.ndarray[Any, np.dtype[np.int64]]


class RowLog:
    """Gradients `[count, dim]` with a weight and a flag each: a log of entries for some rows.

    The last entry of each row counts, separately for gradients, weights and flags. An entry is one
    file with a checksum, written atomically, and durable when `put` or `assign` returns.
    Gradients that are put may be in half precision; assigned ones are exact, and a row
    may be assigned in parts: missing values are NaN. With `lazy`, nothing is created in the store before
    the first entry.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        count: int,
        dim: int,
        half: bool = False,
        fingerprints: Mapping[str, str] | None = None,
        lazy: bool = False,
    ) -> None:
        self.name, self.count, self.dim = name, count, dim
        self._store, self._lazy = store, lazy
        marks = dict(fingerprints or {})
        self.mark = marks.get("weights")
        """Fingerprint of the weights of the gradients."""
        encoding: Encoding = "float16-scaled" if half else "plain"
        self._schema = Schema(
            (
                Array("rows", "int64", kind="data", ragged=True),
                Array("grads", shape=(dim,), kind="projection", ragged=True, encoding=encoding),
                Array("exact", shape=(dim,), kind="data", ragged=True, nan="keep"),
                Array("weight", kind="data", ragged=True, nan="keep"),
                Array("flag", kind="data", ragged=True),
            ),
            rows_per_segment=1,
            fingerprints={**marks, "count": str(count)},
        )
        self._rows: Rows | None = None
        if not lazy:
            self._open()
        self._reset()
        self.refresh()

    def _open(self) -> Rows:
        if self._rows is None and self._is_earlier_layout():
            rows, grads, _, _, _ = self._schema.arrays
            arrays = (rows, grads, Array("weight", kind="data", ragged=True))
            schema = dataclasses.replace(self._schema, arrays=arrays)
            self._rows = self._store.rows(self.name, schema, num_rows=self.count)
        elif self._rows is None:
            # Initial number of entries.
            self._rows = self._store.rows(self.name, self._schema, num_rows=1000)
        return self._rows

    def _is_earlier_layout(self) -> bool:
        """Return True for a set written before entries had flags, in which all rows are done."""
        if self.name not in self._store.row_sets():
            return False
        names = {array.name for array in self._store.rows(self.name).schema.arrays}
        return names == {"rows", "grads", "weight"}

    def _reset(self) -> None:
        self._ids: dict[int, Ids] = {}
        """Rows of each entry read so far."""
        self._entry = np.full(self.count, -1, np.int64)
        """Entry with the gradient of each row; -1 for none."""
        self._exact = np.zeros(self.count, np.bool_)
        """True for gradients that were assigned."""
        self.weight = np.full(self.count, np.nan, np.float32)
        self._flag = np.full(self.count, np.nan, np.float32)
        self.versions = {"grads": 0, "weight": 0, "flag": 0}
        """Number of entries read so far, per column."""

    @property
    def written(self) -> Mask:
        """Rows with gradients, possibly partial, `[count]`, as of the last refresh."""
        return np.asarray(self._entry >= 0, np.bool_)

    @property
    def done(self) -> Mask:
        """Rows flagged as done `[count]`, as of the last refresh."""
        return np.asarray(self._flag == 1, np.bool_)

    def refresh(self) -> None:
        """Read entries that other processes have written or cleared."""
        if self._lazy:
            if self.name not in self._store.row_sets():
                self._rows = None
                self._reset()
                return
            self._open()
        rows = self._open()
        new = [number for number in rows.done().tolist() if number not in self._ids]
        if new:
            names = [array.name for array in rows.schema.arrays]
            entries = rows.read(new, [one for one in ("rows", "weight", "flag") if one in names])
            flags = (
                entries["flag"] if "flag" in names else [np.ones(len(w)) for w in entries["weight"]]
            )
            columns = zip(new, entries["rows"], entries["weight"], flags, strict=True)
            for number, ids, weight, flag in columns:
                self._record_entry(number, ids, weight, flag)

    def put(self, ids: Ids, grads: Tensor, weights: Tensor | None) -> None:
        """Write rows and flag them as done, except those already done."""
        values = grads.detach().cpu().float().numpy()
        weight = np.zeros(len(ids), np.float32)
        if weights is not None:
            weight = weights.detach().cpu().float().numpy().reshape(len(ids))
        while True:
            self.refresh()
            pending = self._flag[ids] != 1
            if not pending.any():
                return
            flag = np.ones(int(pending.sum()), np.float32)
            if self._append(ids[pending], grads=values[pending], weight=weight[pending], flag=flag):
                return

    def assign(self, ids: Ids, values: Any, *, column: str = "exact") -> None:
        """Write exact gradients `[len(ids), dim]`, or the weights or flags `[len(ids)]`."""
        shape = (len(ids), self.dim) if column == "exact" else (len(ids),)
        cells = np.asarray(values, np.float32).reshape(shape)
        while True:
            self.refresh()
            if self._append(ids, **{column: cells}):
                return

    def flag(self, ids: Ids, values: Any) -> None:
        """Flag rows as done (1) or not (0); rows without gradient or weight cannot be done."""
        flags = np.asarray(values).reshape(-1)
        if not np.isin(flags, (0, 1)).all():
            raise AttributionError(
                "is_featurized must be 0 or 1",
                code="compat.invalid_flag",
                found=flags[:5].tolist(),
            )
        done = ids[flags == 1]
        missing = {"grads": self.missing(done), "out_to_loss": done[np.isnan(self.weight[done])]}
        for name, rows in missing.items():
            if len(rows):
                raise AttributionError(
                    f"{len(rows)} rows cannot be flagged as featurized, because their {name!r} are "
                    "missing or not finite",
                    code="compat.rows_incomplete",
                    found=f"rows {first_rows(rows)}",
                    fix=f"Assign current_store[{name!r}][rows] first.",
                )
        self.assign(ids, flags, column="flag")

    def _append(self, ids: Ids, **columns: Any) -> bool:
        """Write an entry; False if another process took its number."""
        rows = self._open()
        number = max(self._ids, default=-1) + 1
        if number >= rows.num_rows:
            rows.grow(2 * rows.num_rows)
        none = np.zeros(0, np.float32)
        empty = none.reshape(0, self.dim)
        arrays = {"rows": ids, "grads": empty, "exact": empty, "weight": none, "flag": none}
        names = [array.name for array in rows.schema.arrays]
        if len(names) == 3 and "grads" not in columns:
            raise AttributionError(
                f"{self.name!r} was written by an earlier version, so its rows cannot be assigned",
                code="compat.earlier_layout",
                fix="Featurize into another save_dir.",
            )
        entry = {name: value for name, value in {**arrays, **columns}.items() if name in names}
        if not rows.put(number, entry, differing="keep"):
            return False
        exact = "exact" in columns
        self._record_entry(
            number, ids, columns.get("weight", ()), columns.get("flag", ()), exact=exact
        )
        return True

    def _record_entry(
        self, number: int, ids: Any, weight: Any, flag: Any, *, exact: bool | None = None
    ) -> None:
        # An entry has gradients that were put with a weight, or one column that was assigned.
        own = np.asarray(ids, np.int64)
        if exact is None:
            exact = not len(weight) and not len(flag)
        self._ids[number] = own
        if exact or (len(weight) and len(flag)):
            later = own[self._entry[own] < number]
            self._entry[later] = number
            self._exact[later] = exact
            self.versions["grads"] += 1
        for name, column, values in (("weight", self.weight, weight), ("flag", self._flag, flag)):
            if len(values):
                column[own] = values
                self.versions[name] += 1

    def missing(self, ids: Ids | None = None) -> Ids:
        """Return the rows, of these or of all, without a complete gradient."""
        rows = np.arange(self.count) if ids is None else ids
        lacking = ~self.written[rows]
        exact = self._exact[rows] & ~lacking
        lacking[exact] = ~self.read(rows[exact]).isfinite().all(1).numpy()
        return rows[lacking]

    def read(self, ids: Ids) -> Tensor:
        """Read the gradients `[len(ids), dim]`, float32."""
        numbers = self._entry[ids]
        if (numbers < 0).any():
            raise MissingRowsError(
                f"rows of {self.name!r} were not written",
                found=first_rows(ids[numbers < 0]),
            )
        out = np.empty((len(ids), self.dim), np.float32)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            own = self._ids[number]
            order = np.argsort(own, kind="stable")
            at = order[np.searchsorted(own, ids[places], sorter=order)]
            name = "exact" if self._exact[ids[places[0]]] else "grads"
            out[places] = self._open().read([number], [name])[name].values[at]
        return torch.from_numpy(out)

    def clear(self) -> None:
        """Delete all entries; unless lazy, the description stays."""
        if self._rows is None:
            return
        if self._lazy:
            self._store.delete_rows(self.name)
        else:
            folder, backend = self._rows.folder, self._store.backend
            entries = [f"{folder}/{one.name}" for one in backend.list(folder) if one.is_folder]
            keys = [key for entry in entries for key in keys_below(backend, entry)]
            backend.delete(keys, durability=self._store.durability)
        # Reopen it: its capacity was among the deleted files.
        self._rows = None
        self._reset()


def first_rows(rows: Any) -> str:
    """Format the first few row numbers for messages."""
    return ", ".join(map(str, rows[:5])) + (" ..." if len(rows) > 5 else "")
