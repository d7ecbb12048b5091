"""Limit the resident memory of a training step, as the operating system reports it.

Allocators keep freed blocks for later allocations, and glibc often cannot use aligned blocks again: resident
memory grows to two or three times the bytes of live tensors. A `ResidentLimit` reads the resident memory
whenever autograd saves or requests a tensor, and returns freed blocks to the system before it would exceed
its limit. A page that was returned costs a page fault when it is used again, so blocks are returned only
then. jemalloc reuses freed blocks and needs this less often.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
from dataclasses import dataclass, field
from typing import Any


class _Allocator(abc.ABC):
    """Control of the allocator of this process."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @abc.abstractmethod
    def return_freed(self) -> None:
        """Return freed blocks to the system."""

    @abc.abstractmethod
    def hold_freed(self) -> None:
        """Stop returning freed blocks without being asked: it costs page faults where nothing is gained."""

    @abc.abstractmethod
    def release_hold(self) -> None:
        """Return freed blocks again when the allocator sees fit."""


class _Glibc(_Allocator):
    _TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt
    _LARGEST_HEAP_BLOCK = 32 * 2**20  # glibc's own upper limit of its mmap threshold, in bytes

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]

    def return_freed(self) -> None:
        self._library.malloc_trim(0)

    def hold_freed(self) -> None:
        self._library.mallopt(self._MMAP_THRESHOLD, self._LARGEST_HEAP_BLOCK)
        self._library.mallopt(self._TRIM_THRESHOLD, 2**31 - 1)

    def release_hold(self) -> None:
        # The threshold that glibc itself reaches after freeing a block of 32 MiB.
        self._library.mallopt(self._TRIM_THRESHOLD, 2 * self._LARGEST_HEAP_BLOCK)


class _Jemalloc(_Allocator):
    _ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.mallctl.argtypes = [ctypes.c_char_p, pointer, pointer, pointer, size]
        self._decays: dict[bytes, int] = {}

    def return_freed(self) -> None:
        self._library.mallctl(b"arena.%d.purge" % self._ALL_ARENAS, None, None, None, 0)

    def hold_freed(self) -> None:
        arenas = ctypes.c_uint()
        self._exchange(b"arenas.narenas", arenas)
        for number in range(arenas.value):
            for kind in (b"dirty", b"muzzy"):
                name, decay = b"arena.%d.%s_decay_ms" % (number, kind), ctypes.c_ssize_t()
                if self._exchange(name, decay, ctypes.c_ssize_t(-1)):
                    self._decays[name] = decay.value

    def release_hold(self) -> None:
        for name, decay in self._decays.items():
            self._exchange(name, ctypes.c_ssize_t(), ctypes.c_ssize_t(decay))
        self._decays.clear()

    def _exchange(self, name: bytes, old: Any, new: Any = None) -> bool:
        """Read a setting into `old` and replace it by `new`; return False if there is no such setting."""
        size = ctypes.c_size_t(ctypes.sizeof(old))
        written = (None, 0) if new is None else (ctypes.byref(new), ctypes.sizeof(new))
        code = self._library.mallctl(name, ctypes.byref(old), ctypes.byref(size), *written)
        return bool(code == 0)


@functools.cache
def _allocator() -> _Allocator | None:
    """Return the control of the allocator, or None if it or the kernel's counters are unknown."""
    if not os.path.exists("/proc/self/statm"):
        return None
    library = ctypes.CDLL(None)
    if hasattr(library, "mallctl"):  # jemalloc replaced malloc when the process started
        return _Jemalloc(library)
    return _Glibc(library) if hasattr(library, "malloc_trim") else None


def can_limit_resident_memory() -> bool:
    """Return True on Linux with glibc or jemalloc."""
    return _allocator() is not None


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _open_statm(process: int) -> int:
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def read_resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(os.pread(_open_statm(os.getpid()), 64, 0).split()[1]) * _PAGE_SIZE


def return_freed_memory() -> int:
    """Return freed blocks to the system; return the resident memory afterwards."""
    allocator = _allocator()
    assert allocator is not None
    allocator.return_freed()
    return read_resident_bytes()


def hold_freed_memory() -> None:
    """Keep freed blocks until `return_freed_memory` or `release_hold`."""
    allocator = _allocator()
    assert allocator is not None
    allocator.hold_freed()


def release_hold() -> None:
    """Let the allocator return freed memory on its own again."""
    allocator = _allocator()
    assert allocator is not None
    allocator.release_hold()


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
        self.latest = max(self.latest, now - self._limit + self.rise)
        self.peak = max(self.peak, self.latest)
        if event and now - self._last > growth[event - 1]:
            growth[event - 1] = now - self._last
        if event == len(growth):
            growth.append(0)
        if now + growth[event] > self._limit and now > self._next_trim:
            before, now = now, return_freed_memory()
            self.trims += 1
            if before - now < self._least_gain:
                # The rest is alive: try less often, but below the limit soon enough to stay there.
                most = self.rise // 16 if now <= self._limit else 2 * self._least_gain
                self._least_gain = min(2 * self._least_gain, most)
            self._next_trim = now + self._least_gain
        self._event, self._last = event + 1, now
