"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
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
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, unit: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {done} of {total} {unit}", file=sys.stderr, flush=True)

    return report
