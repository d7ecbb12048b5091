"""Run a job for every row that is not done: here, on many cores, or on many machines."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gradkeep.errors import Conflict, FarmError
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._order import Job, Order, packed_job
from gradkeep.farm._progress import Pace, Progress, progress_of
from gradkeep.farm._pull import Puller
from gradkeep.farm._ray import RayCluster
from gradkeep.farm._signals import stop_on_signals
from gradkeep.farm._slurm import Slurm
from gradkeep.farm._watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.store import Rows, Store

_ENGINES = {"local": LocalProcesses, "ray": RayCluster, "slurm": Slurm}
_LOOK_SHARE = 20


class Engine(Protocol):
    """Where workers come from."""

    @property
    def num_workers(self) -> int:
        """How many workers there will be."""
        ...

    @property
    def threads(self) -> int:
        """The threads that each may use, unless the order says otherwise."""
        ...

    def run(self, order: Order, look: Callable[[], None]) -> None:
        """Have workers pull rows until none is left; call `look` now and then."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed as often as it may."""

    row: int
    attempts: int
    error: str
    """The traceback of the last attempt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a run."""

    progress: Progress
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every row is done."""
        return self.progress.complete


def engine(name: str, **options: Any) -> Engine:
    """An engine by its name: `local`, `ray` or `slurm`, with its options.

    >>> engine("local", workers=2).num_workers
    2
    """
    if name not in _ENGINES:
        raise FarmError("no such engine", found=name, expected=", ".join(_ENGINES))
    kind = _ENGINES[name]
    known = [item.name for item in dataclasses.fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise FarmError(
            f"the engine {name} has no option {', '.join(unknown)}", expected=", ".join(known)
        )
    found: Engine = kind(**options)
    return found


def run(
    store: Store,
    rows: str,
    job: Job,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Callable[[Progress], None] | None = None,
    threads: int | None = None,
    **limits: Any,
) -> Outcome:
    """Run `job` for every row of the set `rows` that is not done, and report how it went.

    `job(numbers)` returns the arrays of each row. `workers` is the number of local processes, 0 for
    this one; `engine` may be another place. `limits` are the fields of `Order`: `batch`, `timeout`,
    `max_attempts`, `lease_seconds`, `grace`, `give_up_after`. May be run again, and at the same time
    from other machines: a row that is done stays done.

    >>> import tempfile, numpy as np, gradkeep as gk
    >>> store = gk.open(tempfile.mkdtemp())
    >>> _ = store.rows("squares", gk.Schema((gk.Array("value"),)), num_rows=4)
    >>> job = lambda numbers: [{"value": np.float32(n * n)} for n in numbers]
    >>> outcome = run(store, "squares", job, workers=0)
    >>> outcome.complete, store.rows("squares").read([3])["value"]
    (True, array([9.], dtype=float32))
    """
    opened = store.rows(rows)
    place = LocalProcesses(workers) if engine is None else engine
    order = Order(
        store=store.location,
        rows=rows,
        job=b"" if workers == 0 else packed_job(job),
        threads=place.threads if threads is None else threads,
        durability=store.durability,
        **limits,
    )
    began = time.monotonic()
    look = _Look(opened, order.max_attempts, progress)
    if workers == 0 and engine is None:
        _run_here(order, opened, job, look)
    else:
        _check_shared(store)
        place.run(order, look)
    with contextlib.suppress(Conflict):
        opened.compact()
    states = opened.states(max_attempts=order.max_attempts)
    if progress is not None:
        progress(progress_of(states))
    failures = tuple(
        Failure(state.row, state.attempts, state.error or "")
        for state in states
        if state.state == "failed"
    )
    return Outcome(progress_of(states), failures, time.monotonic() - began)


def _run_here(order: Order, rows: Rows, job: Job, look: _Look) -> None:
    if order.timeout is not None:
        raise FarmError(
            "a job in this process cannot be ended when it hangs",
            found=f"timeout={order.timeout:g} with workers=0",
            fix="use workers=1, which is a process of its own",
        )
    with stop_on_signals(raise_second=True) as stop:

        def watched(numbers: Any) -> Any:
            look()
            return job(numbers)

        puller = Puller(order, rows, watched, stopped=lambda: stop.asked)
        # The process is the caller's: nothing here may end it, whatever the grace.
        with Watch(order, rows, end=lambda _: None) as watch:
            puller.run(watch)
        stop.raise_if_asked()


def _check_shared(store: Store) -> None:
    if store.backend.local_path("") is None and "://" not in store.location:
        raise FarmError(
            "other processes cannot reach this store",
            found=store.location,
            fix="use workers=0, or a store on disk or in a bucket",
        )


class _Look:
    """Reports progress, but never spends more than a small share of the time on finding out."""

    def __init__(
        self, rows: Rows, max_attempts: int, report: Callable[[Progress], None] | None
    ) -> None:
        self._rows, self._max_attempts, self._report = rows, max_attempts, report
        self._pace = Pace(len(rows.done()))
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self._report is None or now < self._next:
            return
        states = self._rows.states(max_attempts=self._max_attempts)
        seen = progress_of(states)
        self._report(dataclasses.replace(seen, rate=self._pace.rate(seen.done)))
        self._next = now + max(0.5, _LOOK_SHARE * (time.monotonic() - now))
