"""A worker: takes rows, computes them, keeps their leases, puts them or records why not."""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from gradkeep.errors import FarmError, GradkeepError, LeaseLostError, StoreError, WriteFailedError
from gradkeep.store.rows._rows import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from gradkeep.farm._job import Job, JobSpec
    from gradkeep.store import Lease, Rows


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


_NUMBER_VARIABLE = "GRADKEEP_WORKER"

_changing_environment = threading.Lock()
"""Runs in several threads would else take each other's numbers for what was there before."""


@dataclass(slots=True)
class StopRequest:
    """How often, and by which signal, somebody asked to stop."""

    times: int = 0
    number: int | None = None

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.times > 0

    @property
    def at_once(self) -> bool:
        """Whether not even to finish."""
        return self.times > 1

    def raise_if_asked(self) -> None:
        """End as the signal would have ended us, after all was put in order."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(*, raise_from: int | None = None) -> Iterator[StopRequest]:
    """Count interrupts and terminations instead of dying of them; the main thread gets them.

    The `raise_from`-th one and later ones interrupt whatever runs, as they would have without us.
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
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def environment(threads: int, worker: int = 0) -> Iterator[None]:
    """Processes that are started in this context find both numbers in their environment."""
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
    """Which of the workers on this machine this process is, from 0 on: by it a job takes a device.

    >>> worker_number()
    0
    """
    for name in (_NUMBER_VARIABLE, "SLURM_LOCALID"):
        found = os.environ.get(name, "")
        if found.isdecimal():
            return int(found)
    return 0


def pin(threads: int) -> None:
    """Use so many threads in this process, also if torch is loaded already."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


TIMED_OUT, STOPPED, BROKEN = 75, 76, 77
"""Exit codes of a worker that ended itself; 0 is for a worker that found nothing left."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
_log = logging.getLogger("gradkeep")


def end_process(reason: str) -> None:
    """End this process at once, with the exit code of a job that hung or of a stop."""
    os._exit(TIMED_OUT if reason == "timeout" else STOPPED)


def broken_worker(who: str, text: str) -> FarmError:
    """The error for what made it impossible for a worker to go on."""
    return FarmError(
        f"{who} could not go on",
        found="\n" + shortened(text.rstrip()),
        fix="repair what it says and run again: what is done stays done",
    )


def work(
    spec: JobSpec,
    *,
    stopped: Callable[[], bool] = lambda: False,
    ready: Callable[[], None] = lambda: None,
    beat: Callable[[Sequence[Lease]], None] = lambda _: None,
) -> None:
    """Be one worker: compute rows of `spec` in this process until none is left for it.

    What an engine starts, as often as it likes and on any machine that sees the store. `stopped()`
    says when to finish and take nothing new. A row that takes longer than its timeout is recorded
    as failed and this process ended with code 75, for nothing else ends a job that hangs; code 76
    if it does not finish within the grace after a stop. `ready` is called when the job is loaded,
    `beat` with the leases that are held now.
    """
    pin(spec.threads)
    rows, job = spec.open_rows(), spec.load_job()
    pin(spec.threads)  # loading the job may have loaded torch
    ready()
    with LeaseKeeper(spec, rows, end=end_process, beat=beat, stopped=stopped) as keeper:
        Puller(spec, rows, job, stopped=stopped).run(keeper)


@dataclass(slots=True)
class Puller:
    """One worker's loop over the rows of a spec, until none is left for it."""

    spec: JobSpec
    rows: Rows
    job: Job
    stopped: Callable[[], bool] = lambda: False
    longest_wait: float = _LONGEST_WAIT
    """Seconds between two looks at rows that others hold."""
    owner: str = ""
    _successes: int = 0
    _failures: int = 0
    _final: BaseException | None = None
    """The error of the job that ends the run."""

    def __post_init__(self) -> None:
        # A token as well: process numbers repeat, and a dead worker's leases are not its heir's.
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.owner = self.owner or name

    def run(self, keeper: LeaseKeeper) -> None:
        """Work until every row is done or failed too often, or until stopped."""
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
                # Others hold the rest. If they die, their leases end and the rows are ours.
                time.sleep(wait)
                wait = min(
                    2 * wait, self.longest_wait, max(_FIRST_WAIT, self.spec.lease_seconds / 4)
                )

    def _compute(self, leases: Sequence[Lease], keeper: LeaseKeeper) -> None:
        numbers = [lease.row for lease in leases]
        results = self._attempt(numbers)
        if isinstance(results, str) and len(numbers) > 1:
            # One row may have spoiled it for all: each alone.
            for number in numbers:
                keeper.begin_again(1)
                self._settle(number, self._attempt([number]), keeper)
            return
        keeper.computed()
        for place, number in enumerate(numbers):
            result = results if isinstance(results, str) else [results[place]]
            self._settle(number, result, keeper)

    def _attempt(self, numbers: Sequence[int]) -> list[Any] | str:
        """The results, or the traceback of what went wrong."""
        try:
            results = self.job(numbers)
            if isinstance(results, str | bytes | Mapping):
                raise FarmError(
                    "the job returned no list of results",
                    found=type(results).__name__,
                    expected="one mapping from names to arrays for each row",
                )
            listed = list(results)
            if len(listed) != len(numbers):
                raise FarmError(
                    "the job returned another number of results than it got rows",
                    found=len(listed),
                    expected=len(numbers),
                )
        except (Exception, SystemExit) as error:
            # A full disk may have room again; what else is raised on purpose would end the same.
            final = isinstance(error, GradkeepError) and not isinstance(error, WriteFailedError)
            if final and not self.spec.retry_errors:
                self._final = error
                return shortened(str(error))
            return shortened(traceback.format_exc())
        return listed

    def _settle(self, number: int, result: Any, keeper: LeaseKeeper) -> None:
        error = result if isinstance(result, str) else None
        lease = keeper.let_go(number)
        if error is None:
            try:
                self.rows.finish(lease, result[0])
            except WriteFailedError:
                # The place is full or gone, which no other row would change.
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
                f"the first {self._failures} attempts all failed; the last was "
                f"{describe_rows([number])}",
                found=error.strip().splitlines()[-1],
                expected="that some row succeeds",
                fix="read the traceback of a failed row, repair the job, and retry the rows",
            )


class LeaseKeeper:
    """Holds the leases of the batch that is computed now.

    `end` is called with a reason when the process must end: the job took too long, or did not
    finish within the grace after a stop. By then its rows are recorded or given back.
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
            self._give_up_on_job()
        elif self._stop_seen and now - self._stop_seen > spec.grace:
            for lease in self._leases.values():
                self._rows.release(lease)
            self._beat(())
            self._end("stopped")
        elif now - self._renewed > spec.lease_seconds / 3:
            self._renewed = now
            for row, lease in self._leases.items():
                # Taken over, or a disk that is full for now: the row has one winner anyway, and a
                # later beat may succeed.
                try:
                    self._leases[row] = self._rows.renew(lease, seconds=spec.lease_seconds)
                except (LeaseLostError, StoreError, OSError) as error:
                    _log.info("row %d: %s", row, error)
            self._beat(list(self._leases.values()))

    def _give_up_on_job(self) -> None:
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
        self._beat(unrecorded)  # whoever started us may record it
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


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """What a worker tells the process that started it."""

    kind: Literal["ready", "holds", "finished", "broken"]
    leases: tuple[Lease, ...] = ()
    text: str = ""


def work_in_process(connection: Connection) -> None:
    """The whole life of a worker process: its spec is read from the connection, then anything means: stop."""
    asked = threading.Event()
    # An interrupt from the terminal reaches the whole group; only the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: asked.set())

    def send(message: WorkerMessage) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: `stopped` says so
            connection.send(message)

    try:
        try:
            spec: JobSpec = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the parent is gone before anything began
        work(
            spec,
            # The end of the connection can be "read" as well: the parent is gone.
            stopped=lambda: asked.is_set() or connection.poll(),
            ready=lambda: send(WorkerMessage("ready")),
            beat=lambda leases: send(WorkerMessage("holds", tuple(leases))),
        )
        # An exit code of 0 alone says nothing: a job may have ended the process with it.
        send(WorkerMessage("finished"))
    except BaseException as error:
        # What is raised on purpose says what to do: a traceback would only hide it.
        meant = isinstance(error, GradkeepError)
        send(
            WorkerMessage("broken", text=str(error) if meant else shortened(traceback.format_exc()))
        )
        os._exit(BROKEN)
