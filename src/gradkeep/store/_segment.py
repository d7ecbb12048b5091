"""Reading one segment: what is handed out was verified first, once per process."""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep.store._backend import flat
from gradkeep.store._batch import Column
from gradkeep.store._gather import CheckedRows, Extent, Frames, damaged, gather_plain
from gradkeep.store._layout import (
    DIGEST_AT,
    DIGEST_END,
    DTYPES,
    OPENING,
    block_digests,
    tensor_digest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.errors import Damaged
    from gradkeep.store._backend import Backend, Readable
    from gradkeep.store._encoding import AnyArray
    from gradkeep.store._gather import Pick
    from gradkeep.store._schema import Array

_verified: dict[tuple[object, ...], set[tuple[str, int]]] = {}
"""The blocks of tensors that this process has already verified, by the identity of the file."""

_ALL = -1  # the block number that stands for all blocks of a tensor


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
        self._checked: dict[str, CheckedRows] = {}
        self._digests: dict[str, tuple[int, list[str]]] = {}

    def _open_header(self) -> None:
        head = self._file.read(0, min(16384, self._file.size))
        length = int.from_bytes(head[:8], "little")
        if len(head) < DIGEST_END or length > self._file.size - 8:
            raise self._damage("the header", "is cut off or not a segment's")
        if len(head) < 8 + length:
            head += self._file.read(len(head), 8 + length - len(head))
        head = head[: 8 + length]
        self.digest = head[DIGEST_AT:DIGEST_END].decode("ascii", "replace")
        zeroed = head[:DIGEST_AT] + b"0" * 32 + head[DIGEST_END:]
        if head[8:DIGEST_AT] != OPENING or xxhash.xxh3_128_hexdigest(zeroed) != self.digest:
            raise self._damage("the header", "does not fit its checksum")
        layout = json.loads(head[8:])
        self.metadata: dict[str, str] = layout.pop("__metadata__")
        self._layout: dict[str, Any] = layout
        self._base = 8 + length
        end = self._base + max((item["data_offsets"][1] for item in layout.values()), default=0)
        if end != self._file.size:
            what = "is cut off" if end > self._file.size else "has bytes at its end"
            raise self._damage("the file", f"{what}: {self._file.size} bytes instead of {end}")

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """Where each tensor lies; worked out when asked for, as a scan needs only the header."""
        return {
            name: Extent(
                DTYPES[item["dtype"]],
                tuple(item["shape"]),
                self._base + item["data_offsets"][0],
                self._base + item["data_offsets"][1],
            )
            for name, item in self._layout.items()
        }

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

    def read_ahead(self, names: Sequence[str]) -> None:
        """Map the file and have the tensors of these names read in now."""
        extents = (self.extents[name] for name in names)
        self._map = self._file.map([(extent.start, extent.stop) for extent in extents])

    def view(self, name: str, start: int = 0, stop: int | None = None) -> AnyArray:
        """Rows `[start, stop)` of a tensor as stored, mapped and verified, without a copy.

        The memory is private to the process: torch may take it, and writes never reach the file.
        """
        if self._map is None:
            self._map = self._file.map()
        extent = self.extents[name]
        stop = extent.shape[0] if stop is None else stop
        part = self._map[extent.start : extent.stop]
        row_bytes = len(part) // extent.shape[0] if extent.shape[0] else 0
        low, high = start * row_bytes, stop * row_bytes
        if self._verify and (name, _ALL) not in self._known:
            self._check_blocks(name, part, low, high)
        values = np.frombuffer(part[low:high], extent.dtype)
        return values.reshape(stop - start, *extent.shape[1:])

    def small(self, name: str) -> AnyArray:
        """A small tensor read into memory and kept: ids, offsets, scales, checks."""
        if name not in self._small:
            extent = self.extents[name]
            data = self._file.read(extent.start, extent.stop - extent.start)
            if self._verify and (name, _ALL) not in self._known:
                self._check_blocks(name, memoryview(data), 0, len(data))
            self._small[name] = np.frombuffer(data, extent.dtype).reshape(extent.shape)
        return self._small[name]

    def _check_blocks(self, name: str, data: memoryview, low: int, high: int) -> None:
        """Verify the blocks of a tensor that hold its bytes `[low, high)`."""
        step, digests = self._blocks(name, len(data))
        last = max(low, high - 1)
        for index in range(low // step, min(len(digests), last // step + 1)):
            if (name, index) in self._known:
                continue
            block = data[index * step : (index + 1) * step]
            if xxhash.xxh3_128_hexdigest(block) != digests[index]:
                raise self._damage(f"tensor {name!r}", "does not fit its checksum")
            self._known.add((name, index))
        if low == 0 and high == len(data):
            self._known.add((name, _ALL))

    def _blocks(self, name: str, size: int) -> tuple[int, list[str]]:
        """The bytes of a block of the tensor, and the digest of each."""
        if name not in self._digests:
            noted = self.metadata.get(f"blocks:{name}")
            if noted is None:
                self._digests[name] = (max(1, size), [self.metadata[f"xxh3:{name}"]])
            else:
                step, _, joined = noted.partition(":")
                digests = [joined[at : at + 32] for at in range(0, len(joined), 32)]
                self._digests[name] = (int(step), digests)
        return self._digests[name]

    def values(self, array: Array, start: int, stop: int) -> AnyArray:
        """Stored rows `[start, stop)` of an array: mapped, or decompressed."""
        if array.compression is None:
            return self.view(array.name, start, stop)
        out = np.empty((stop - start, *array.stored_shape), array.stored_dtype)
        self.gather(array, [(start, stop, 0)], out)
        return out

    def column(self, array: Array, start: int = 0, stop: int | None = None) -> Column:
        """The rows `[start, stop)` of an array, as stored."""
        stop = self.rows if stop is None else stop
        offsets = None
        if array.ragged:
            bounds = self.small(f"{array.name}#offsets")[start : stop + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            offsets = bounds - start
        scale = self.small(f"{array.name}#scale")[start:stop] if array.scaled else None
        return Column(array, self.values(array, start, stop), scale, offsets)

    def _stored_rows(self, array: Array) -> int:
        return int(self.small(f"{array.name}#offsets")[-1]) if array.ragged else self.rows

    def gather(self, array: Array, picks: Sequence[Pick], out: AnyArray) -> None:
        """Read stored rows `[start, stop)` of each pick to row `at` of `out`, verified.

        Reads only what it needs: one `preadv` per pick, or per group of rows that share a check.
        """
        name, size = array.name, _row_bytes(array)
        target = flat(out.reshape(-1).view(np.uint8))
        if array.compression is not None:
            self._frames(array).gather(picks, out)
        elif not self._verify or (name, _ALL) in self._known:
            gather_plain(self._file, self.extents[name], size, picks, target)
        elif f"check_rows:{name}" in self.metadata:
            self._checks(name, size).gather(picks, target)
        else:
            values = self.small(name)
            for start, stop, at in picks:
                out[at : at + stop - start] = values[start:stop]

    def _checks(self, name: str, size: int) -> CheckedRows:
        if name not in self._checked:
            group = int(self.metadata[f"check_rows:{name}"])
            # A list: comparing plain integers is several times faster than numpy's.
            checks = self.small(f"{name}#check").tolist()
            extent = self.extents[name]
            self._checked[name] = CheckedRows(
                self._file, self.path, name, extent, size, group, checks
            )
        return self._checked[name]

    def _frames(self, array: Array) -> Frames:
        name = array.name
        return Frames(
            file=self._file,
            path=self.path,
            name=name,
            start=self.extents[name].start,
            bounds=self.small(f"{name}#frames").tolist(),
            checks=self.small(f"{name}#check").tolist() if self._verify else None,
            rows=int(self.metadata[f"frame_rows:{name}"]),
            total=self._stored_rows(array),
        )

    def check_everything(self) -> list[Damaged]:
        """Every tensor that is not as it was written."""
        found = []
        mapped = self._file.map()
        for name, extent in self.extents.items():
            part = mapped[extent.start : extent.stop]
            if tensor_digest(block_digests(part, extent.shape[0])) != self.metadata.get(
                f"xxh3:{name}"
            ):
                found.append(self._damage(f"tensor {name!r}", "does not fit its checksum"))
        return found

    def close(self) -> None:
        """Let go of the file; arrays that were handed out stay valid."""
        self._file.close()
        self._map = None

    def _damage(self, part: str, what: str) -> Damaged:
        return damaged(self.path, part, what)


def _row_bytes(array: Array) -> int:
    return array.stored_dtype.itemsize * math.prod(array.stored_shape)
