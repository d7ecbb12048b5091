"""What a worker does all day: take rows, compute them, put them or record why not."""

from __future__ import annotations

import os
import secrets
import socket
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.errors import FarmError, WriteFailed
from gradkeep.farm._watch import Watch, describe_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.farm._order import Job, Order
    from gradkeep.store import Lease, Rows

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0


@dataclass(slots=True)
class Puller:
    """One worker's loop over the rows of an order, until none is left for it."""

    order: Order
    rows: Rows
    job: Job
    stopped: Callable[[], bool] = lambda: False
    owner: str = ""
    _successes: int = 0
    _failures: int = 0

    def __post_init__(self) -> None:
        # A token as well: process numbers repeat, and a dead worker's leases are not its heir's.
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.owner = self.owner or name

    def run(self, watch: Watch) -> None:
        """Work until every row is done or failed too often, or until stopped."""
        wait = _FIRST_WAIT
        while not self.stopped():
            leases = self.rows.claim(
                owner=self.owner,
                seconds=self.order.lease_seconds,
                count=self.order.batch,
                max_attempts=self.order.max_attempts,
            )
            if leases:
                wait = _FIRST_WAIT
                watch.hold(leases)
                self._compute(leases, watch)
            elif self._nothing_left():
                return
            else:
                # Others hold the rest. If they die, their leases end and the rows are ours.
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT, max(_FIRST_WAIT, self.order.lease_seconds / 4))

    def _nothing_left(self) -> bool:
        states = self.rows.states(max_attempts=self.order.max_attempts)
        return all(state.state in ("done", "failed") for state in states)

    def _compute(self, leases: Sequence[Lease], watch: Watch) -> None:
        numbers = [lease.row for lease in leases]
        results = self._attempt(numbers)
        if isinstance(results, str) and len(numbers) > 1:
            # One row may have spoiled it for all: each alone.
            for number in numbers:
                watch.begin_again(1)
                self._settle(number, self._attempt([number]), watch)
            return
        watch.computed()
        for place, number in enumerate(numbers):
            result = results if isinstance(results, str) else [results[place]]
            self._settle(number, result, watch)

    def _attempt(self, numbers: Sequence[int]) -> Sequence[Mapping[str, Any]] | str:
        """The results, or the traceback of what went wrong."""
        try:
            results = self.job(numbers)
            if len(results) != len(numbers):
                raise FarmError(
                    "the job returned another number of results than it got rows",
                    found=len(results),
                    expected=len(numbers),
                )
        except (Exception, SystemExit):
            return traceback.format_exc()
        return results

    def _settle(self, number: int, result: Any, watch: Watch) -> None:
        error = result if isinstance(result, str) else None
        lease = watch.let_go(number)
        if error is None:
            try:
                self.rows.finish(lease, result[0])
            except WriteFailed:
                # The place is full or gone, which no other row would change.
                self.rows.release(lease)
                raise
            except Exception:
                error = traceback.format_exc()
        if error is not None:
            self.rows.fail(lease, f"{error.rstrip()}\nafter {watch.seconds:.3g} s by {self.owner}")
        watch.settled()
        self._count(number, error)

    def _count(self, number: int, error: str | None) -> None:
        if error is None:
            self._successes += 1
            return
        self._failures += 1
        if self._successes == 0 and self._failures >= self.order.give_up_after:
            raise FarmError(
                f"the first {self._failures} attempts all failed; the last was "
                f"{describe_rows([number])}",
                found=error.strip().splitlines()[-1],
                expected="that some row succeeds",
                fix="read the traceback of a failed row, repair the job, and retry the rows",
            )
