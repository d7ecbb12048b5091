"""A worker: claim rows, compute them, keep their leases, and store results or failures."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import gradkeep.store as stores
from gradkeep import _arguments
from gradkeep._arguments import Limits
from gradkeep.errors import FarmError, GradkeepError, LeaseLostError, StoreError, WriteFailedError
from gradkeep.store.rows._rows import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from gradkeep.store import Durability, Lease, Rows

Job = Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]
"""Computes rows: gets their numbers, returns the arrays of each, in the same order."""


_Count = Annotated[int, Limits(1, most=2**31 - 1)]
_Seconds = Annotated[float, Limits(0, most=10 * 365 * 86400.0)]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that a worker needs, small enough to be sent to any machine."""

    store: str
    """Path or address of the store, valid for every worker."""
    rows: str
    """Name of the set of rows in the store."""
    job: bytes
    """A `Job`, pickled."""
    batch: _Count = 1
    """Rows per claim."""
    timeout: _Seconds | None = None
    """Seconds per row; a batch may take this times its number of rows."""
    max_attempts: _Count = 3
    lease_seconds: _Seconds = 60.0
    """Lease timeout: seconds after the last heartbeat until other workers may take the rows."""
    grace: _Seconds = 20.0
    """Seconds to finish current rows after a stop; then they are released."""
    threads: _Count = 1
    """Threads per worker, for torch and numpy's libraries."""
    give_up_after: _Count = 10
    """A worker whose first attempts, this many, all fail stops."""
    durability: Durability = "full"
    retry_errors: bool = True
    """Retry errors of gradkeep; otherwise they end the run."""

    def __post_init__(self) -> None:
        _arguments.check_fields(self, FarmError)

    def open_rows(self) -> Rows:
        """Open the rows in this process."""
        store = stores.open(self.store, create=False, durability=self.durability)
        return store.rows(self.rows)

    def load_job(self) -> Job:
        """Unpickle the job."""
        job: Job = pickle.loads(self.job)
        return job


def pickle_job(job: object) -> bytes:
    """Pickle a job, or its arguments, for another process.

    With cloudpickle installed, functions of scripts and notebooks work as well.
    """
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    pickler = importlib.import_module("cloudpickle" if has_cloudpickle else "pickle")
    try:
        pickled: bytes = pickler.dumps(job)
    except Exception as error:
        raise FarmError(
            "the job cannot be sent to another process",
            code="farm.not_picklable",
            found=f"{type(error).__name__}: {error}",
            expected="functions defined at the top of a module, and data that can be pickled",
            fix="Move it into a module, install cloudpickle, or use workers=0.",
        ) from error
    return pickled


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


_NUMBER_VARIABLE = "GRADKEEP_WORKER"

_changing_environment = threading.Lock()
"""Prevents runs in several threads from restoring each other's values."""


@dataclass(slots=True)
class StopRequest:
    """Number of stop requests, and the last signal."""

    times: int = 0
    number: int | None = None

    @property
    def is_requested(self) -> bool:
        """Return True if the run should stop."""
        return self.times > 0

    @property
    def is_immediate(self) -> bool:
        """Return True if current rows should not be finished."""
        return self.times > 1

    def raise_if_requested(self) -> None:
        """Exit as the signal would have, after the cleanup."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.is_requested:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(*, raise_from: int | None = None) -> Iterator[StopRequest]:
    """Count interrupts and terminations instead of dying; only in the main thread.

    The `raise_from`-th signal and later ones raise KeyboardInterrupt.
    """
    stop = StopRequest()

    def note(number: int, _: Any) -> None:
        stop.times += 1
        stop.number = number
        if raise_from is not None and stop.times >= raise_from:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def environment(threads: int, worker: int = 0) -> Iterator[None]:
    """Set the number of threads and of the worker in the environment of processes started inside."""
    with _changing_environment:
        names = (*_THREAD_VARIABLES, _NUMBER_VARIABLE)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        os.environ[_NUMBER_VARIABLE] = str(worker)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def worker_number() -> int:
    """Return the number of this worker on its machine, from 0 on, to choose a device.

    >>> worker_number()
    0
    """
    for name in (_NUMBER_VARIABLE, "SLURM_LOCALID"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0


def pin(threads: int) -> None:
    """Set the number of threads of this process, also if torch is already loaded."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


# Exit codes of a worker that ended itself; 0 means that no row was pending.
TIMED_OUT, STOPPED, BROKEN = 75, 76, 77
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
_log = logging.getLogger("gradkeep")


def end_process(reason: str) -> None:
    """End this process immediately, with the exit code of a timeout or of a stop."""
    os._exit(TIMED_OUT if reason == "timeout" else STOPPED)


def broken_worker(who: str, text: str) -> FarmError:
    """Build the error of a worker that cannot continue."""
    return FarmError(
        f"{who} could not continue",
        code="farm.broken_worker",
        found="\n" + shortened(text.rstrip()),
        fix="Fix this error and run again: finished rows are kept.",
    )


def work(
    spec: JobSpec,
    *,
    stopped: Callable[[], bool] = lambda: False,
    ready: Callable[[], None] = lambda: None,
    beat: Callable[[Sequence[Lease]], None] = lambda _: None,
) -> None:
    """Compute rows of `spec` in this process until none is pending.

    An engine calls it, any number of times and on any machine that can reach the store. A row that exceeds
    its timeout is recorded as failed, and this process ends with exit code 75, because a job that hangs
    cannot be ended otherwise; exit code 76 if it does not finish within the grace period after a stop.

    Args:
        spec: The job and its limits.
        stopped: Returns True to finish the current rows and take no new ones.
        ready: Called when the job is loaded.
        beat: Called with the current leases.
    """
    pin(spec.threads)
    rows, job = spec.open_rows(), spec.load_job()
    pin(spec.threads)  # loading the job may have loaded torch
    ready()
    with LeaseKeeper(spec, rows, end=end_process, beat=beat, stopped=stopped) as keeper:
        Puller(spec, rows, job, stopped=stopped).run(keeper)


@dataclass(slots=True)
class Puller:
    """Loop of one worker over the rows of a spec."""

    spec: JobSpec
    rows: Rows
    job: Job
    stopped: Callable[[], bool] = lambda: False
    longest_wait: float = _LONGEST_WAIT
    """Largest number of seconds between two checks of rows that others hold."""
    owner: str = ""
    _successes: int = 0
    _failures: int = 0
    _final: BaseException | None = None
    """Error of the job that ends the run."""

    def __post_init__(self) -> None:
        # With a token: process ids repeat, and a new process must not inherit leases.
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.owner = self.owner or name

    def run(self, keeper: LeaseKeeper) -> None:
        """Work until every row is done or failed, or until stopped."""
        wait = _FIRST_WAIT
        while not self.stopped():
            leases = self.rows.claim(
                owner=self.owner,
                seconds=self.spec.lease_seconds,
                count=self.spec.batch,
                max_attempts=self.spec.max_attempts,
            )
            if leases:
                wait = _FIRST_WAIT
                keeper.hold(leases)
                self._compute(leases, keeper)
            elif self.rows.counts(max_attempts=self.spec.max_attempts).unfinished == 0:
                return
            else:
                # Other workers hold the rest. If they die, their leases expire.
                time.sleep(wait)
                wait = min(
                    2 * wait, self.longest_wait, max(_FIRST_WAIT, self.spec.lease_seconds / 4)
                )

    def _compute(self, leases: Sequence[Lease], keeper: LeaseKeeper) -> None:
        numbers = [lease.row for lease in leases]
        results = self._attempt(numbers)
        if isinstance(results, str) and len(numbers) > 1:
            # One row may have failed the batch: retry each alone.
            for number in numbers:
                keeper.restart_timer(1)
                self._settle(number, self._attempt([number]), keeper)
            return
        keeper.computed()
        for place, number in enumerate(numbers):
            result = results if isinstance(results, str) else [results[place]]
            self._settle(number, result, keeper)

    def _attempt(self, numbers: Sequence[int]) -> list[Any] | str:
        """Return the results, or the traceback of a failure."""
        try:
            results = self.job(numbers)
            if isinstance(results, str | bytes | Mapping):
                raise FarmError(
                    "the job did not return a list of results",
                    code="farm.not_a_list",
                    found=type(results).__name__,
                    expected="one mapping from names to arrays for each row",
                )
            listed = list(results)
            if len(listed) != len(numbers):
                raise FarmError(
                    "the job returned a wrong number of results",
                    code="farm.result_count",
                    found=len(listed),
                    expected=len(numbers),
                )
        except (Exception, SystemExit) as error:
            # A full disk may have space again; other errors of gradkeep would repeat.
            final = isinstance(error, GradkeepError) and not isinstance(error, WriteFailedError)
            if final and not self.spec.retry_errors:
                self._final = error
                return shortened(str(error))
            return shortened(traceback.format_exc())
        return listed

    def _settle(self, number: int, result: Any, keeper: LeaseKeeper) -> None:
        error = result if isinstance(result, str) else None
        lease = keeper.release_row(number)
        if error is None:
            try:
                self.rows.finish(lease, result[0])
            except WriteFailedError:
                # The disk is full or gone, which affects all rows.
                self.rows.release(lease)
                raise
            except Exception:
                error = shortened(traceback.format_exc())
        if error is not None:
            self.rows.fail(lease, f"{error.rstrip()}\nafter {keeper.seconds:.3g} s by {self.owner}")
            if self._final is not None:
                raise self._final
        keeper.settled()
        self._count(number, error)

    def _count(self, number: int, error: str | None) -> None:
        if error is None:
            self._successes += 1
            return
        self._failures += 1
        if self._successes == 0 and self._failures >= self.spec.give_up_after:
            raise FarmError(
                f"the first {self._failures} attempts all failed, the last one at "
                f"{describe_rows([number])}",
                code="farm.all_failed",
                found=error.strip().splitlines()[-1],
                fix="Read the traceback of a failed row, fix the job, and retry the rows.",
            )


class LeaseKeeper:
    """Keep the leases of the current batch.

    `end` is called with a reason when the process must end: the job timed out, or did not
    finish within the grace period after a stop. By then its rows are recorded or released.
    """

    def __init__(
        self,
        spec: JobSpec,
        rows: Rows,
        *,
        end: Callable[[str], None],
        beat: Callable[[Sequence[Lease]], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec, self._rows = spec, rows
        self._end, self._beat, self._stopped = end, beat, stopped
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._since = self._renewed = self._stop_seen = 0.0
        self._allowed = math.inf
        self._closed = threading.Event()
        self._worker = threading.get_ident()
        self._thread = threading.Thread(target=self._loop, name="lease keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for lease in self._leases.values():  # of a batch that ended with an exception
            self._rows.release(lease)

    def hold(self, leases: Sequence[Lease]) -> None:
        """Begin a batch."""
        with self._lock:
            self._leases = {lease.row: lease for lease in leases}
            self._since = self._renewed = time.monotonic()
            self._allow(len(leases))
            self._beat(leases)

    def restart_timer(self, count: int) -> None:
        """Restart the timeout for `count` rows."""
        with self._lock:
            self._allow(count)

    def computed(self) -> None:
        """Disable the timeout, because storing the results must not be interrupted."""
        with self._lock:
            self._allowed = math.inf

    def release_row(self, row: int) -> Lease:
        """Hand the newest lease of a row to the caller."""
        with self._lock:
            lease = self._leases.pop(row)
            self._beat([*self._leases.values(), lease])
            return lease

    def settled(self) -> None:
        """Report that the handed-over row is done or recorded."""
        with self._lock:
            self._beat(list(self._leases.values()))

    @property
    def seconds(self) -> float:
        """Seconds since the batch began."""
        return time.monotonic() - self._since

    def _allow(self, count: int) -> None:
        timeout = math.inf if self._spec.timeout is None else self._spec.timeout
        self._allowed = time.monotonic() + timeout * count

    def _loop(self) -> None:
        while not self._closed.wait(0.25):
            if self._stopped() and not self._stop_seen:
                self._stop_seen = time.monotonic()
            with self._lock:
                if self._leases:
                    self._tick()

    def _tick(self) -> None:
        now, spec = time.monotonic(), self._spec
        if now > self._allowed:
            self._fail_timed_out_rows()
        elif self._stop_seen and now - self._stop_seen > spec.grace:
            for lease in self._leases.values():
                self._rows.release(lease)
            self._beat(())
            self._end("stopped")
        elif now - self._renewed > spec.lease_seconds / 3:
            self._renewed = now
            for row, lease in self._leases.items():
                # The lease was lost, or the disk is full: only one worker can store the row, and a
                # later renewal may succeed.
                try:
                    self._leases[row] = self._rows.renew(lease, seconds=spec.lease_seconds)
                except (LeaseLostError, StoreError, OSError) as error:
                    _log.info("row %d: %s", row, error)
            self._beat(list(self._leases.values()))

    def _fail_timed_out_rows(self) -> None:
        frame = sys._current_frames().get(self._worker)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = (
            f"Traceback (most recent call last):\n{stack}"
            f"TimeoutError: {describe_rows(list(self._leases))} took longer than "
            f"{self._spec.timeout:g} s each"
        )
        unrecorded = []
        for lease in self._leases.values():
            try:
                self._rows.fail(lease, shortened(text))
            except (StoreError, OSError):
                unrecorded.append(lease)
        self._beat(unrecorded)  # the parent may record it
        self._end("timeout")


def describe_rows(rows: Sequence[int]) -> str:
    """Format a few row numbers and their count for messages.

    >>> describe_rows([7]), describe_rows([1, 2, 3, 4, 5, 6, 7])
    ('row 7', 'rows 1, 2, 3, 4, 5 ... (7 in all)')
    """
    if len(rows) == 1:
        return f"row {rows[0]}"
    few = ", ".join(map(str, rows[:5]))
    return f"rows {few} ... ({len(rows)} in all)" if len(rows) > 5 else f"rows {few}"


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A message of a worker to its parent."""

    kind: Literal["ready", "holds", "finished", "broken"]
    leases: tuple[Lease, ...] = ()
    text: str = ""


def work_in_process(connection: Connection) -> None:
    """Run a worker process: read its spec from the connection; any further input means stop."""
    stop = threading.Event()
    # An interrupt from the terminal reaches the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def send(message: WorkerMessage) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: `stopped` notices it
            connection.send(message)

    try:
        try:
            spec: JobSpec = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the parent is gone
        work(
            spec,
            # `poll` is also true when the parent is gone.
            stopped=lambda: stop.is_set() or connection.poll(),
            ready=lambda: send(WorkerMessage("ready")),
            beat=lambda leases: send(WorkerMessage("holds", tuple(leases))),
        )
        # An exit code of 0 alone is not enough: the job may have exited with it.
        send(WorkerMessage("finished"))
    except BaseException as error:
        # Errors of gradkeep have a message for users, without a traceback.
        meant = isinstance(error, GradkeepError)
        send(
            WorkerMessage("broken", text=str(error) if meant else shortened(traceback.format_exc()))
        )
        os._exit(BROKEN)
