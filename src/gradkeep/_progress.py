"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECONDS_BETWEEN_LINES = 10.0


class ProgressReport(Protocol):
    """What a long piece of work calls from time to time."""

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """So many are done, of so many; `doing` says at what it is."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[ProgressReport]:
    """A function to call with how many are done, of how many; all goes to stderr."""
    if not sys.stderr.isatty():
        yield _lines(what, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn(unit), Remaining(), console=console) as bar:
        task = bar.add_task(what)

        def update(done: int, total: int, doing: str = "") -> None:
            told = f"{what}: {doing}" if doing else what
            bar.update(task, completed=done, total=total, description=told)

        yield update


def _lines(what: str, unit: str) -> ProgressReport:
    last = time.monotonic()

    def report(done: int, total: int, doing: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            at = f" ({doing})" if doing else ""
            print(f"{what}: {done} of {total} {unit}{at}", file=sys.stderr, flush=True)

    return report
