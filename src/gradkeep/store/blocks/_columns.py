"""Rows as stored: encoded from values, decoded on access.

Scales are stored per row, never per block: one large row must not round the small ones to zero, and at
a converged model the small ones carry the ranking. Compressed rows are stored in zstd frames of some
rows each, so that reading a few rows does not decompress all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._environment import import_extra
from gradkeep.errors import InvalidRowsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from gradkeep.store.blocks._schema import Array

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
AnyArray = np.ndarray[Any, np.dtype[Any]]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    Args:
        values: All rows joined, `[sum T_i, *shape]`.
        offsets: Bounds of the rows, `[B + 1]` int64.

    Example:
        >>> rows = Ragged.of([np.zeros((2, 3)), np.ones((1, 3))])
        >>> len(rows), rows[1].shape, rows.offsets.tolist()
        (2, (1, 3), [0, 2, 3])
    """

    values: AnyArray
    offsets: AnyArray

    @classmethod
    def of(cls, rows: list[AnyArray]) -> Ragged:
        """Join a list of arrays.

        Args:
            rows: Arrays `[T_i, *shape]`.

        Returns:
            The joined rows.
        """
        lengths = [len(row) for row in rows]
        return cls(np.concatenate(rows), np.cumsum([0, *lengths], dtype=np.int64))

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Ragged:
        """Encode texts as UTF-8, for an array of kind `text`.

        Args:
            texts: The texts.

        Returns:
            Their bytes, one row per text.

        Example:
            >>> Ragged.of_texts(["one", "zwölf"]).texts()
            ['one', 'zwölf']
        """
        parts = [text.encode() for text in texts]
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), offsets)

    def texts(self) -> list[str]:
        """Decode the rows of an array of kind `text`."""
        whole = np.ascontiguousarray(self.values).tobytes()
        bounds = itertools.pairwise(self.offsets.tolist())
        return [whole[start:stop].decode(errors="replace") for start, stop in bounds]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> AnyArray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Some rows of one array, as stored."""

    array: Array
    values: AnyArray
    scale: FloatArray | None = None
    """Scale of each row, or of each token of ragged rows, for scaled encodings."""
    offsets: AnyArray | None = None
    """Bounds of ragged rows `[B + 1]` int64."""
    nonzero: int = 0
    """Number of encoded nonzero values, for encodings that can flush values to zero."""
    flushed: int = 0
    """Number of them that became zero."""

    def take(self, order: AnyArray) -> Column:
        """Return the rows in another order; rows may be left out or repeated."""
        if np.array_equal(order, np.arange(len(self))):
            return self
        if self.offsets is None:
            scale = None if self.scale is None else self.scale[order]
            return Column(self.array, self.values[order], scale)
        bounds = self.offsets
        none = np.empty(0, np.int64)
        ranges = (np.arange(bounds[row], bounds[row + 1]) for row in order)
        pick = np.concatenate([none, *ranges])
        lengths = np.diff(bounds)[order]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        scale = None if self.scale is None else self.scale[pick]
        return Column(self.array, self.values[pick], scale, offsets)

    @classmethod
    def join(cls, array: Array, parts: Sequence[Column]) -> Column:
        """Concatenate the rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty((0, *array.stored_shape), array.stored_dtype)
        values = np.concatenate([empty, *(part.values for part in parts)])
        scale = offsets = None
        if array.scaled:
            scales = (part.scale for part in parts if part.scale is not None)
            scale = np.concatenate([np.empty(0, np.float32), *scales])
        if array.ragged:
            lengths = (np.diff(part.offsets) for part in parts if part.offsets is not None)
            offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        nonzero = sum(part.nonzero for part in parts)
        return cls(array, values, scale, offsets, nonzero, sum(part.flushed for part in parts))

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def decode(self) -> AnyArray | Ragged:
        """Return the values in the array's dtype; plain values are read-only and not copied."""
        values = decode(self.array, self.values, self.scale)
        if values is self.values and values.flags.writeable:
            values = values.view()
            values.flags.writeable = False
        return values if self.offsets is None else Ragged(values, self.offsets)

    def tensor(self) -> torch.Tensor:
        """Return the values `[R, *shape]` as a torch tensor; for ragged rows, all tokens in order."""
        import torch

        # Mapped values are private and writable, as torch requires; others are copied.
        values = self.values if self.values.flags.writeable else self.values.copy()
        if self.array.encoding == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
        if self.array.encoding in ("plain", "bits"):
            return torch.from_numpy(decode(self.array, values, None))
        wide = torch.from_numpy(values).float()
        if self.scale is not None:
            wide *= torch.from_numpy(self.scale.copy()).view(-1, *(1,) * (wide.dim() - 1))
            if _may_overflow(self.scale):
                wide.clamp_(-_LARGEST, _LARGEST)
        return wide


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Mapping[str, "AnyArray | Ragged"]):
    """Some rows of a block: `batch["loss"]` decodes, `batch.column("loss")` is as stored.

    Args:
        ids: Ids of the rows, `[B]` int64.
        columns: Stored rows of each array.
        first_row: Position of the first row in the block; 0 for rows read by id.
    """

    ids: AnyArray
    columns: tuple[Column, ...]
    first_row: int = 0

    def column(self, name: str) -> Column:
        """Return the stored rows of one array.

        Args:
            name: Name of the array.

        Raises:
            KeyError: The batch does not hold this array.
        """
        for column in self.columns:
            if column.array.name == name:
                return column
        raise KeyError(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the values of one array as a torch tensor `[B, *shape]`.

        Args:
            name: Name of the array.

        Raises:
            KeyError: The batch does not hold this array.
        """
        return self.column(name).tensor()

    def __getitem__(self, name: str) -> Any:
        return self.column(name).decode()

    def __iter__(self) -> Iterator[str]:
        return (column.array.name for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def check_fill(fill: float, arrays: Sequence[Array], *, path: str) -> None:
    """Raise unless `fill` is NaN and all arrays can hold it."""
    unfillable = [array.name for array in arrays if array.dtype[:5] != "float" or array.ragged]
    is_number = isinstance(fill, float | np.floating)
    if not is_number or not math.isnan(fill) or unfillable:
        raise InvalidRowsError(
            "missing rows can only be filled with NaN, and only in float arrays of fixed shape",
            code="store.invalid_fill",
            path=path,
            found=f"fill={_arguments.short_repr(fill)}"
            + (f" for {', '.join(unfillable)}" if unfillable else ""),
            fix="Pass fill=float('nan') and the names of float arrays only.",
        )


def fill_missing(column: Column, present: AnyArray) -> Column:
    """Return the rows of the column where `present [B]` is true, and NaN elsewhere."""
    array = column.array
    values = np.full((len(present), *array.shape), np.nan, array.dtype)
    values[present] = column.decode()
    return Column(array.as_plain(), values)


def encode(array: Array, values: AnyArray) -> Column:
    """Encode rows `[R, *shape]` of the array's dtype."""
    if array.encoding == "plain":
        return Column(array, values)
    if array.encoding == "bits":
        flat = values.reshape(len(values), math.prod(array.shape))
        return Column(array, np.packbits(flat, axis=1, bitorder="little"))
    if array.encoding == "bfloat16":
        return Column(array, to_bfloat16(values))
    if array.encoding == "float16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        return _with_underflow(Column(array, half), values)
    return _encode_scaled(array, values)


def decode(array: Array, values: AnyArray, scale: FloatArray | None) -> AnyArray:
    """Decode stored rows to `[R, *shape]` of the array's dtype; `plain` rows are not copied."""
    if array.encoding == "plain":
        return values
    if array.encoding == "bits":
        count = math.prod(array.shape)
        bits = np.unpackbits(values, axis=1, count=count, bitorder="little")
        return bits.view(np.bool_).reshape(len(values), *array.shape)
    if array.encoding == "bfloat16":
        return from_bfloat16(values)
    wide = values.astype(np.float32)
    if scale is not None:
        with np.errstate(over="ignore"):
            wide *= scale.reshape(-1, *(1,) * (wide.ndim - 1))
        if _may_overflow(scale):
            np.clip(wide, -_LARGEST, _LARGEST, out=wide)
    return wide


def _may_overflow(scale: FloatArray) -> bool:
    """Return True if decoding may round a value above the largest float32; it is then clipped."""
    return bool(len(scale)) and float(scale.max()) > 2.0**111


def to_bfloat16(values: AnyArray) -> AnyArray:
    """Round float32 to the bits of bfloat16, to nearest even; NaN stays NaN.

    >>> hex(to_bfloat16(np.float32([1.0]))[0])
    '0x3f80'
    """
    source = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    result = np.empty(source.shape, np.uint16)
    chunk = 1 << 16  # values converted at a time, so that the passes stay in the CPU cache
    for start in range(0, len(source), chunk):
        bits = source[start : start + chunk]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        # Rounding up a NaN's payload could make it an infinity.
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            rounded[nan] = 0x7FC0
        result[start : start + chunk] = rounded
    return result.reshape(values.shape)


def from_bfloat16(bits: AnyArray) -> FloatArray:
    """Convert the bits of bfloat16 to float32, exactly.

    >>> from_bfloat16(np.uint16([0x3F80]))
    array([1.], dtype=float32)
    """
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _encode_scaled(array: Array, values: AnyArray) -> Column:
    flat = values.reshape(len(values), math.prod(array.shape))
    largest = np.abs(flat).max(axis=1, initial=0.0) if flat.size else np.zeros(len(flat), "f4")
    if array.encoding == "float16-scaled":
        # A power of two changes no mantissa. The exponent is bounded so
        # that the scale itself is a normal float32.
        exponent = np.clip(np.frexp(largest)[1] - 15, -126, 126)
        scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
        stored = (flat / scale[:, None]).astype(np.float16)
    else:
        # Rows of subnormal numbers would need a scale below the smallest normal float32.
        scale = np.maximum(largest / 127, np.finfo(np.float32).tiny).astype(np.float32)
        stored = np.rint(flat / scale[:, None]).astype(np.int8)
    scale[largest == 0] = 1.0
    return _with_underflow(Column(array, stored.reshape(values.shape), scale), values)


def _with_underflow(column: Column, values: AnyArray) -> Column:
    """Count the nonzero values, and those that became zero."""
    nonzero = int(np.count_nonzero(values))
    flushed = nonzero - int(np.count_nonzero(column.values))
    return replace(column, nonzero=nonzero, flushed=flushed)


def compress(values: AnyArray, rows: int) -> list[bytes]:
    """Compress each group of `rows` rows to one frame; level 1, for speed."""
    zstandard = import_extra("zstandard", extra="zstd", what="zstd compression")
    compressor = zstandard.ZstdCompressor(level=1)
    contiguous = np.ascontiguousarray(values)
    starts = range(0, len(contiguous), rows)
    return [compressor.compress(contiguous[at : at + rows].tobytes()) for at in starts]


def decompress(frame: bytes, out: AnyArray) -> None:
    """Decompress a frame into `out`; raise ValueError if the sizes differ."""
    zstandard = import_extra("zstandard", extra="zstd", what="zstd compression")
    try:
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=out.nbytes)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(str(error)) from error
    out[...] = np.frombuffer(raw, out.dtype).reshape(out.shape)
