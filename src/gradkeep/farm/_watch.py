"""Beside the job, in the same process: keeps its leases, notices when it hangs, obeys a stop."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Self

from gradkeep.errors import LeaseLost, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.farm._order import Order
    from gradkeep.store import Lease, Rows

_TICK = 0.25
_log = logging.getLogger("gradkeep")


class Watch:
    """Holds the leases of the batch that is computed now.

    `end` is called with a reason when the process must end: the job took too long, or did not
    finish within the grace after a stop. By then its rows are recorded or given back.
    """

    def __init__(
        self,
        order: Order,
        rows: Rows,
        *,
        end: Callable[[str], None],
        beat: Callable[[Sequence[Lease]], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._order, self._rows = order, rows
        self._end, self._beat, self._stopped = end, beat, stopped
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._since = self._renewed = self._stop_seen = 0.0
        self._allowed = math.inf
        self._closed = threading.Event()
        self._worker = threading.get_ident()
        self._thread = threading.Thread(target=self._loop, name="farm watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for lease in self._leases.values():  # of a batch that an exception left behind
            self._rows.release(lease)

    def hold(self, leases: Sequence[Lease]) -> None:
        """A batch begins."""
        with self._lock:
            self._leases = {lease.row: lease for lease in leases}
            self._since = self._renewed = time.monotonic()
            self._allow(len(leases))
            self._beat(leases)

    def begin_again(self, count: int) -> None:
        """The time for `count` rows begins anew."""
        with self._lock:
            self._allow(count)

    def computed(self) -> None:
        """The job returned: what follows is bounded by the disk, and must not be cut in two."""
        with self._lock:
            self._allowed = math.inf

    def let_go(self, row: int) -> Lease:
        """The newest lease of a row, which is the caller's to end from here on."""
        with self._lock:
            lease = self._leases.pop(row)
            self._beat([*self._leases.values(), lease])
            return lease

    def settled(self) -> None:
        """The row that was let go is done or recorded."""
        with self._lock:
            self._beat(list(self._leases.values()))

    @property
    def seconds(self) -> float:
        """How long the batch has taken so far."""
        return time.monotonic() - self._since

    def _allow(self, count: int) -> None:
        timeout = math.inf if self._order.timeout is None else self._order.timeout
        self._allowed = time.monotonic() + timeout * count

    def _loop(self) -> None:
        while not self._closed.wait(_TICK):
            if self._stopped() and not self._stop_seen:
                self._stop_seen = time.monotonic()
            with self._lock:
                if self._leases:
                    self._look()

    def _look(self) -> None:
        now, order = time.monotonic(), self._order
        if now > self._allowed:
            self._give_up_on_job()
        elif self._stop_seen and now - self._stop_seen > order.grace:
            for lease in self._leases.values():
                self._rows.release(lease)
            self._end("stopped")
        elif now - self._renewed > order.lease_seconds / 3:
            self._renewed = now
            for row, lease in self._leases.items():
                # Taken over, or a disk that is full for now: the row has one winner anyway, and a
                # later beat may succeed.
                try:
                    self._leases[row] = self._rows.renew(lease, seconds=order.lease_seconds)
                except (LeaseLost, StoreError, OSError) as error:
                    _log.info("row %d: %s", row, error)
            self._beat(list(self._leases.values()))

    def _give_up_on_job(self) -> None:
        frame = sys._current_frames().get(self._worker)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = (
            f"Traceback (most recent call last):\n{stack}"
            f"TimeoutError: {describe_rows(list(self._leases))} took longer than "
            f"{self._order.timeout:g} s each"
        )
        for lease in self._leases.values():
            with contextlib.suppress(StoreError, OSError):
                self._rows.fail(lease, text)
        self._end("timeout")


def describe_rows(rows: Sequence[int]) -> str:
    """For messages: a few of the rows, and how many there are.

    >>> describe_rows([7]), describe_rows([1, 2, 3, 4, 5, 6, 7])
    ('row 7', 'rows 1, 2, 3, 4, 5 ... (7 in all)')
    """
    if len(rows) == 1:
        return f"row {rows[0]}"
    few = ", ".join(map(str, rows[:5]))
    return f"rows {few} ... ({len(rows)} in all)" if len(rows) > 5 else f"rows {few}"
