"""Being asked to stop: once means finish what you do, twice means now."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Stop:
    """How often, and by which signal, somebody asked to stop."""

    times: int = 0
    number: int | None = None

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.times > 0

    @property
    def at_once(self) -> bool:
        """Whether not even to finish."""
        return self.times > 1

    def raise_if_asked(self) -> None:
        """End as the signal would have ended us, after all was put in order."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(*, raise_second: bool = False) -> Iterator[Stop]:
    """Count interrupts and terminations instead of dying of them; the main thread gets them.

    With `raise_second` the second one interrupts whatever runs, as it would have without us.
    """
    stop = Stop()

    def note(number: int, _: Any) -> None:
        stop.times += 1
        stop.number = number
        if raise_second and stop.at_once:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
