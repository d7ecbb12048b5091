"""Run a job for every row that is not done: here, on many cores, or on many machines."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import gradkeep.store as stores
from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import Conflict, FarmError
from gradkeep.farm._clusters import RayCluster, Slurm
from gradkeep.farm._job import Job, JobSpec, check_workers, packed
from gradkeep.farm._local import LocalProcesses
from gradkeep.farm._process import stop_on_signals
from gradkeep.farm._progress import Progress, progress_of
from gradkeep.farm._worker import LeaseKeeper, Puller

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gradkeep.store import Rows, Store

_ENGINES: dict[str, type[LocalProcesses | RayCluster | Slurm]] = {
    "local": LocalProcesses,
    "ray": RayCluster,
    "slurm": Slurm,
}
_REPORT_SHARE = 20
_LIMITS = ("batch", "timeout", "max_attempts", "lease_seconds", "grace", "give_up_after")


class Engine(Protocol):
    """Where workers come from: any object with these two members is one.

    >>> from gradkeep import farm
    >>> class OneAfterAnother:
    ...     threads = 1
    ...     def run(self, spec, report):
    ...         farm.work(spec)  # on another machine, mostly: a spec can be pickled
    """

    @property
    def threads(self) -> int:
        """The threads that each worker may use, unless `run` was told a number."""
        ...

    def run(self, spec: JobSpec, report: Callable[[], None], /) -> None:
        """Have `farm.work(spec)` called where the workers are, and return when no row is left.

        Call `report` now and then: it tells the progress, and costs next to nothing. What workers
        leave undone stays to be done: the rows know, and the outcome says so.
        """
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


@checked(FarmError)
def engine(name: str, **options: Any) -> LocalProcesses | RayCluster | Slurm:
    """An engine by its name: `local`, `ray` or `slurm`, with its options.

    >>> engine("local", workers=2).num_workers
    2
    """
    if not isinstance(name, str) or name not in _ENGINES:
        found = _arguments.shown(name)
        raise FarmError("no such engine", found=found, expected=", ".join(_ENGINES))
    kind = _ENGINES[name]
    known = [item.name for item in dataclasses.fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise FarmError(
            f"the engine {name} has no option {', '.join(unknown)}", expected=", ".join(known)
        )
    return kind(**options)


@checked(FarmError)
def check_place(workers: int | None, engine: object, *, least: int = 0) -> None:
    """Refuse what does not say where workers are: a number of local processes, or an engine."""
    if workers is not None and engine is not None:
        raise FarmError(
            "workers= is a number of local processes, and the engine has its own",
            found=f"workers={workers} and engine={engine!r}",
            fix="say one of them",
        )
    _arguments.count("least", least, error=FarmError)
    if workers is not None:
        check_workers(workers, least=least)
    if engine is not None and not (hasattr(engine, "threads") and hasattr(engine, "run")):
        raise _arguments.refused(
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
    """Run `job` for every row of the set `rows` that is not done, and report how it went.

    `job(numbers)` returns the arrays of each row. `workers` is the number of local processes, 0 for
    this one; `engine` is another place for them. With `here`, the same job as this process has it
    at hand, this process is one of the `workers`, and works while the others start. `limits` are fields of `JobSpec`: `batch`,
    `timeout`, `max_attempts`, `lease_seconds`, `grace`, `give_up_after`. May be run again, and at
    the same time from other machines: a row that is done stays done. A job that raises is a failed
    attempt of its rows, not an error here: `Outcome.failures` has the tracebacks.

    >>> import tempfile, numpy as np, gradkeep as gk
    >>> store = gk.open(tempfile.mkdtemp())
    >>> _ = store.rows("squares", gk.store.Schema((gk.store.Array("value"),)), num_rows=4)
    >>> job = lambda numbers: [{"value": np.float32(n * n)} for n in numbers]
    >>> outcome = run(store, "squares", job, workers=0)
    >>> outcome.complete, store.rows("squares").read([3])["value"]
    (True, array([9.], dtype=float32))
    """
    check_place(workers, engine)
    _arguments.function("job", job, error=FarmError)
    if here is not None:
        _arguments.function("here", here, error=FarmError)
        if engine is not None or limits.get("timeout") is not None:
            raise FarmError(
                "this process is one of the local workers, and cannot be ended when its job hangs",
                found="here= with engine= or timeout=",
                fix="leave here= out",
            )
    if progress is not None:
        _arguments.function("progress", progress, error=FarmError)
    for name in limits:
        _arguments.one_of("a limit", name, _LIMITS, error=FarmError)
    store = store if isinstance(store, stores.Store) else stores.open(store, create=False)
    opened = store.rows(_arguments.text("rows", rows, error=FarmError))
    place = LocalProcesses(workers) if engine is None else engine
    spec = JobSpec(
        store=store.location,
        rows=rows,
        job=b"" if workers == 0 else packed(job),
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
    with contextlib.suppress(Conflict):
        opened.compact()
    states = opened.states(max_attempts=spec.max_attempts)
    if progress is not None:
        progress(progress_of(states))
    failures = tuple(
        Failure(state.row, state.attempts, state.error or "")
        for state in states
        if state.state == "failed"
    )
    return Outcome(progress_of(states), failures, time.monotonic() - began)


def _run_here(spec: JobSpec, rows: Rows, job: Job, report: _ProgressReporter) -> None:
    if spec.timeout is not None:
        raise FarmError(
            "a job in this process cannot be ended when it hangs",
            found=f"timeout={spec.timeout:g} with workers=0",
            fix="use workers=1, which is a process of its own",
        )
    with stop_on_signals(raise_from=2) as stop:

        def watched(numbers: Any) -> Any:
            report()
            return job(numbers)

        puller = Puller(spec, rows, watched, stopped=lambda: stop.asked)
        # The process is the caller's: nothing here may end it, whatever the grace.
        with LeaseKeeper(spec, rows, end=lambda _: None) as keeper:
            puller.run(keeper)
        stop.raise_if_asked()


def _check_shared(store: Store) -> None:
    if store.backend.local_path("") is None and "://" not in store.location:
        raise FarmError(
            "other processes cannot reach this store",
            found=store.location,
            fix="use workers=0, or a store on disk or in a bucket",
        )


class _ProgressReporter:
    """Reports progress, but never spends more than a small share of the time on finding out."""

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
        seen = progress_of(states)
        new = seen.done - self._done_before
        rate = new / max(1e-9, now - self._began) if new > 0 else None
        self._report(dataclasses.replace(seen, rate=rate))
        self._next = now + max(0.5, _REPORT_SHARE * (time.monotonic() - now))
