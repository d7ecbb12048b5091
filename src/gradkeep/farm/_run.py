"""Run a job for every pending row: in this process, on many cores, or on many machines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

import gradkeep.store as stores
from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import ConflictError, FarmError, GradkeepError, StoreError
from gradkeep.farm._clusters import RayCluster, Slurm
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._worker import (
    Job,
    JobSpec,
    LeaseKeeper,
    Puller,
    pickle_job,
    stop_on_signals,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.store import Array, Rows, RowState, Store


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of rows at one moment.

    >>> print(Progress(total=10, done=4, failed=1, rate=0.5))
    4 of 10 done, 1 failed, 10 s left
    """

    total: int
    done: int
    failed: int = 0
    """Rows that failed as often as allowed."""
    leased: int = 0
    rate: float | None = None
    """Rows per second, if known."""

    @property
    def pending(self) -> int:
        """Number of rows that no worker has claimed."""
        return self.total - self.done - self.failed - self.leased

    @property
    def complete(self) -> bool:
        """Return True if every row is done."""
        return self.done == self.total

    @property
    def eta(self) -> float | None:
        """Estimated seconds until all rows are done or failed."""
        remaining = self.total - self.done - self.failed
        if remaining == 0:
            return 0.0
        return remaining / self.rate if self.rate else None

    def __str__(self) -> str:
        parts = [f"{self.done} of {self.total} done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.leased} running"] if self.leased else []
        parts += [f"{format_seconds(self.eta)} left"] if self.eta else []
        return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> [format_seconds(s) for s in (0.4, 59, 61, 7322, 200_000)]
    ['1 s', '59 s', '1 min 1 s', '2 h 2 min', '2 d 7 h']
    """
    whole = max(1, round(seconds))
    for size, unit, below, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {next_unit}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def count_progress(
    states: Sequence[RowState], *, rate: float | None = None, running: bool = True
) -> Progress:
    """Count states; without `running`, leases are not counted as work."""
    counts = Counter(state.state for state in states)
    leased = counts["leased"] if running else 0
    return Progress(len(states), counts["done"], counts["failed"], leased, rate)


def recent_rate(store: Store, rows: Rows) -> float | None:
    """Return rows per second in the last hour, from the modification times of the rows' files."""
    times = sorted(
        entry.modified
        for bucket in store.backend.list(f"{rows.folder}/rows")
        for entry in store.backend.list(f"{rows.folder}/rows/{bucket.name}")
        if entry.modified > time.time() - 3600.0
    )
    if len(times) < 2 or times[-1] == times[0]:
        return None
    return (len(times) - 1) / (times[-1] - times[0])


_ENGINES: dict[str, type[LocalProcesses | RayCluster | Slurm]] = {
    "local": LocalProcesses,
    "ray": RayCluster,
    "slurm": Slurm,
}
_LIMITS = (
    *("batch", "timeout", "max_attempts", "lease_seconds", "grace", "give_up_after"),
    "retry_errors",
)


class Engine(Protocol):
    """Protocol of engines, which provide workers.

    >>> from gradkeep import farm
    >>> class OneAfterAnother:
    ...     threads = 1
    ...     def run(self, spec, report):
    ...         farm.work(spec)  # usually on another machine: a spec can be pickled
    """

    @property
    def threads(self) -> int:
        """Threads per worker, unless `run` is called with a number."""
        ...

    def run(self, spec: JobSpec, report: Callable[[], None], /) -> None:
        """Call `farm.work(spec)` on the workers, and return when no row is pending.

        Call `report` regularly: it reports the progress and is cheap. Rows that workers leave
        unfinished stay pending, and the outcome shows them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that failed as often as allowed."""

    row: int
    attempts: int
    error: str
    """Traceback of the last attempt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    progress: Progress
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def complete(self) -> bool:
        """Return True if every row is done."""
        return self.progress.complete


@checked(FarmError)
def engine(name: str, **options: Any) -> LocalProcesses | RayCluster | Slurm:
    """Build an engine by its name.

    Args:
        name: `"local"`, `"ray"` or `"slurm"`.
        **options: Options of the engine: fields of `LocalProcesses`, `RayCluster` or `Slurm`.

    Returns:
        The engine.

    Raises:
        FarmError: If the name or an option is unknown.

    Example:
        >>> engine("local", workers=2).num_workers
        2
    """
    _arguments.one_of("the engine", name, _ENGINES, error=FarmError, code="farm.unknown_engine")
    kind = _ENGINES[name]
    known = [item.name for item in dataclasses.fields(kind)]
    for option in options:
        _arguments.one_of(
            f"an option of {name}", option, known, error=FarmError, code="farm.unknown_option"
        )
    return kind(**options)


@checked(FarmError)
def validate_workers(workers: int | None, engine: object, *, least: int = 0) -> None:
    """Raise unless the workers are a number of local processes or an engine, not both."""
    if workers is not None and engine is not None:
        raise FarmError(
            "workers= is a number of local processes, but the engine has its own",
            code="farm.workers_and_engine",
            found=f"workers={workers} and engine={engine!r}",
            fix="Pass either workers= or engine=.",
        )
    if workers is not None:
        _arguments.count("workers", workers, error=FarmError, least=least, most=100_000)
    if engine is not None and not (hasattr(engine, "threads") and hasattr(engine, "run")):
        raise _arguments.argument_error(
            "engine", engine, error=FarmError, expected="farm.engine(...), or your own with run()"
        )


@checked(FarmError)
def run(
    store: Store | str | os.PathLike[str],
    rows: str,
    job: Job,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    here: Job | None = None,
    progress: Callable[[Progress], None] | None = None,
    threads: int | None = None,
    **limits: Any,
) -> Outcome:
    """Run a job for every row of a set that is not done.

    It may be run again, and at the same time from other machines: finished rows are kept. A job that
    raises is a failed attempt of its rows, not an error here: `Outcome.failures` has the tracebacks.

    Args:
        store: Store of the rows, or its path.
        rows: Name of the set of rows.
        job: Function that maps row numbers to the arrays of each row.
        workers: Number of local processes; 0 for this process.
        engine: Engine that provides the workers instead.
        here: The same job as an object of this process, which is then one of the `workers` and works
            while the others start.
        progress: Called with the `Progress`.
        threads: Threads per worker.
        **limits: Fields of `JobSpec`: `batch`, `timeout`, `max_attempts`, `lease_seconds`, `grace`,
            `give_up_after`, `retry_errors`.

    Returns:
        Counts, failures and seconds.

    Raises:
        FarmError: If an argument is invalid, a worker fails, or all first attempts fail.

    Example:
        >>> import tempfile, numpy as np, gradkeep as gk
        >>> store = gk.open(tempfile.mkdtemp())
        >>> _ = store.rows("squares", gk.store.Schema((gk.store.Array("value"),)), num_rows=4)
        >>> job = lambda numbers: [{"value": np.float32(n * n)} for n in numbers]
        >>> outcome = run(store, "squares", job, workers=0)
        >>> outcome.complete, store.rows("squares").read([3])["value"]
        (True, array([9.], dtype=float32))
    """
    validate_workers(workers, engine)
    if here is not None and (engine is not None or limits.get("timeout") is not None):
        raise FarmError(
            "this process is one of the local workers and cannot be ended when its job hangs",
            code="farm.here_with_limits",
            found="here= with engine= or timeout=",
            fix="Remove here=.",
        )
    for name in limits:
        _arguments.one_of("a limit", name, _LIMITS, error=FarmError)
    store = store if isinstance(store, stores.Store) else stores.open(store, create=False)
    opened = store.rows(_arguments.text("rows", rows, error=FarmError))
    place = LocalProcesses(workers) if engine is None else engine
    spec = JobSpec(
        store=store.location,
        rows=rows,
        job=b"" if workers == 0 else pickle_job(job),
        threads=place.threads if threads is None else threads,
        durability=store.durability,
        **limits,
    )
    began = time.monotonic()
    report = _ProgressReporter(opened, spec.max_attempts, progress)
    if workers == 0:
        _run_here(spec, opened, job, report)
    elif here is not None:
        _check_shared(store)
        LocalProcesses(workers).run_along(spec, report, here)
    else:
        _check_shared(store)
        place.run(spec, report)
    with contextlib.suppress(ConflictError):
        opened.compact()
    states = opened.states(max_attempts=spec.max_attempts)
    if progress is not None:
        progress(count_progress(states))
    failures = tuple(
        Failure(state.row, state.attempts, state.error or "")
        for state in states
        if state.state == "failed"
    )
    return Outcome(count_progress(states), failures, time.monotonic() - began)


def _run_here(spec: JobSpec, rows: Rows, job: Job, report: _ProgressReporter) -> None:
    if spec.timeout is not None:
        raise FarmError(
            "a job in this process cannot be ended when it hangs",
            code="farm.timeout_without_workers",
            found=f"timeout={spec.timeout:g} with workers=0",
            fix="Use workers=1, which is a separate process.",
        )
    with stop_on_signals(raise_from=2) as stop:

        def watched(numbers: Any) -> Any:
            report()
            return job(numbers)

        puller = Puller(spec, rows, watched, stopped=lambda: stop.is_requested)
        # This is the caller's process, which must not be ended.
        with LeaseKeeper(spec, rows, end=lambda _: None) as keeper:
            puller.run(keeper)
        stop.raise_if_requested()


def _check_shared(store: Store) -> None:
    if store.backend.local_path("") is None and "://" not in store.location:
        raise FarmError(
            "other processes cannot reach the store",
            code="farm.store_not_shared",
            found=store.location,
            fix="Use workers=0, or a store on disk or in a bucket.",
        )


class _ProgressReporter:
    """Report progress, spending at most a small fraction of the time on it."""

    def __init__(
        self, rows: Rows, max_attempts: int, report: Callable[[Progress], None] | None
    ) -> None:
        self._rows, self._max_attempts, self._report = rows, max_attempts, report
        self._done_before, self._began = len(rows.done()), time.monotonic()
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self._report is None or now < self._next:
            return
        states = self._rows.states(max_attempts=self._max_attempts)
        seen = count_progress(states)
        new = seen.done - self._done_before
        rate = new / max(1e-9, now - self._began) if new > 0 else None
        self._report(dataclasses.replace(seen, rate=rate))
        self._next = now + max(0.5, 20 * (time.monotonic() - now))


_SHARING: dict[str, Any] = {
    "max_attempts": 10,
    "lease_seconds": 20.0,
    "give_up_after": 50,
    "retry_errors": False,
}
"""Limits of `run_parts`; workers may die often, because another one resumes their parts."""


def run_parts(
    store: Store,
    title: str,
    arrays: Sequence[Array],
    count: int,
    job: Job,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    here: Job | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, Any]:
    """Run `job` for the parts 0 to `count - 1` of one piece of work; return each array `[count, ...]`.

    The parts are rows of a set in the store, which is deleted at the end, as are sets
    that a killed process left under the same title. A `GradkeepError` of a job is not retried, and
    is part of the error raised here. With `here`, the job as an object of this process, this process
    is one of the local workers.
    """
    prefix = f"shared-{xxhash.xxh3_64_hexdigest(title.encode())}-"
    for old in store.row_sets():
        if old.startswith(prefix):
            _delete_idle(store, old)
    name = prefix + secrets.token_hex(4)
    rows = store.rows(name, stores.Schema(tuple(arrays)), num_rows=count)
    reason = "workers ended early"
    try:
        try:
            few = None if workers is None else min(workers, count)
            along = None if engine is not None else here
            place: dict[str, Any] = {"workers": few, "engine": engine, "here": along}
            run(store, name, job, progress=progress, **place, **_SHARING)
        except GradkeepError as error:
            reason = f"\n{error}"
        missing = count - len(rows.done())
        if missing:
            for text in [state.error for state in rows.states() if state.error][:1]:
                lines = text.strip().splitlines()
                reason = "\n" + "\n".join(lines[-3:] if text.startswith("Traceback") else lines)
            raise FarmError(
                f"{title}: {missing} of {count} parts are missing",
                code="farm.parts_missing",
                found=reason,
                fix="Fix this error and run the same again; complete results in the store are kept.",
            )
        done = rows.read(rows.done())
        return {array.name: done[array.name] for array in arrays}
    finally:
        store.delete_rows(name)


def _delete_idle(store: Store, name: str) -> None:
    """Delete a set of rows unless another process may be working on it."""
    with contextlib.suppress(StoreError):  # its owner may delete it at the same time
        rows = store.rows(name)
        begun = [entry.modified for entry in store.backend.list(rows.folder)]
        # Workers of another process may take up to an hour to start.
        if max(begun, default=0.0) < time.time() - 3600.0 and rows.counts().leased == 0:
            store.delete_rows(name)


def split_blocks(count: int, workers: int) -> list[range]:
    """Split `count` items into one block per worker, nearly equal.

    >>> split_blocks(5, 2), split_blocks(1, 4)
    ([range(0, 3), range(3, 5)], [range(0, 1)])
    """
    parts = min(count, workers)
    bounds = [-(-count * part // parts) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def count_workers(workers: int | None, engine: Engine | None) -> int:
    """Return the number of workers, 4 if an engine does not say."""
    count = workers if engine is None else getattr(engine, "num_workers", None)
    return max(1, count or 4)
