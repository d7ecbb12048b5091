"""Layout of a segment: one immutable safetensors file with all arrays of one range of rows.

On top of the safetensors format:

- `__metadata__` begins with `header_xxh3`, the xxh3-128 of the length word and the header with this
  value zeroed; it holds `xxh3:<tensor>` for every tensor. The header's digest is therefore a digest of
  the whole file, and the manifest needs no other.
- a tensor of more than 4 MiB is hashed in blocks of whole rows: `blocks:<tensor>` lists the bytes of
  a block and the xxh3-128 of each, and `xxh3:<tensor>` is the xxh3-128 of those digests. A stream
  verifies each block while it is in the cache, before yielding any of its rows.
- tensors are ordered by item size, and the data starts at a multiple of the page (of 64 bytes in a
  small file): every tensor is aligned for its dtype and can be mapped.
- `<array>` holds the rows; `<array>#scale` their scales; `<array>#offsets` the bounds of ragged rows;
  `<array>#check` an xxh3-64 for every few rows, so that single rows are verified without reading the
  rest; `<array>#frames` the bounds of zstd frames if the array is compressed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import xxhash

from gradkeep.store.backends._backend import flat
from gradkeep.store.blocks._encoding import Encoded, compress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.store.blocks._columns import Batch
    from gradkeep.store.blocks._encoding import AnyArray
    from gradkeep.store.blocks._schema import Array, Schema


SUFFIX = ".safetensors"
FORMAT = "gradkeep-segment-1"

OPENING = b'{"__metadata__":{"header_xxh3":"'
DIGEST_AT = 8 + len(OPENING)
DIGEST_END = DIGEST_AT + 32
_CHECK_FROM = 1 << 16  # smaller tensors are verified whole
_FRAME_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 22  # bytes hashed at a time; they stay in the CPU cache for the reader
_SMALL_FILE = 1 << 20
_CODES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
DTYPES = {code: np.dtype(name) for name, code in _CODES.items()} | {"BF16": np.dtype("uint16")}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Encoded rows of one array of a segment."""

    encoded: Encoded
    offsets: AnyArray | None = None
    """`[B + 1]` int64, for ragged arrays."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A segment ready to be written: its bytes in parts, and its digest."""

    parts: list[bytes | memoryview]
    size: int
    digest: str


def pack(
    schema: Schema,
    ids: AnyArray,
    arrays: Mapping[str, StoredArray],
    *,
    first_row: int,
) -> PackedSegment:
    """Lay out rows as a segment; equal rows give equal bytes."""
    tensors: list[tuple[str, AnyArray, str]] = [("ids", ids, "I64")]
    notes: dict[str, str] = {}
    hashed: dict[str, list[bytes]] = {}
    for array in schema.arrays:
        _add_array(array, arrays[array.name], tensors, notes, hashed)
    # A stable sort by item size keeps every tensor aligned without gaps, which the format forbids.
    tensors.sort(key=lambda tensor: -tensor[1].dtype.itemsize)
    metadata = {
        "header_xxh3": "0" * 32,
        "format": FORMAT,
        "schema": schema.hash,
        "first_row": str(first_row),
        "rows": str(len(ids)),
    }
    layout: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    views = []
    for name, values, code in tensors:
        view = _bytes_of(values)
        digests = hashed[name] if name in hashed else block_digests(view, len(values))
        metadata[f"xxh3:{name}"] = tensor_digest(digests)
        if len(digests) > 1:
            step = _block_step(len(view), len(values))
            metadata[f"blocks:{name}"] = f"{step}:{b''.join(digests).hex()}"
        stop = at + len(view)
        layout[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [at, stop]}
        at = stop
        views.append(view)
    metadata.update(notes)
    header, digest = _seal_header(layout, payload=at)
    return PackedSegment([header, *views], len(header) + at, digest)


def pack_batch(schema: Schema, batch: Batch, *, first_row: int) -> PackedSegment:
    """Lay out stored rows that were read as another segment."""
    stored = {
        column.array.name: StoredArray(Encoded(column.values, column.scale), column.offsets)
        for column in batch.columns
    }
    return pack(schema, batch.ids, stored, first_row=first_row)


def block_digests(view: memoryview, rows: int) -> list[bytes]:
    """Compute the digest of each block of a tensor."""
    step = _block_step(len(view), rows)
    starts = range(0, max(1, len(view)), step)
    return [xxhash.xxh3_128_digest(view[at : at + step]) for at in starts]


def _block_step(size: int, rows: int) -> int:
    """Return the bytes of a block: whole rows, about 4 MiB."""
    row_bytes = size // rows if rows else 0
    return max(1, _BLOCK_BYTES // row_bytes) * row_bytes if row_bytes else _BLOCK_BYTES


def _digests_and_checks(view: memoryview, rows: int, group: int) -> tuple[list[bytes], AnyArray]:
    """Compute digests and checks block by block, while each block is in the CPU cache."""
    digests: list[bytes] = []
    checks: list[int] = []
    check, step, done = xxhash.xxh3_64_intdigest, _block_step(len(view), rows), 0
    for at in range(0, len(view), step):
        end = min(len(view), at + step)
        digests.append(xxhash.xxh3_128_digest(view[at:end]))
        until = end if end == len(view) else end // group * group
        checks.extend([check(view[low : low + group]) for low in range(done, until, group)])
        done = until
    return digests, np.array(checks, np.uint64)


def _bytes_of(values: AnyArray) -> memoryview:
    return flat(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def tensor_digest(digests: list[bytes]) -> str:
    """Return the digest of a single block, or the digest of several blocks' digests."""
    if len(digests) == 1:
        return digests[0].hex()
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _seal_header(layout: dict[str, Any], *, payload: int) -> tuple[bytes, str]:
    """Return the bytes of a header, with its digest inserted, and the digest."""
    text = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
    step = 64 if payload < _SMALL_FILE else 4096
    text += b" " * (-(8 + len(text)) % step)
    blob = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128_hexdigest(blob)
    return blob[:DIGEST_AT] + digest.encode() + blob[DIGEST_END:], digest


def _add_array(
    array: Array,
    stored: StoredArray,
    tensors: list[tuple[str, AnyArray, str]],
    notes: dict[str, str],
    hashed: dict[str, list[bytes]],
) -> None:
    values, name = stored.encoded.values, array.name
    code = "BF16" if array.encoding == "bfloat16" else _CODES[values.dtype.name]
    if stored.encoded.flushed:
        notes[f"underflow:{name}"] = f"{stored.encoded.flushed}/{stored.encoded.nonzero}"
    if stored.encoded.scale is not None:
        tensors.append((f"{name}#scale", stored.encoded.scale, "F32"))
    if stored.offsets is not None:
        tensors.append((f"{name}#offsets", stored.offsets, "I64"))
    row_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    if array.compression is not None:
        rows = max(1, math.ceil(_FRAME_BYTES / max(1, row_bytes)))
        notes[f"frame_rows:{name}"] = str(rows)
        frames = compress(values, rows)
        bounds = np.cumsum([0, *map(len, frames)], dtype=np.int64)
        checks = np.array([xxhash.xxh3_64_intdigest(frame) for frame in frames], np.uint64)
        tensors.append((f"{name}#frames", bounds, "I64"))
        tensors.append((f"{name}#check", checks, "U64"))
        tensors.append((name, np.frombuffer(b"".join(frames), np.uint8), "U8"))
        return
    if values.nbytes > _CHECK_FROM:
        rows = max(1, math.ceil(16384 / row_bytes))
        notes[f"check_rows:{name}"] = str(rows)
        view = _bytes_of(values)
        hashed[name], checks = _digests_and_checks(view, len(values), rows * row_bytes)
        tensors.append((f"{name}#check", checks, "U64"))
    tensors.append((name, values, code))


COUNT = re.compile(r"\d{1,18}")
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_METADATA = b'{"__metadata__":'
_BETWEEN = b'"},"'  # between the metadata and the first tensor; no name contains a quote


@dataclass(frozen=True, slots=True)
class Extent:
    """Dtype, shape and byte range of a tensor in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed and validated header of a segment."""

    metadata: dict[str, str]
    extents: dict[str, Extent]
    end: int
    """End of the last tensor, which is the end of the file."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def read_header(text: bytes, base: int) -> Header:
    """Parse a header; raise ValueError if gradkeep did not write it. Data begins at `base`."""
    cut = text.find(_BETWEEN)
    if cut < 0 or not text.startswith(_METADATA):
        raise ValueError("no tensors")
    metadata = msgspec.json.decode(text[len(_METADATA) : cut + 2], type=dict[str, str])
    for name in ("rows", "first_row"):
        if not COUNT.fullmatch(metadata.get(name, "")):
            raise ValueError(f"no number {name!r}")
    if "schema" not in metadata:
        raise ValueError("no schema")
    extents, end = _extents(b"{" + text[cut + 3 :], base)
    if extents["ids"].shape != (int(metadata["rows"]),):
        raise ValueError("the number of ids differs from the number of rows")
    return Header(metadata, extents, end)


@lru_cache(maxsize=64)
def _extents(text: bytes, base: int) -> tuple[dict[str, Extent], int]:
    tensors = msgspec.json.decode(text, type=dict[str, _Tensor])
    extents = {}
    for name, tensor in tensors.items():
        start, stop = tensor.data_offsets
        if tensor.dtype not in DTYPES or not tensor.shape:
            raise ValueError(f"tensor {name!r} has no dtype or shape")
        dtype = DTYPES[tensor.dtype]
        if math.prod(tensor.shape) * dtype.itemsize != stop - start:
            raise ValueError(f"tensor {name!r} has a size that does not match its shape")
        extents[name] = Extent(dtype, tuple(tensor.shape), base + start, base + stop)
    ids = extents.get("ids")
    if ids is None or ids.dtype != np.int64 or len(ids.shape) != 1:
        raise ValueError("no ids")
    return extents, max(extent.stop for extent in extents.values())
