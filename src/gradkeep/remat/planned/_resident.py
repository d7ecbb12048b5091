"""Limit the resident memory of a training step, as the operating system reports it.

The C library keeps freed blocks for later allocations, and with aligned blocks it often cannot use them
again: resident memory grows to two or three times the bytes of live tensors. A `ResidentLimit` reads the
resident memory whenever autograd saves or requests a tensor, and returns freed blocks to the system before
it would exceed its limit. A page that was returned costs a page fault when it is used again, so blocks are
returned only then.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass, field
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
_LARGEST_HEAP_BLOCK = 32 * 2**20
"""glibc's own upper limit of its mmap threshold; larger blocks are returned as soon as they are freed."""
_LARGEST_OPTION = 2**31 - 1
"""Largest value that mallopt accepts."""


@functools.cache
def _c_library() -> Any:
    """Return the C library if it can return freed memory and the kernel shows resident memory, or None."""
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (AttributeError, OSError):
        return None
    return library if os.path.exists("/proc/self/statm") else None


def can_limit_resident_memory() -> bool:
    """Return True on Linux with glibc."""
    return _c_library() is not None


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _open_statm(process: int) -> int:
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def read_resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(os.pread(_open_statm(os.getpid()), 64, 0).split()[1]) * _PAGE_SIZE


def return_freed_memory() -> int:
    """Return freed blocks to the system; return the resident memory afterwards."""
    _c_library().malloc_trim(0)
    return read_resident_bytes()


def hold_freed_memory() -> None:
    """Stop glibc from returning freed memory on its own: that costs page faults where nothing is gained."""
    _c_library().mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    _c_library().mallopt(_M_TRIM_THRESHOLD, _LARGEST_OPTION)


def release_hold() -> None:
    """Let glibc return freed memory again, at the threshold that it reaches after freeing large blocks."""
    _c_library().mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_HEAP_BLOCK)


@dataclass(slots=True, eq=False)
class ResidentLimit:
    """Largest rise of resident memory in the steps of one plan."""

    rise: int
    """Allowed bytes over the resident memory at the beginning of a step."""
    growth: list[int] = field(default_factory=list)
    """Bytes allocated after each check of a step; replaced by larger growth of resident memory."""
    peak: int = 0
    """Largest rise seen in any step."""
    latest: int = 0
    """Largest rise seen in the latest step."""
    was_exceeded: bool = False
    """The step before exceeded the limit."""
    excess_is_known: bool = False
    """The limit cannot be met, and the user was told."""
    trims: int = 0
    """Number of times that freed memory was returned."""
    _limit: int = 0
    _event: int = 0
    _last: int = 0
    _next_trim: int = 0
    _least_gain: int = 0

    @property
    def is_exceeded(self) -> bool:
        """Return True if the latest step exceeded the limit by more than 5 %."""
        return not self.excess_is_known and self.latest > 1.05 * self.rise

    def begin(self, start: int) -> None:
        """Begin a step whose resident memory was `start` bytes before it."""
        self._limit = start + self.rise
        self._event = self._next_trim = self.latest = 0
        self._least_gain = self.rise // 32
        self._last = read_resident_bytes()

    def check(self) -> None:
        """Return freed memory if resident memory may exceed the limit before the next check."""
        now, event, growth = read_resident_bytes(), self._event, self.growth
        if event and now - self._last > growth[event - 1]:
            growth[event - 1] = now - self._last
        if event == len(growth):
            growth.append(0)
        if now + growth[event] > self._limit and now > self._next_trim:
            before, now = now, return_freed_memory()
            self.trims += 1
            if before - now < self._least_gain:
                self._least_gain *= 2  # the rest is alive: try less often
            self._next_trim = now + self._least_gain
        self._event, self._last = event + 1, now
        self.latest = max(self.latest, now - self._limit + self.rise)
        self.peak = max(self.peak, self.latest)
