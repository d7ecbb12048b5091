"""What the prototype's scripts ask of CUDA, answered on a machine without it.

Their `.cuda()` leaves a tensor where it is, their events are a clock, and the memory that they ask for
is the live bytes of the budget in force. Where CUDA is there, nothing is replaced.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.compat.dtr._prototype import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClockEvent:
    """As `torch.cuda.Event`, by the clock of the machine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def record(self, *_: Any) -> None:
        """Now."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """It is done already."""

    def elapsed_time(self, end: ClockEvent) -> float:
        """Milliseconds from this to the other."""
        return (end._at - self._at) * 1e3


def _same(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _live_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live_bytes()


def _most_bytes(*_: Any, **__: Any) -> int:
    return 0 if STATE.online is None else STATE.online.live.peak


def _count_anew(*_: Any, **__: Any) -> None:
    if STATE.online is not None:
        STATE.online.reset_peak()


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of each."""
    if torch.cuda.is_available():
        return
    yield torch.Tensor, "cuda", _same
    yield torch.nn.Module, "cuda", _same
    yield torch.cuda, "Event", ClockEvent
    yield torch.cuda, "synchronize", _nothing
    yield torch.cuda, "memory_allocated", _live_bytes
    yield torch.cuda, "max_memory_allocated", _most_bytes
    yield torch.cuda, "reset_max_memory_allocated", _count_anew
    yield torch.cuda, "reset_peak_memory_stats", _count_anew
