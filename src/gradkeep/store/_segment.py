"""The segment: one immutable safetensors file that holds all arrays of one range of rows.

Layout, on top of what every safetensors reader understands:

- `__metadata__` opens with `header_xxh3`, the xxh3-128 of the length word and the header with this
  value zeroed; it holds `xxh3:<tensor>` for every tensor. So the header's digest is a digest of the
  whole file, and the manifest needs no other.
- tensors are ordered by item size, and the data starts at a multiple of the page (of 64 bytes in a
  small file): every tensor is aligned for its dtype and can be mapped.
- `<array>` holds the rows; `<array>#scale` their scales; `<array>#offsets` the bounds of ragged rows;
  `<array>#check` an xxh3-64 for every few rows, so that a gather of single rows is verified without
  reading the rest; `<array>#frames` the bounds of zstd frames if the array is compressed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep._errors import Damaged, MissingExtra
from gradkeep.store._backend import flat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradkeep.store._backend import Backend, Readable
    from gradkeep.store._encoding import AnyArray, Encoded
    from gradkeep.store._schema import Array, Schema

SUFFIX = ".safetensors"
FORMAT = "gradkeep-segment-1"

_OPENING = b'{"__metadata__":{"header_xxh3":"'
_DIGEST_AT = 8 + len(_OPENING)
_DIGEST_END = _DIGEST_AT + 32
_CHECK_BYTES = 6144  # a check covers at least so many bytes: at most 0.13 % on top
_CHECK_FROM = 1 << 16  # smaller tensors are verified whole
_FRAME_BYTES = 1 << 18
_PAGE = 4096
_SMALL_FILE = 1 << 20
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()} | {"BF16": np.dtype("uint16")}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """What one array contributes to a segment."""

    encoded: Encoded
    offsets: AnyArray | None = None
    """`[B + 1]` int64, for ragged arrays."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A segment ready to be put: its bytes in parts, and its digest."""

    parts: list[bytes | memoryview]
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def pack(
    schema: Schema,
    ids: AnyArray,
    arrays: Mapping[str, StoredArray],
    *,
    first_row: int,
) -> Packed:
    """Lay out rows as a segment; the same rows give the same bytes."""
    tensors: list[tuple[str, AnyArray, str]] = [("ids", ids, "I64")]
    notes: dict[str, str] = {}
    for array in schema.arrays:
        _add_array(array, arrays[array.name], tensors, notes)
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
        view = flat(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        metadata[f"xxh3:{name}"] = xxhash.xxh3_128_hexdigest(view)
        stop = at + len(view)
        layout[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [at, stop]}
        at = stop
        views.append(view)
    metadata.update(notes)
    header = _seal_header(layout, payload=at)
    return Packed([header.blob, *views], len(header.blob) + at, header.digest)


@dataclass(frozen=True, slots=True)
class _Header:
    blob: bytes
    digest: str


def _seal_header(layout: dict[str, Any], *, payload: int) -> _Header:
    text = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
    step = 64 if payload < _SMALL_FILE else _PAGE
    text += b" " * (-(8 + len(text)) % step)
    blob = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128_hexdigest(blob)
    return _Header(blob[:_DIGEST_AT] + digest.encode() + blob[_DIGEST_END:], digest)


def _add_array(
    array: Array,
    stored: StoredArray,
    tensors: list[tuple[str, AnyArray, str]],
    notes: dict[str, str],
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
        frames = _compress(values, rows)
        bounds = np.cumsum([0, *map(len, frames)], dtype=np.int64)
        checks = np.array([xxhash.xxh3_64_intdigest(frame) for frame in frames], np.uint64)
        tensors.append((f"{name}#frames", bounds, "I64"))
        tensors.append((f"{name}#check", checks, "U64"))
        tensors.append((name, np.frombuffer(b"".join(frames), np.uint8), "U8"))
        return
    if values.nbytes > _CHECK_FROM:
        rows = max(1, math.ceil(_CHECK_BYTES / row_bytes))
        notes[f"check_rows:{name}"] = str(rows)
        tensors.append((f"{name}#check", _checks(values, rows * row_bytes), "U64"))
    tensors.append((name, values, code))


def _checks(values: AnyArray, step: int) -> AnyArray:
    view = flat(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(view), step)
    return np.fromiter((digest(view[at : at + step]) for at in starts), np.uint64, len(starts))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra(
            "zstd compression needs the package zstandard", fix='pip install "gradkeep[zstd]"'
        ) from error
    return zstandard


def _compress(values: AnyArray, rows: int) -> list[bytes]:
    compressor = _zstandard().ZstdCompressor(level=1)
    contiguous = np.ascontiguousarray(values)
    return [
        compressor.compress(contiguous[at : at + rows].tobytes())
        for at in range(0, len(contiguous), rows)
    ]


_verified: dict[tuple[object, ...], set[str]] = {}
"""What this process has already verified, by the identity of the file."""


class Segment:
    """A segment opened for reading; whatever is read is verified first, once per process."""

    def __init__(self, backend: Backend, key: str, *, verify: bool = True) -> None:
        self.key = key
        self.path = backend.describe(key)
        self._file: Readable = backend.open(key)
        try:
            self._verify = verify
            self._open_header()
        except BaseException:
            self._file.close()
            raise
        self._map: memoryview | None = None
        identity = (self.path, *self._file.identity)
        self._known = _verified.setdefault(identity, set()) if self._file.settled else set()
        self._small: dict[str, AnyArray] = {}

    def _open_header(self) -> None:
        head = self._file.read(0, 16384)
        length = int.from_bytes(head[:8], "little")
        if len(head) < _DIGEST_END or length > self._file.size - 8:
            raise self._damage("the header", "is cut off or not a segment's")
        if len(head) < 8 + length:
            head += self._file.read(len(head), 8 + length - len(head))
        head = head[: 8 + length]
        self.digest = head[_DIGEST_AT:_DIGEST_END].decode("ascii", "replace")
        zeroed = head[:_DIGEST_AT] + b"0" * 32 + head[_DIGEST_END:]
        if head[8:_DIGEST_AT] != _OPENING or xxhash.xxh3_128_hexdigest(zeroed) != self.digest:
            raise self._damage("the header", "does not fit its checksum")
        layout = json.loads(head[8:])
        self.metadata: dict[str, str] = layout.pop("__metadata__")
        base = 8 + length
        self.extents = {
            name: Extent(
                _DTYPES[item["dtype"]],
                tuple(item["shape"]),
                base + item["data_offsets"][0],
                base + item["data_offsets"][1],
            )
            for name, item in layout.items()
        }
        end = max((extent.stop for extent in self.extents.values()), default=base)
        if end != self._file.size:
            what = "is cut off" if end > self._file.size else "has bytes at its end"
            raise self._damage("the file", f"{what}: {self._file.size} bytes instead of {end}")

    @property
    def rows(self) -> int:
        """How many rows the segment holds."""
        return int(self.metadata["rows"])

    @property
    def first_row(self) -> int:
        """The position of its first row when it was written."""
        return int(self.metadata["first_row"])

    @property
    def schema_hash(self) -> str:
        """The schema it was written for."""
        return self.metadata["schema"]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def tensor(self, name: str) -> AnyArray:
        """A tensor as it is stored, mapped and verified; not to be written to."""
        return self._view(name, writeable=False)

    def writeable_tensor(self, name: str) -> AnyArray:
        """The same for torch, which wants memory that it may write; writes stay in this process."""
        return self._view(name, writeable=True)

    def _view(self, name: str, *, writeable: bool) -> AnyArray:
        if self._map is None:
            self._map = self._file.map()
        extent = self.extents[name]
        part = self._map[extent.start : extent.stop]
        if self._verify and name not in self._known:
            self._check_whole(name, part)
        values = np.frombuffer(part, extent.dtype).reshape(extent.shape)
        if not writeable:
            values.flags.writeable = False
        return values

    def small(self, name: str) -> AnyArray:
        """A small tensor read into memory and kept: ids, offsets, scales, checks."""
        if name not in self._small:
            extent = self.extents[name]
            data = self._file.read(extent.start, extent.stop - extent.start)
            if self._verify and name not in self._known:
                self._check_whole(name, memoryview(data))
            self._small[name] = np.frombuffer(data, extent.dtype).reshape(extent.shape)
        return self._small[name]

    def _check_whole(self, name: str, data: memoryview) -> None:
        if xxhash.xxh3_128_hexdigest(data) != self.metadata[f"xxh3:{name}"]:
            raise self._damage(f"tensor {name!r}", "does not fit its checksum")
        self._known.add(name)

    def values(self, array: Array) -> AnyArray:
        """All stored rows of an array `[R, *stored_shape]`: mapped, or decompressed."""
        if array.compression is None:
            return self.tensor(array.name)
        frames = self.small(f"{array.name}#frames")
        count = self._stored_rows(array)
        out = np.empty((count, *array.stored_shape), array.stored_dtype)
        data = flat(self.tensor(array.name))
        rows = int(self.metadata[f"frame_rows:{array.name}"])
        for index in range(len(frames) - 1):
            at = index * rows
            frame = data[frames[index] : frames[index + 1]]
            self._decompress(array, frame, out[at : at + rows])
        return out

    def _decompress(self, array: Array, frame: memoryview | bytes, out: AnyArray) -> None:
        raw = _zstandard().ZstdDecompressor().decompress(frame, max_output_size=out.nbytes)
        out[...] = np.frombuffer(raw, out.dtype).reshape(out.shape)

    def _stored_rows(self, array: Array) -> int:
        return int(self.small(f"{array.name}#offsets")[-1]) if array.ragged else self.rows

    def gather(self, array: Array, ranges: Sequence[tuple[int, int]], out: AnyArray) -> None:
        """Read the stored rows `[start, stop)` of each range, one after the other, into `out`.

        Reads only what it needs: one `preadv` per range, or per group of rows that share a check.
        """
        if array.compression is not None:
            self._gather_frames(array, ranges, out)
        elif not self._verify or array.name in self._known:
            self._gather_plain(array, ranges, out)
        elif f"check_rows:{array.name}" in self.metadata:
            self._gather_checked(array, ranges, out)
        else:
            values, at = self.small(array.name), 0
            for start, stop in ranges:
                out[at : at + stop - start] = values[start:stop]
                at += stop - start

    def _gather_plain(self, array: Array, ranges: Sequence[tuple[int, int]], out: AnyArray) -> None:
        size = _row_bytes(array)
        target, base = flat(out.reshape(-1).view(np.uint8)), self.extents[array.name].start
        read_into, at = self._file.read_into, 0
        for start, stop in ranges:
            count = (stop - start) * size
            read_into(target[at : at + count], base + start * size)
            at += count

    def _gather_checked(
        self, array: Array, ranges: Sequence[tuple[int, int]], out: AnyArray
    ) -> None:
        size = _row_bytes(array)
        group = int(self.metadata[f"check_rows:{array.name}"])
        checks = self.small(f"{array.name}#check")
        extent, step = self.extents[array.name], group * size
        target = flat(out.reshape(-1).view(np.uint8))
        digest, read_into = xxhash.xxh3_64_intdigest, self._file.read_into
        scratch, scratch_group, at = memoryview(bytearray(step)), -1, 0
        for start, stop in ranges:
            row = start
            while row < stop:
                index, within = divmod(row, group)
                first = extent.start + index * step
                length = min(step, extent.stop - first)
                until = min(stop, (index + 1) * group)
                count = (until - row) * size
                if count == length:
                    piece = target[at : at + count]
                    read_into(piece, first)
                elif index == scratch_group:
                    piece = scratch[:length]
                else:
                    piece = scratch[:length]
                    read_into(piece, first)
                if index != scratch_group and digest(piece) != checks[index]:
                    raise self._damage(
                        f"tensor {array.name!r}",
                        f"does not fit its check for rows from {index * group}",
                    )
                if count != length:
                    scratch_group = index
                    target[at : at + count] = piece[within * size : within * size + count]
                at += count
                row = until

    def _gather_frames(
        self, array: Array, ranges: Sequence[tuple[int, int]], out: AnyArray
    ) -> None:
        frames, checks = self.small(f"{array.name}#frames"), self.small(f"{array.name}#check")
        rows, total = int(self.metadata[f"frame_rows:{array.name}"]), self._stored_rows(array)
        base, opened, content, at = self.extents[array.name].start, -1, out[:0], 0
        for start, stop in ranges:
            row = start
            while row < stop:
                index, within = divmod(row, rows)
                if index != opened:
                    length = int(frames[index + 1] - frames[index])
                    frame = self._file.read(base + int(frames[index]), length)
                    if self._verify and xxhash.xxh3_64_intdigest(frame) != checks[index]:
                        raise self._damage(
                            f"tensor {array.name!r}", f"does not fit its check for frame {index}"
                        )
                    shape = (min(rows, total - index * rows), *array.stored_shape)
                    content, opened = np.empty(shape, array.stored_dtype), index
                    self._decompress(array, frame, content)
                until = min(stop, (index + 1) * rows)
                out[at : at + until - row] = content[within : within + until - row]
                at += until - row
                row = until

    def check_everything(self) -> list[Damaged]:
        """Every tensor that is not as it was written."""
        found = []
        mapped = self._file.map()
        for name, extent in self.extents.items():
            part = mapped[extent.start : extent.stop]
            if xxhash.xxh3_128_hexdigest(part) != self.metadata.get(f"xxh3:{name}"):
                found.append(self._damage(f"tensor {name!r}", "does not fit its checksum"))
        return found

    def close(self) -> None:
        """Let go of the file; arrays that were handed out stay valid."""
        self._file.close()
        self._map = None

    def _damage(self, part: str, what: str) -> Damaged:
        return Damaged(
            f"{part} {what}",
            path=self.path,
            fix="`gradkeep verify STORE --repair` moves the file aside; "
            "run the work again to recreate it",
        )


def _row_bytes(array: Array) -> int:
    return array.stored_dtype.itemsize * math.prod(array.stored_shape)
