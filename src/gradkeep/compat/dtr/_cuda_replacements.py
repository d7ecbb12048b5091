"""Replacements of CUDA functions that the prototype's scripts use, for machines without CUDA.

`.cuda()` leaves a tensor where it is, events use the system clock, and allocated memory is the live bytes
of the active budget. With CUDA nothing is replaced.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.compat.dtr._prototype import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClockEvent:
    """Replacement of `torch.cuda.Event` by the system clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, *_: Any) -> None:
        """Record the current time."""
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, end: ClockEvent) -> float:
        """Return the milliseconds from this event to another."""
        return (end._seconds - self._seconds) * 1e3


def _return_self(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _live_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live_bytes()


def _peak_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live.peak


def _reset_peak(*_: Any, **__: Any) -> None:
    if STATE.online is not None:
        STATE.online.reset_peak()


def cuda_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and replacement of each function."""
    if torch.cuda.is_available():
        return
    yield torch.Tensor, "cuda", _return_self
    yield torch.nn.Module, "cuda", _return_self
    yield torch.cuda, "Event", ClockEvent
    yield torch.cuda, "synchronize", _do_nothing
    yield torch.cuda, "memory_allocated", _live_bytes
    yield torch.cuda, "max_memory_allocated", _peak_bytes
    yield torch.cuda, "reset_max_memory_allocated", _reset_peak
    yield torch.cuda, "reset_peak_memory_stats", _reset_peak
