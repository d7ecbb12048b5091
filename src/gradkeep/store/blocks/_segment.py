"""Segments: each is one immutable safetensors file with all arrays of one range of rows.

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

All bytes are verified before use, once per process. Single rows are read by position and checked group
by group: reading cold rows through a map costs fifty times more than `preadv`, because each page fault
reads far ahead.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import xxhash

from gradkeep.errors import DamagedError
from gradkeep.store.backends._backend import flat
from gradkeep.store.blocks._columns import Column, compress, decompress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.store.backends._backend import Backend, Readable
    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._schema import Array, Schema

SUFFIX = ".safetensors"
FORMAT = "gradkeep-segment-1"

_OPENING = b'{"__metadata__":{"header_xxh3":"'
_DIGEST_AT = 8 + len(_OPENING)
_DIGEST_END = _DIGEST_AT + 32
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
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()} | {"BF16": np.dtype("uint16")}


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A segment ready to be written: its bytes in parts, and its digest."""

    parts: list[bytes | memoryview]
    size: int
    digest: str


def pack(
    schema: Schema,
    ids: AnyArray,
    columns: Iterable[Column],
    *,
    first_row: int,
) -> PackedSegment:
    """Lay out rows as a segment; equal rows give equal bytes."""
    tensors: list[tuple[str, AnyArray, str]] = [("ids", ids, "I64")]
    notes: dict[str, str] = {}
    hashed: dict[str, list[bytes]] = {}
    for column in columns:
        _add_column(column, tensors, notes, hashed)
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
        digests = hashed[name] if name in hashed else _block_digests(view, len(values))
        metadata[f"xxh3:{name}"] = _tensor_digest(digests)
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


def _block_digests(view: memoryview, rows: int) -> list[bytes]:
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


def _tensor_digest(digests: list[bytes]) -> str:
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
    return blob[:_DIGEST_AT] + digest.encode() + blob[_DIGEST_END:], digest


def _add_column(
    column: Column,
    tensors: list[tuple[str, AnyArray, str]],
    notes: dict[str, str],
    hashed: dict[str, list[bytes]],
) -> None:
    array, values, name = column.array, column.values, column.array.name
    code = "BF16" if array.encoding == "bfloat16" else _CODES[values.dtype.name]
    if column.flushed:
        notes[f"underflow:{name}"] = f"{column.flushed}/{column.nonzero}"
    if column.scale is not None:
        tensors.append((f"{name}#scale", column.scale, "F32"))
    if column.offsets is not None:
        tensors.append((f"{name}#offsets", column.offsets, "I64"))
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


_COUNT = re.compile(r"\d{1,18}")
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
class _Header:
    """Parsed and validated header of a segment."""

    metadata: dict[str, str]
    extents: dict[str, Extent]
    end: int
    """End of the last tensor, which is the end of the file."""
    digest: str


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def _read_header(text: bytes, base: int, digest: str) -> _Header:
    """Parse a header; raise ValueError if gradkeep did not write it. Data begins at `base`."""
    cut = text.find(_BETWEEN)
    if cut < 0 or not text.startswith(_METADATA):
        raise ValueError("no tensors")
    metadata = msgspec.json.decode(text[len(_METADATA) : cut + 2], type=dict[str, str])
    for name in ("rows", "first_row"):
        if not _COUNT.fullmatch(metadata.get(name, "")):
            raise ValueError(f"no number {name!r}")
    if "schema" not in metadata:
        raise ValueError("no schema")
    extents, end = _extents(b"{" + text[cut + 3 :], base)
    if extents["ids"].shape != (int(metadata["rows"]),):
        raise ValueError("the number of ids differs from the number of rows")
    return _Header(metadata, extents, end, digest)


@lru_cache(maxsize=64)
def _extents(text: bytes, base: int) -> tuple[dict[str, Extent], int]:
    tensors = msgspec.json.decode(text, type=dict[str, _Tensor])
    extents = {}
    for name, tensor in tensors.items():
        start, stop = tensor.data_offsets
        if tensor.dtype not in _DTYPES or not tensor.shape:
            raise ValueError(f"tensor {name!r} has no dtype or shape")
        dtype = _DTYPES[tensor.dtype]
        if math.prod(tensor.shape) * dtype.itemsize != stop - start:
            raise ValueError(f"tensor {name!r} has a size that does not match its shape")
        extents[name] = Extent(dtype, tuple(tensor.shape), base + start, base + stop)
    ids = extents.get("ids")
    if ids is None or ids.dtype != np.int64 or len(ids.shape) != 1:
        raise ValueError("no ids")
    return extents, max(extent.stop for extent in extents.values())


Pick = tuple[int, int, int]
"""Stored rows `[start, stop)` that go to row `at` of the result."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """Verified parts of a file: its header, and blocks of tensors."""

    header: _Header
    blocks: set[tuple[str, int]]
    """Numbers of blocks, and `_ALL`, by tensor"""
    groups: dict[str, AnyArray]
    """True for groups of rows that share a check, by tensor"""


_MOST_VERIFIED = 4096
"""Number of files whose verified parts are remembered; headers take some kilobytes each."""
_verified: OrderedDict[tuple[object, ...], _Verified] = OrderedDict()
"""The most recently opened files of this process, by path and identity; descriptors are not held."""

MOST_MAPPED = 1 << 28
"""Bytes of the maps that a block keeps for reading single rows."""

_ALL = -1  # block number that means all blocks of a tensor


class Segment:
    """A segment opened for reading; all bytes are verified before use, once per process."""

    def __init__(
        self, backend: Backend, key: str, *, verify: bool = True, remember: bool = True
    ) -> None:
        """Open a segment; with `remember`, verified blocks are not verified again in this process."""
        self.key = key
        self.path = backend.describe(key)
        self._file: Readable = backend.open(key)
        self._map: memoryview | None = None
        self._verify = verify
        identity = (self.path, *self._file.identity)
        known = _verified.pop(identity, None) if remember and self._file.settled else None
        if known is None:
            try:
                known = _Verified(self._read_header(), set(), {})
            except BaseException:
                self._file.close()
                raise
        if remember and self._file.settled:
            _verified[identity] = known
            if len(_verified) > _MOST_VERIFIED:
                _verified.popitem(last=False)
        self._known, self._groups, header = known.blocks, known.groups, known.header
        self._fitting: set[str] = set()
        self.digest, self.metadata, self.extents = header.digest, header.metadata, header.extents
        self._small: dict[str, AnyArray] = {}
        self._checks: dict[str, list[int]] = {}
        self._digests: dict[str, tuple[int, list[str]]] = {}

    def _read_header(self) -> _Header:
        head = self._file.read(0, min(16384, self._file.size))
        if len(head) == self._file.size:
            # The file was read as a whole, as most single rows are: no need to map it.
            self._map = memoryview(bytearray(head))
        length = int.from_bytes(head[:8], "little")
        if len(head) < _DIGEST_END or length > self._file.size - 8:
            raise self._damage("the header", "is truncated or not that of a segment")
        if len(head) < 8 + length:
            head += self._file.read(len(head), 8 + length - len(head))
        head = head[: 8 + length]
        digest = head[_DIGEST_AT:_DIGEST_END].decode("ascii", "replace")
        zeroed = head[:_DIGEST_AT] + b"0" * 32 + head[_DIGEST_END:]
        if head[8:_DIGEST_AT] != _OPENING or xxhash.xxh3_128_hexdigest(zeroed) != digest:
            raise self._damage("the header", "does not match its checksum")
        try:
            header = _read_header(head[8:], 8 + length, digest)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            what = f"was not written by gradkeep: {str(error)[:200]}"
            raise self._damage("the header", what) from None
        if header.end != self._file.size:
            what = "is truncated" if header.end > self._file.size else "has extra bytes at its end"
            raise self._damage(
                "the file", f"{what}: {self._file.size} bytes instead of {header.end}"
            )
        return header

    def _extent(self, name: str) -> Extent:
        extent = self.extents.get(name)
        if extent is None:
            raise self._damage(f"tensor {name!r}", "is missing")
        return extent

    def _count(self, name: str) -> int:
        """Return a positive number from the metadata."""
        value = self.metadata.get(name, "")
        if not _COUNT.fullmatch(value) or int(value) < 1:
            raise self._damage("the header", f"has no number {name!r}")
        return int(value)

    def require_form(self, array: Array) -> None:
        """Raise `DamagedError` unless the tensors of an array match the schema."""
        if array.name in self._fitting:
            return
        name, rows = array.name, self.rows
        if array.ragged:
            self._check_form(f"{name}#offsets", np.int64, (rows + 1,))
            bounds = self.small(f"{name}#offsets")
            if bounds[0] != 0 or (np.diff(bounds) < 0).any():
                raise self._damage(f"tensor {name + '#offsets'!r}", "does not rise from 0")
            rows = int(bounds[-1])
        if array.scaled:
            self._check_form(f"{name}#scale", np.float32, (rows,))
        extent = self._extent(name)
        if array.compression is not None:
            frames = -(-rows // self._count(f"frame_rows:{name}"))
            self._check_form(f"{name}#frames", np.int64, (frames + 1,))
            self._check_form(f"{name}#check", np.uint64, (frames,))
            bounds = self.small(f"{name}#frames")
            size = extent.stop - extent.start
            if bounds[0] != 0 or bounds[-1] != size or (np.diff(bounds) < 0).any():
                raise self._damage(f"tensor {name + '#frames'!r}", "does not divide its array")
        else:
            self._check_form(name, array.stored_dtype, (rows, *array.stored_shape))
            if f"check_rows:{name}" in self.metadata:
                groups = -(-rows // self._count(f"check_rows:{name}"))
                self._check_form(f"{name}#check", np.uint64, (groups,))
        self._fitting.add(name)

    def _check_form(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        extent = self._extent(name)
        if (extent.dtype, extent.shape) != (dtype, shape):
            raise self._damage(f"tensor {name!r}", "does not match the schema")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.metadata["rows"])

    @property
    def first_row(self) -> int:
        """Position of its first row when it was written."""
        return int(self.metadata["first_row"])

    @property
    def schema_hash(self) -> str:
        """Hash of the schema it was written for."""
        return self.metadata["schema"]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def read_ahead(self, names: Sequence[str]) -> None:
        """Map the file and prefetch these tensors."""
        if self._map is not None:
            return
        extents = (self._extent(name) for name in names)
        self._map = self._file.map([(extent.start, extent.stop) for extent in extents])

    def view(self, name: str, start: int = 0, stop: int | None = None) -> AnyArray:
        """Return rows `[start, stop)` of a tensor as stored, mapped and verified, without a copy.

        The memory is private to the process: torch accepts it, and writes never reach the file.
        """
        if self._map is None:
            self._map = self._file.map()
        extent = self._extent(name)
        stop = extent.shape[0] if stop is None else stop
        part = self._map[extent.start : extent.stop]
        row_bytes = len(part) // extent.shape[0] if extent.shape[0] else 0
        low, high = start * row_bytes, stop * row_bytes
        if self._verify and (name, _ALL) not in self._known:
            self._check_blocks(name, part, low, high)
        values = np.frombuffer(part[low:high], extent.dtype)
        return values.reshape(stop - start, *extent.shape[1:])

    def small(self, name: str) -> AnyArray:
        """Read a small tensor (ids, offsets, scales, checks) into memory and cache it."""
        if name not in self._small:
            extent = self._extent(name)
            data: bytes | memoryview
            if self._map is not None:
                data = self._map[extent.start : extent.stop]
            else:
                data = self._file.read(extent.start, extent.stop - extent.start)
            if self._verify and (name, _ALL) not in self._known:
                self._check_blocks(name, memoryview(data), 0, len(data))
            self._small[name] = np.frombuffer(data, extent.dtype).reshape(extent.shape)
        return self._small[name]

    def stored_bytes(self, name: str) -> memoryview:
        """Return the verified bytes of a tensor as stored."""
        extent = self._extent(name)
        if self._map is None:
            return flat(self.small(name).reshape(-1).view(np.uint8))
        data = self._map[extent.start : extent.stop]
        if self._verify and (name, _ALL) not in self._known:
            self._check_blocks(name, data, 0, len(data))
        return data

    def _check_blocks(self, name: str, data: memoryview, low: int, high: int) -> None:
        """Verify the blocks of a tensor that hold its bytes `[low, high)`."""
        if f"blocks:{name}" not in self.metadata:
            if xxhash.xxh3_128_hexdigest(data) != self.metadata.get(f"xxh3:{name}"):
                raise self._damage(f"tensor {name!r}", "does not match its checksum")
            self._known.add((name, _ALL))
            return
        step, digests = self._blocks(name, len(data))
        last = max(low, high - 1)
        for index in range(low // step, min(len(digests), last // step + 1)):
            if (name, index) in self._known:
                continue
            block = data[index * step : (index + 1) * step]
            if xxhash.xxh3_128_hexdigest(block) != digests[index]:
                raise self._damage(f"tensor {name!r}", "does not match its checksum")
            self._known.add((name, index))
        if low == 0 and high == len(data):
            self._known.add((name, _ALL))

    def _blocks(self, name: str, size: int) -> tuple[int, list[str]]:
        """Return the block size of a tensor in bytes, and the digest of each block."""
        if name not in self._digests:
            step, _, joined = self.metadata[f"blocks:{name}"].partition(":")
            digests = [joined[at : at + 32] for at in range(0, len(joined), 32)]
            if not _COUNT.fullmatch(step) or int(step) < 1 or len(digests) != -(-size // int(step)):
                raise self._damage(f"tensor {name!r}", "has no digest for some of its bytes")
            self._digests[name] = (int(step), digests)
        return self._digests[name]

    def values(self, array: Array, start: int, stop: int) -> AnyArray:
        """Return stored rows `[start, stop)` of an array: mapped, or decompressed."""
        if array.compression is None:
            return self.view(array.name, start, stop)
        out = np.empty((stop - start, *array.stored_shape), array.stored_dtype)
        self.gather(array, [(start, stop, 0)], out)
        return out

    def column(self, array: Array, start: int = 0, stop: int | None = None) -> Column:
        """Return rows `[start, stop)` of an array as stored."""
        self.require_form(array)
        stop = self.rows if stop is None else stop
        offsets = None
        if array.ragged:
            bounds = self.small(f"{array.name}#offsets")[start : stop + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            offsets = bounds - start
        scale = self.small(f"{array.name}#scale")[start:stop] if array.scaled else None
        return Column(array, self.values(array, start, stop), scale, offsets)

    def take(self, array: Array, rows: AnyArray, slots: AnyArray, out: AnyArray) -> bool:
        """Copy stored rows to slots of `out` from a map; return False unless they were verified before.

        Faster than a read per row once they are in the page cache. The map stays until the segment is closed.
        """
        name = array.name
        if array.compression is not None or self._file.size > MOST_MAPPED:
            return False
        self.require_form(array)
        if self._verify and (name, _ALL) not in self._known:
            groups = self._groups.get(name)
            if groups is None or not groups[rows // self._count(f"check_rows:{name}")].all():
                return False
        if self._map is None:
            self._map = self._file.map()
            if isinstance(self._map.obj, mmap.mmap):
                # Pages that left the cache are read one by one.
                self._map.obj.madvise(mmap.MADV_RANDOM)
        extent = self._extent(name)
        values = np.frombuffer(self._map[extent.start : extent.stop], extent.dtype)
        out[slots] = values.reshape(extent.shape)[rows]
        return True

    @property
    def mapped_bytes(self) -> int:
        """Bytes of its map."""
        return 0 if self._map is None else len(self._map)

    def gather(self, array: Array, picks: Sequence[Pick], out: AnyArray) -> None:
        """Read stored rows `[start, stop)` of each pick to row `at` of `out`, verified.

        Reads only what it needs: one `preadv` per pick, or per group of rows that share a check.
        """
        self.require_form(array)
        name = array.name
        size = array.stored_dtype.itemsize * math.prod(array.stored_shape)
        target = flat(out.reshape(-1).view(np.uint8))
        try:
            if array.compression is not None:
                self._gather_frames(array, picks, out)
            elif not self._verify or (name, _ALL) in self._known:
                read_into, base = self._file.read_into, self.extents[name].start
                for start, stop, at in picks:
                    read_into(target[at * size : (at + stop - start) * size], base + start * size)
            elif f"check_rows:{name}" in self.metadata:
                self._gather_checked(name, size, picks, target)
            else:
                values = self.small(name)
                for start, stop, at in picks:
                    out[at : at + stop - start] = values[start:stop]
        except EOFError:
            raise self._damage(f"tensor {name!r}", "is truncated") from None

    def _gather_checked(
        self, name: str, size: int, picks: Sequence[Pick], target: memoryview
    ) -> None:
        """Read and verify whole groups of rows that share a checksum, and copy the picked rows."""
        group, extent = self._count(f"check_rows:{name}"), self.extents[name]
        if name not in self._checks:
            # A list: comparing plain integers is several times faster than numpy's.
            self._checks[name] = self.small(f"{name}#check").tolist()
        checks = self._checks[name]
        known = self._groups.setdefault(name, np.zeros(len(checks), np.bool_))

        def read(index: int, buffer: memoryview) -> None:
            self._file.read_into(buffer, extent.start + index * group * size)
            if xxhash.xxh3_64_intdigest(buffer) != checks[index]:
                what = f"does not match its checksum of the rows from {index * group}"
                raise self._damage(f"tensor {name!r}", what)
            known[index] = True

        opened, piece = -1, target[:0]
        for start, stop, at in picks:
            row, to = start, at * size
            while row < stop:
                index, within = divmod(row, group)
                until = min(stop, (index + 1) * group)
                count = (until - row) * size
                whole = min(group * size, extent.stop - extent.start - index * group * size)
                if known[index]:
                    self._file.read_into(target[to : to + count], extent.start + row * size)
                elif count == whole:
                    read(index, target[to : to + count])
                else:
                    if index != opened:
                        piece = memoryview(bytearray(whole))
                        read(index, piece)
                        opened = index
                    target[to : to + count] = piece[within * size : within * size + count]
                to += count
                row = until

    def _gather_frames(self, array: Array, picks: Sequence[Pick], out: AnyArray) -> None:
        """Decompress the frames that hold the picked rows, each run of neighbors once."""
        name, rows = array.name, self._count(f"frame_rows:{array.name}")
        base, bounds = self.extents[name].start, self.small(f"{name}#frames").tolist()
        checks = self.small(f"{name}#check").tolist()
        total = int(self.small(f"{name}#offsets")[-1]) if array.ragged else self.rows
        opened, content = -1, out[:0]
        for start, stop, at in picks:
            row = start
            while row < stop:
                index, within = divmod(row, rows)
                if index != opened:
                    frame = self._file.read(base + bounds[index], bounds[index + 1] - bounds[index])
                    if self._verify and xxhash.xxh3_64_intdigest(frame) != checks[index]:
                        what = f"does not match its checksum of frame {index}"
                        raise self._damage(f"tensor {name!r}", what)
                    shape = (min(rows, total - index * rows), *out.shape[1:])
                    content, opened = np.empty(shape, out.dtype), index
                    try:
                        decompress(frame, content)
                    except ValueError:  # wrong number of bytes, or not a frame
                        what = f"cannot be decompressed at frame {index}"
                        raise self._damage(f"tensor {name!r}", what) from None
                until = min(stop, (index + 1) * rows)
                out[at : at + until - row] = content[within : within + until - row]
                at += until - row
                row = until

    def check_everything(self) -> list[DamagedError]:
        """Verify every tensor; return an error for each damaged one."""
        errors = []
        mapped = self._file.map()
        for name, extent in self.extents.items():
            part = mapped[extent.start : extent.stop]
            if _tensor_digest(_block_digests(part, extent.shape[0])) != self.metadata.get(
                f"xxh3:{name}"
            ):
                errors.append(self._damage(f"tensor {name!r}", "does not match its checksum"))
        return errors

    def close(self) -> None:
        """Close the file; returned arrays stay valid."""
        self._file.close()
        self._map = None

    def _damage(self, part: str, what: str) -> DamagedError:
        return DamagedError(f"{part} {what}", path=self.path)
