"""Work that takes longer than an answer may: done once, in the background, and kept in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gradkeep.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


T = TypeVar("T")
Lane = Literal["quick", "long"]
"""Trainings must not keep a person from seeing scores: each lane has a thread of its own."""

_PATIENCE = 0.12
"""Seconds that an answer waits for its work before it says that it is under way."""
_SMALL = 16 << 10


class StillWorking(Exception):
    """Raised in place of an answer whose work is under way."""

    def __init__(self, what: str, done: int, total: int) -> None:
        super().__init__(what)
        self.what, self.done, self.total = what, done, total


@dataclass(slots=True, eq=False)
class _Work:
    what: str
    make: Callable[[Callable[[int, int], None]], Any] | None
    size: Callable[[Any], int]
    done: int = 0
    total: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    failure: BaseException | None = None
    failed_at: float = 0.0
    bytes: int = _SMALL

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total


class Desk:
    """Answers by key: worked out once, kept while there is room, the oldest going first."""

    def __init__(self, *, most_bytes: int = 24 << 20) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Work] = OrderedDict()
        self._waiting: dict[Lane, list[_Work]] = {"quick": [], "long": []}
        self._running: set[Lane] = set()

    def ask(
        self,
        key: Hashable,
        what: str,
        make: Callable[[Callable[[int, int], None]], T],
        *,
        size: Callable[[T], int] = lambda _: _SMALL,
        lane: Lane = "quick",
        patience: float = _PATIENCE,
        begin: bool = True,
    ) -> T:
        """The answer under `key`; raises `StillWorking` while `make(report)` is under way.

        What `make` raises is raised here, too, for some seconds; then it is tried again. Without
        `begin`, only what was begun is told of.
        """
        with self._lock:
            work = self._kept.get(key)
            stale = work is not None and work.failure is not None
            # Seconds for which a failure is told again without another try.
            if stale and time.monotonic() - work.failed_at > 5.0:  # type: ignore[union-attr]
                work = None
            if work is None:
                if not begin:
                    raise StoreError("this was not begun", fix="begin it on the page")
                if len(self._waiting[lane]) >= 64:
                    raise StoreError("the page is busy", fix="wait for what is under way")
                work = _Work(what, make, size)
                self._kept[key] = work
                self._waiting[lane].append(work)
                self._start(lane)
            self._kept.move_to_end(key)
        if not work.ended.wait(patience):
            raise StillWorking(work.what, work.done, work.total)
        if work.failure is not None:
            raise work.failure
        answer: T = work.result
        return answer

    def peek(self, key: Hashable) -> Any:
        """The answer under `key` if it is there, else None; nothing is begun."""
        with self._lock:
            work = self._kept.get(key)
        if work is None or not work.ended.is_set() or work.failure is not None:
            return None
        return work.result

    def is_under_way(self, key: Hashable) -> bool:
        """Whether work under `key` was begun and has not ended."""
        with self._lock:
            work = self._kept.get(key)
        return work is not None and not work.ended.is_set()

    def forget(self, key: Hashable) -> None:
        """Let an answer be worked out anew."""
        with self._lock:
            if key in self._kept and self._kept[key].ended.is_set():
                del self._kept[key]

    def _start(self, lane: Lane) -> None:
        if lane not in self._running:
            self._running.add(lane)
            # A daemon: whoever ends the server does not wait for a training.
            threading.Thread(target=self._run, args=(lane,), daemon=True).start()

    def _run(self, lane: Lane) -> None:
        while True:
            with self._lock:
                if not self._waiting[lane]:
                    self._running.discard(lane)
                    return
                work = self._waiting[lane].pop(0)
            try:
                assert work.make is not None
                work.result = work.make(work.report)
                work.bytes = max(_SMALL, work.size(work.result))
            except Exception as error:  # told to whoever asks
                work.failure = error
            work.make = None  # it holds what it was made with
            work.failed_at = time.monotonic()
            work.ended.set()
            del work
            self._make_room()

    def _make_room(self) -> None:
        with self._lock:
            ended = [key for key, work in self._kept.items() if work.ended.is_set()]
            total = sum(self._kept[key].bytes for key in ended)
            for key in ended[:-1]:  # the newest stays, however large
                if total <= self._most_bytes:
                    return
                total -= self._kept.pop(key).bytes
