"""Single rows out of a segment: read by position, checked group by group.

Cold rows read through a map cost fifty times more than `preadv`: each fault reads far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gradkeep.errors import Damaged
from gradkeep.store._zstd import decompress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store._backend import Readable
    from gradkeep.store._encoding import AnyArray

Pick = tuple[int, int, int]
"""Stored rows `[start, stop)` that go to row `at` of the result."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def damaged(path: str, part: str, what: str) -> Damaged:
    """The error for a part of a segment that is not as it was written."""
    return Damaged(
        f"{part} {what}",
        path=path,
        fix="`gradkeep verify STORE --repair` moves the file aside; "
        "run the work again to recreate it",
    )


def gather_plain(
    file: Readable, extent: Extent, size: int, picks: Sequence[Pick], target: memoryview
) -> None:
    """Rows of `size` bytes that need no check, because their tensor was verified before."""
    read_into, base = file.read_into, extent.start
    for start, stop, at in picks:
        read_into(target[at * size : (at + stop - start) * size], base + start * size)


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """The rows of one tensor with an xxh3-64 for every group of them."""

    file: Readable
    path: str
    name: str
    extent: Extent
    size: int
    """Bytes of a row."""
    group: int
    """Rows that share a check."""
    checks: list[int]

    def gather(self, picks: Sequence[Pick], target: memoryview) -> None:
        """Read whole groups, check them, and keep the rows that were picked."""
        size, group = self.size, self.group
        kept, piece = -1, target[:0]
        for start, stop, at in picks:
            row, to = start, at * size
            while row < stop:
                index, within = divmod(row, group)
                until = min(stop, (index + 1) * group)
                count = (until - row) * size
                whole = min(
                    group * size, self.extent.stop - self.extent.start - index * group * size
                )
                if count == whole:
                    self._read(index, target[to : to + count])
                else:
                    if index != kept:
                        piece = memoryview(bytearray(whole))
                        self._read(index, piece)
                        kept = index
                    target[to : to + count] = piece[within * size : within * size + count]
                to += count
                row = until

    def _read(self, index: int, buffer: memoryview) -> None:
        self.file.read_into(buffer, self.extent.start + index * self.group * self.size)
        if xxhash.xxh3_64_intdigest(buffer) != self.checks[index]:
            what = f"does not fit its check for the rows from {index * self.group}"
            raise damaged(self.path, f"tensor {self.name!r}", what)


@dataclass(frozen=True, slots=True)
class Frames:
    """The compressed rows of one tensor."""

    file: Readable
    path: str
    name: str
    start: int
    bounds: list[int]
    checks: list[int] | None
    """An xxh3-64 for every frame; None if reads are not verified."""
    rows: int
    """Rows of a frame; the last has fewer."""
    total: int

    def gather(self, picks: Sequence[Pick], out: AnyArray) -> None:
        """Unpack the frames that hold the picked rows, each run of neighbours once."""
        opened, content = -1, out[:0]
        for start, stop, at in picks:
            row = start
            while row < stop:
                index, within = divmod(row, self.rows)
                if index != opened:
                    shape = (min(self.rows, self.total - index * self.rows), *out.shape[1:])
                    content, opened = np.empty(shape, out.dtype), index
                    decompress(self._frame(index), content)
                until = min(stop, (index + 1) * self.rows)
                out[at : at + until - row] = content[within : within + until - row]
                at += until - row
                row = until

    def _frame(self, index: int) -> bytes:
        low, high = self.bounds[index], self.bounds[index + 1]
        frame = self.file.read(self.start + low, high - low)
        if self.checks is not None and xxhash.xxh3_64_intdigest(frame) != self.checks[index]:
            what = f"does not fit its check for frame {index}"
            raise damaged(self.path, f"tensor {self.name!r}", what)
        return frame
