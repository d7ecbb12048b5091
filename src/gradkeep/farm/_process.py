"""What a process may do: how it is asked to stop, and how many threads it uses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


_NUMBER_VARIABLE = "GRADKEEP_WORKER"

_changing_environment = threading.Lock()
"""Runs in several threads would else take each other's numbers for what was there before."""


@dataclass(slots=True)
class StopRequest:
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
def stop_on_signals(*, raise_from: int | None = None) -> Iterator[StopRequest]:
    """Count interrupts and terminations instead of dying of them; the main thread gets them.

    The `raise_from`-th one and later ones interrupt whatever runs, as they would have without us.
    """
    stop = StopRequest()

    def note(number: int, _: Any) -> None:
        stop.times += 1
        stop.number = number
        if raise_from is not None and stop.times >= raise_from:
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


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def environment(threads: int, worker: int = 0) -> Iterator[None]:
    """Processes that are started in this context find both numbers in their environment."""
    with _changing_environment:
        names = (*_THREAD_VARIABLES, _NUMBER_VARIABLE)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        os.environ[_NUMBER_VARIABLE] = str(worker)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def worker_number() -> int:
    """Which of the workers on this machine this process is, from 0 on: by it a job takes a device.

    >>> worker_number()
    0
    """
    for name in (_NUMBER_VARIABLE, "SLURM_LOCALID"):
        found = os.environ.get(name, "")
        if found.isdecimal():
            return int(found)
    return 0


def pin(threads: int) -> None:
    """Use so many threads in this process, also if torch is loaded already."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
