"""Rows of numbers that are written once and read in blocks, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int64]]


class KeptRows:
    """Rows `[count, dim]` float32: in memory up to `limit` bytes, else in a file without a name.

    The file is gone with the object, and what is read of it is a copy: no page of it stays mapped.

    >>> rows = KeptRows(3, 2, limit=0)
    >>> rows.put(0, torch.arange(6.0).view(3, 2))
    >>> rows.part(1, 3)
    tensor([[2., 3.],
            [4., 5.]])
    """

    def __init__(self, count: int, dim: int, *, limit: int) -> None:
        self.count, self.dim = count, dim
        self._held = torch.empty(count, dim) if 4 * count * dim <= limit else None
        self._file = -1
        if self._held is None:
            with tempfile.TemporaryFile(prefix="gradkeep-rows-") as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)

    @classmethod
    def of(cls, values: torch.Tensor) -> KeptRows:
        """Those of an array that is there."""
        made = cls(0, values.shape[1], limit=1)
        made.count, made._held = len(values), values
        return made

    @property
    def held(self) -> bool:
        """Whether they are in memory."""
        return self._held is not None

    def put(self, start: int, values: torch.Tensor) -> None:
        """Write rows from `start` on."""
        if self._held is not None:
            self._held[start : start + len(values)] = values
            return
        left = _bytes(values.float().contiguous())
        at = 4 * self.dim * start
        while left:  # one call writes up to two gigabytes
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`."""
        if self._held is not None:
            return self._held[start:stop]
        found = torch.empty(stop - start, self.dim)
        left = _bytes(found)
        at = 4 * self.dim * start
        while left:
            taken = os.preadv(self._file, [left], at)
            assert taken, "rows were read that were never written"
            left, at = left[taken:], at + taken
        return found

    def read(self, ids: Ids) -> torch.Tensor:
        """The rows `[len(ids), k]` with these numbers; neighbours are read together."""
        if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1:
            return self.part(int(ids[0]), int(ids[-1]) + 1)
        return torch.cat([self.part(int(at), int(at) + 1) for at in ids] or [self.part(0, 0)])


def _bytes(values: torch.Tensor) -> memoryview:
    flat: Any = values.view(-1).numpy()
    return memoryview(flat).cast("B")
