"""The buffers of a segment while rows come in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradkeep.store._batch import Ragged
from gradkeep.store._encoding import Encoded, encode
from gradkeep.store._layout import Packed, StoredArray, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store._encoding import AnyArray
    from gradkeep.store._schema import Array, Schema


class Filling:
    """The buffers of one segment while rows come in; used again for the one after next."""

    def __init__(self, schema: Schema, rows: int) -> None:
        self._schema = schema
        self._ids = np.empty(rows, np.int64)
        self._slots = {array.name: _Slot(array, rows) for array in schema.arrays}
        self.first_row = 0
        self.count = 0

    def begin(self, first_row: int) -> None:
        self.first_row, self.count = first_row, 0
        for slot in self._slots.values():
            slot.begin()

    def add(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged], chunk: slice) -> None:
        # Encode everything before any buffer changes: a row that cannot be encoded leaves no trace.
        ready = [
            (slot, *encoded_rows(slot.array, arrays[name], chunk))
            for name, slot in self._slots.items()
        ]
        self._ids[self.count : self.count + len(ids)] = ids
        for slot, encoded, lengths in ready:
            slot.add(self.count, encoded, lengths)
        self.count += len(ids)

    def pack(self) -> Packed:
        stored = {name: slot.stored(self.count) for name, slot in self._slots.items()}
        return pack(self._schema, self._ids[: self.count], stored, first_row=self.first_row)


def encoded_rows(
    array: Array, values: AnyArray | Ragged, chunk: slice
) -> tuple[Encoded, AnyArray | None]:
    if isinstance(values, Ragged):
        bounds = values.offsets[chunk.start : chunk.stop + 1]
        return encode(array, values.values[bounds[0] : bounds[-1]]), np.diff(bounds)
    return encode(array, values[chunk]), None


class _Slot:
    """The encoded rows of one array of one segment."""

    def __init__(self, array: Array, rows: int) -> None:
        self.array = array
        fixed = 0 if array.ragged else rows
        self._values = np.empty((fixed, *array.stored_shape), array.stored_dtype)
        self._scale = np.empty(fixed, np.float32) if array.scaled else None
        self.begin()

    def begin(self) -> None:
        self._pieces: list[Encoded] = []
        self._lengths: list[AnyArray] = []
        self._nonzero = self._flushed = 0

    def add(self, at: int, encoded: Encoded, lengths: AnyArray | None) -> None:
        self._nonzero += encoded.nonzero
        self._flushed += encoded.flushed
        if lengths is not None:
            # The caller may reuse its memory as soon as append returns.
            own = encoded.values.copy() if self.array.encoding == "plain" else encoded.values
            self._pieces.append(Encoded(own, encoded.scale))
            self._lengths.append(lengths)
            return
        self._values[at : at + len(encoded.values)] = encoded.values
        if self._scale is not None and encoded.scale is not None:
            self._scale[at : at + len(encoded.values)] = encoded.scale

    def stored(self, count: int) -> StoredArray:
        if not self.array.ragged:
            scale = None if self._scale is None else self._scale[:count]
            counts = (self._nonzero, self._flushed)
            return StoredArray(Encoded(self._values[:count], scale, *counts))
        values = np.concatenate([self._values, *(piece.values for piece in self._pieces)])
        scale = None
        if self._scale is not None:
            scales = [piece.scale for piece in self._pieces if piece.scale is not None]
            scale = np.concatenate([self._scale, *scales])
        offsets = bounds_of(np.concatenate([np.empty(0, np.int64), *self._lengths]))
        return StoredArray(Encoded(values, scale, self._nonzero, self._flushed), offsets)


def bounds_of(lengths: AnyArray) -> AnyArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
