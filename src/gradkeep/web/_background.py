"""Background tasks of the web UI: each result is computed once and cached within a byte limit."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gradkeep.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Report = Callable[[int, int], None]

T = TypeVar("T")
Lane = Literal["quick", "long"]
"""Each lane has a worker thread, so that trainings do not delay scores."""

_MIN_RESULT_BYTES = 16 << 10


class BusyError(Exception):
    """Raised instead of returning a result that is still being computed."""

    def __init__(self, what: str, done: int, total: int) -> None:
        super().__init__(what)
        self.what, self.done, self.total = what, done, total


@dataclass(slots=True, eq=False)
class _Task:
    what: str
    compute: Callable[[Report], Any] | None
    size: Callable[[Any], int]
    done: int = 0
    total: int = 0
    finished: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    failure: BaseException | None = None
    failed_at: float = 0.0
    nbytes: int = _MIN_RESULT_BYTES

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def run(self) -> None:
        assert self.compute is not None
        try:
            self.result = self.compute(self.report)
            self.nbytes = max(_MIN_RESULT_BYTES, self.size(self.result))
        except Exception as error:  # raised again by `TaskCache.get`
            self.failure, self.failed_at = error, time.monotonic()
        self.compute = None  # free what it refers to
        self.finished.set()


class TaskCache:
    """Results of background tasks by key; the least recently used are evicted first."""

    def __init__(self, *, max_bytes: int = 24 << 20) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tasks: OrderedDict[Hashable, _Task] = OrderedDict()
        self._waiting: dict[Lane, list[_Task]] = {"quick": [], "long": []}
        self._running: set[Lane] = set()

    def get(
        self,
        key: Hashable,
        what: str,
        compute: Callable[[Report], T],
        *,
        size: Callable[[T], int] = lambda _: _MIN_RESULT_BYTES,
        lane: Lane = "quick",
        timeout: float = 0.12,
        start: bool = True,
    ) -> T:
        """Return the result under `key`, or raise `BusyError` after `timeout` seconds.

        An exception of `compute(report)` is raised here. With `start=False`, only a task that was
        started before is waited for.
        """
        with self._lock:
            task = self._tasks.get(key)
            if task is not None and task.failure is not None:
                # A failure is reported again for five seconds before the task is retried.
                task = task if time.monotonic() - task.failed_at <= 5 else None
            if task is None:
                if not start:
                    raise StoreError(
                        "this task was not started",
                        code="web.unknown_task",
                        fix="start it on the page",
                    )
                if len(self._waiting[lane]) >= 64:
                    raise StoreError(
                        "the server is busy", code="web.busy", fix="wait for the running tasks"
                    )
                task = self._tasks[key] = _Task(what, compute, size)
                self._waiting[lane].append(task)
                if lane not in self._running:
                    self._running.add(lane)
                    # A daemon, so that stopping the server does not wait for a training.
                    threading.Thread(target=self._work, args=(lane,), daemon=True).start()
            self._tasks.move_to_end(key)
        if not task.finished.wait(timeout):
            raise BusyError(task.what, task.done, task.total)
        if task.failure is not None:
            raise task.failure
        result: T = task.result
        return result

    def peek(self, key: Hashable) -> Any:
        """Return the result under `key` if it is ready, else None; nothing is started."""
        with self._lock:
            task = self._tasks.get(key)
        ready = task is not None and task.finished.is_set() and task.failure is None
        return task.result if ready and task is not None else None

    def is_running(self, key: Hashable) -> bool:
        """Return True while the task under `key` waits or runs."""
        with self._lock:
            task = self._tasks.get(key)
        return task is not None and not task.finished.is_set()

    def forget(self, key: Hashable) -> None:
        """Drop a finished result, so that it is computed anew."""
        with self._lock:
            if key in self._tasks and self._tasks[key].finished.is_set():
                del self._tasks[key]

    def _work(self, lane: Lane) -> None:
        while True:
            with self._lock:
                if not self._waiting[lane]:
                    self._running.discard(lane)
                    return
                task = self._waiting[lane].pop(0)
            task.run()
            del task
            self._evict()

    def _evict(self) -> None:
        with self._lock:
            finished = [key for key, task in self._tasks.items() if task.finished.is_set()]
            total = sum(self._tasks[key].nbytes for key in finished)
            for key in finished[:-1]:  # the newest stays, however large
                if total <= self._max_bytes:
                    return
                total -= self._tasks.pop(key).nbytes
