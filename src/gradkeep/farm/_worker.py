"""A worker as a process: it pulls rows until told to stop, and ends itself when its job hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.farm._pull import Puller
from gradkeep.farm._threads import pin
from gradkeep.farm._watch import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from gradkeep.farm._order import Order
    from gradkeep.store import Lease

TIMED_OUT, STOPPED, BROKEN = 75, 76, 77
"""Exit codes of a worker that ended itself; 0 is for a worker that found nothing left."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a worker tells the process that started it."""

    kind: Literal["ready", "holds", "broken"]
    leases: tuple[Lease, ...] = ()
    text: str = ""


def work_in_process(order: Order, connection: Connection) -> None:
    """The whole life of a worker process; anything to read from the connection means: stop."""
    asked = threading.Event()
    # An interrupt from the terminal reaches the whole group; only the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    pin(order.threads)

    def send(message: Message) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: `stopped` says so
            connection.send(message)

    def stopped() -> bool:
        # The end of the connection can be "read" as well: the parent is gone.
        return asked.is_set() or connection.poll()

    def beat(leases: Sequence[Lease]) -> None:
        send(Message("holds", tuple(leases)))

    def end(reason: str) -> None:
        os._exit(TIMED_OUT if reason == "timeout" else STOPPED)

    try:
        rows, job = order.open_rows(), order.load_job()
        pin(order.threads)  # loading the job may have loaded torch
        send(Message("ready"))
        puller = Puller(order, rows, job, stopped=stopped)
        with Watch(order, rows, end=end, beat=beat, stopped=stopped) as watch:
            puller.run(watch)
    except BaseException:
        send(Message("broken", text=traceback.format_exc()))
        os._exit(BROKEN)
