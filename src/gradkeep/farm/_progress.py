"""How far the rows are, and how long the rest will take."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep._annotations import checked
from gradkeep.errors import FarmError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store import Rows, RowState, Store

_RECENT = 3600.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of rows at one moment.

    >>> print(Progress(total=10, done=4, failed=1, rate=0.5))
    4 of 10 done, 1 failed, 10 s left
    """

    total: int
    done: int
    failed: int = 0
    """Tried as often as allowed."""
    leased: int = 0
    rate: float | None = None
    """Rows per second, while that is known."""

    @property
    def pending(self) -> int:
        """Rows that nobody works on yet."""
        return self.total - self.done - self.failed - self.leased

    @property
    def complete(self) -> bool:
        """Whether every row is done."""
        return self.done == self.total

    @property
    def eta(self) -> float | None:
        """Seconds until all rows are done or failed, at the pace so far."""
        left = self.total - self.done - self.failed
        if left == 0:
            return 0.0
        return left / self.rate if self.rate else None

    def __str__(self) -> str:
        parts = [f"{self.done} of {self.total} done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.leased} running"] if self.leased else []
        parts += [f"{format_seconds(self.eta)} left"] if self.eta else []
        return ", ".join(parts)


@checked(FarmError)
def format_seconds(seconds: float) -> str:
    """A duration as a person says it.

    >>> [format_seconds(s) for s in (0.4, 59, 61, 7322, 200_000)]
    ['1 s', '59 s', '1 min 1 s', '2 h 2 min', '2 d 7 h']
    """
    whole = max(1, round(seconds))
    for size, unit, below, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {next_unit}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def progress_of(
    states: Sequence[RowState], *, rate: float | None = None, running: bool = True
) -> Progress:
    """The counts of these states; without `running`, a lease is not taken for work."""
    counts = Counter(state.state for state in states)
    leased = counts["leased"] if running else 0
    return Progress(len(states), counts["done"], counts["failed"], leased, rate)


def recent_rate(store: Store, rows: Rows) -> float | None:
    """Rows per second of the last hour, from the times of the rows' own files."""
    times = sorted(
        entry.modified
        for bucket in store.backend.list(f"{rows.folder}/rows")
        for entry in store.backend.list(f"{rows.folder}/rows/{bucket.name}")
        if entry.modified > time.time() - _RECENT
    )
    if len(times) < 2 or times[-1] == times[0]:
        return None
    return (len(times) - 1) / (times[-1] - times[0])
