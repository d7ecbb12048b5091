"""Encode values to stored bytes and decode them.

Scales are stored per row, never per block: one large row must not round the small ones to zero, and at
a converged model the small ones carry the ranking. Compressed rows are stored in zstd frames of some
rows each, so that reading a few rows does not decompress all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._environment import import_extra

if TYPE_CHECKING:
    from gradkeep.store.blocks._schema import Array

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
AnyArray = np.ndarray[Any, np.dtype[Any]]

LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 1 << 16  # values converted at a time, so that the passes stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Stored rows: `values [R, ...]` in the stored dtype, `scale [R]` for scaled encodings."""

    values: AnyArray
    scale: FloatArray | None
    nonzero: int = 0
    """Number of nonzero values, for encodings that can flush values to zero."""
    flushed: int = 0
    """Number of them that became zero."""


def encode(array: Array, values: AnyArray) -> Encoded:
    """Encode rows `[R, *shape]` of the array's dtype."""
    if array.encoding == "plain":
        return Encoded(values, None)
    if array.encoding == "bits":
        flat = values.reshape(len(values), math.prod(array.shape))
        return Encoded(np.packbits(flat, axis=1, bitorder="little"), None)
    if array.encoding == "bfloat16":
        return Encoded(to_bfloat16(values), None)
    if array.encoding == "float16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        return Encoded(half, None, *_underflow(values, half))
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
        if may_overflow(scale):
            np.clip(wide, -LARGEST, LARGEST, out=wide)
    return wide


def may_overflow(scale: FloatArray) -> bool:
    """Return True if decoding may round a value above the largest float32; it is then clipped."""
    return bool(len(scale)) and float(scale.max()) > 2.0**111


def to_bfloat16(values: AnyArray) -> AnyArray:
    """Round float32 to the bits of bfloat16, to nearest even; NaN stays NaN.

    >>> hex(to_bfloat16(np.float32([1.0]))[0])
    '0x3f80'
    """
    source = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    result = np.empty(source.shape, np.uint16)
    for start in range(0, len(source), _CHUNK):
        bits = source[start : start + _CHUNK]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        # Rounding up a NaN's payload could make it an infinity.
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            rounded[nan] = 0x7FC0
        result[start : start + _CHUNK] = rounded
    return result.reshape(values.shape)


def from_bfloat16(bits: AnyArray) -> FloatArray:
    """Convert the bits of bfloat16 to float32, exactly.

    >>> from_bfloat16(np.uint16([0x3F80]))
    array([1.], dtype=float32)
    """
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _encode_scaled(array: Array, values: AnyArray) -> Encoded:
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
    return Encoded(stored.reshape(values.shape), scale, *_underflow(flat, stored))


def _underflow(values: AnyArray, stored: AnyArray) -> tuple[int, int]:
    nonzero = int(np.count_nonzero(values))
    return nonzero, nonzero - int(np.count_nonzero(stored))


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
