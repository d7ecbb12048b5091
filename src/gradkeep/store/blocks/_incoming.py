"""Validate incoming rows against the schema, and collect them in the buffers of a segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import InvalidRowsError
from gradkeep.store.blocks._columns import Ragged
from gradkeep.store.blocks._encoding import Encoded, encode
from gradkeep.store.blocks._packing import PackedSegment, StoredArray, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store.blocks._encoding import AnyArray
    from gradkeep.store.blocks._schema import Array, Schema


def validate_rows(
    schema: Schema, ids: AnyArray, arrays: Mapping[str, Any], *, path: str
) -> dict[str, AnyArray | Ragged]:
    """Return every array of the schema `[B, *shape]` (or `Ragged`) with valid dtype, shape and values."""
    names = {array.name for array in schema.arrays}
    missing, unknown = sorted(names - set(arrays)), sorted(set(arrays) - names)
    if missing or unknown:
        raise InvalidRowsError(
            "a batch must hold exactly the arrays of the schema",
            code="store.wrong_arrays",
            path=path,
            found=f"missing {missing}, unknown {unknown}",
            expected=", ".join(array.name for array in schema.arrays),
        )
    return {
        array.name: _validate_array(array, arrays[array.name], ids, path=path)
        for array in schema.arrays
    }


def _validate_array(array: Array, rows: Any, ids: AnyArray, *, path: str) -> AnyArray | Ragged:
    if array.ragged:
        return _validate_ragged(array, rows, ids, path=path)
    values = _as_array(array, rows, path=path)
    expected = (len(ids), *array.shape)
    if values.shape != expected:
        raise _mismatch(array, f"shape {values.shape}", f"shape {expected}", path=path)
    _check_finite(array, values, ids, path=path)
    return values


def _validate_ragged(array: Array, ragged: Any, ids: AnyArray, *, path: str) -> Ragged:
    if not isinstance(ragged, Ragged):
        rows = [_as_array(array, row, path=path) for row in ragged]
        empty = np.empty((0, *array.shape), array.dtype)
        wrong = [row.shape for row in rows if row.shape[1:] != array.shape or row.ndim == 0]
        if wrong:
            raise _mismatch(array, f"a row of shape {wrong[0]}", f"[T, {array.shape}]", path=path)
        ragged = Ragged.of([empty, *rows])
        ragged = Ragged(ragged.values, ragged.offsets[1:])
    values = _as_array(array, ragged.values, path=path)
    offsets = np.asarray(ragged.offsets, np.int64)
    expected = f"{len(ids)} rows of shape [T, {', '.join(map(str, array.shape))}]"
    if values.shape[1:] != array.shape or offsets.shape != (len(ids) + 1,):
        raise _mismatch(
            array, f"{len(offsets) - 1} rows of {values.shape[1:]}", expected, path=path
        )
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise _mismatch(
            array, f"offsets {offsets[:5]} ...", f"0 to {len(values)}, rising", path=path
        )
    _check_finite(array, values, ids, path=path, offsets=offsets)
    return Ragged(values, offsets)


def _as_array(array: Array, values: Any, *, path: str) -> AnyArray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16; float32 holds it exactly.
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    if not isinstance(values, np.ndarray | np.generic):
        return _from_list(array, values, path=path)
    if not np.can_cast(values.dtype, array.dtype, "safe"):
        raise _mismatch(array, f"dtype {values.dtype}", f"dtype {array.dtype}", path=path)
    return np.asarray(values).astype(array.dtype, copy=False)


def _from_list(array: Array, numbers: Any, *, path: str) -> AnyArray:
    """Convert a list of numbers to the array's dtype; raise if a value would be truncated or wrap."""
    try:
        natural = np.asarray(numbers)
    except ValueError:
        raise _mismatch(
            array, "rows of different shapes", f"shape {array.shape}", path=path
        ) from None
    dtype = np.dtype(array.dtype)
    # A float array accepts every number, an integer one only integers, a bool one only bools; an
    # empty list has no kind.
    takes = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}[dtype.kind]
    if dtype == np.uint64 and natural.dtype.kind == "f" and _all_whole(numbers):
        natural = np.asarray(
            numbers, np.uint64
        )  # numpy converts a mix of small and large integers to float
    if natural.size and natural.dtype.kind not in takes:
        kind = "numbers that do not fit any dtype" if natural.dtype.kind == "O" else natural.dtype
        raise _mismatch(array, f"a list of {kind}", f"dtype {array.dtype}", path=path)
    if natural.size and dtype.kind in "iu" and natural.dtype.kind in "iu":
        low, high = int(natural.min()), int(natural.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            actual = f"numbers from {low} to {high}"
            expected = f"{array.dtype}: {limits.min} to {limits.max}"
            raise _mismatch(array, actual, expected, path=path)
    return natural.astype(dtype)


def _all_whole(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(x) is int and x >= 0 for x in values)


def _check_finite(
    array: Array,
    values: AnyArray,
    ids: AnyArray,
    *,
    path: str,
    offsets: AnyArray | None = None,
) -> None:
    if array.nan == "keep" or values.dtype.kind != "f":
        return
    # Fast pass: the sum is finite unless some value is not (or the sum overflows, which the slow
    # pass resolves).
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        if offsets is not None:
            row = int(np.searchsorted(offsets, row, side="right")) - 1
        raise InvalidRowsError(
            f"array {array.name!r} holds NaN or infinity",
            code="store.not_finite",
            path=path,
            found=f"{int(bad.sum())} rows of this batch, the first with id {int(ids[row])}",
            fix="Check that example and its loss, or declare the array with nan='keep'.",
        )


def _mismatch(array: Array, actual: str, expected: str, *, path: str) -> InvalidRowsError:
    return InvalidRowsError(
        f"array {array.name!r} does not match the schema",
        code="store.wrong_values",
        path=path,
        found=actual,
        expected=expected,
    )


class SegmentBuffer:
    """Buffers of one segment that is being filled; reused for the segment after the next."""

    def __init__(self, schema: Schema, rows: int) -> None:
        self._schema = schema
        self._ids = np.empty(rows, np.int64)
        self._slots = {array.name: _ArrayBuffer(array, rows) for array in schema.arrays}
        self.first_row = 0
        self.count = 0

    def begin(self, first_row: int) -> None:
        self.first_row, self.count = first_row, 0
        for slot in self._slots.values():
            slot.begin()

    def add(self, ids: AnyArray, arrays: Mapping[str, AnyArray | Ragged], chunk: slice) -> None:
        # Encode everything before changing any buffer, so that a failure changes nothing.
        ready = [
            (slot, *_encoded_rows(slot.array, arrays[name], chunk))
            for name, slot in self._slots.items()
        ]
        self._ids[self.count : self.count + len(ids)] = ids
        for slot, encoded, lengths in ready:
            slot.add(self.count, encoded, lengths)
        self.count += len(ids)

    def pack(self) -> PackedSegment:
        stored = {name: slot.stored(self.count) for name, slot in self._slots.items()}
        return pack(self._schema, self._ids[: self.count], stored, first_row=self.first_row)


def stored_arrays(
    schema: Schema, arrays: Mapping[str, AnyArray | Ragged], chunk: slice
) -> dict[str, StoredArray]:
    """Encode the rows of a chunk; arrays that are stored as they are are not copied."""
    stored = {}
    for array in schema.arrays:
        encoded, lengths = _encoded_rows(array, arrays[array.name], chunk)
        stored[array.name] = StoredArray(encoded, None if lengths is None else _bounds_of(lengths))
    return stored


def _encoded_rows(
    array: Array, values: AnyArray | Ragged, chunk: slice
) -> tuple[Encoded, AnyArray | None]:
    if isinstance(values, Ragged):
        bounds = values.offsets[chunk.start : chunk.stop + 1]
        return encode(array, values.values[bounds[0] : bounds[-1]]), np.diff(bounds)
    return encode(array, values[chunk]), None


class _ArrayBuffer:
    """Encoded rows of one array of one segment."""

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
        offsets = _bounds_of(np.concatenate([np.empty(0, np.int64), *self._lengths]))
        return StoredArray(Encoded(values, scale, self._nonzero, self._flushed), offsets)


def _bounds_of(lengths: AnyArray) -> AnyArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
