"""Workers as local processes, supervised and restarted by their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Annotated, Any

from gradkeep._arguments import Limits, check_fields
from gradkeep.errors import FarmError
from gradkeep.farm._worker import (
    BROKEN,
    STOPPED,
    LeaseKeeper,
    Puller,
    StopRequest,
    WorkerMessage,
    broken_worker,
    cores,
    environment,
    stop_on_signals,
    work_in_process,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from gradkeep.farm._worker import Job, JobSpec
    from gradkeep.store import Lease, Rows

_TICK = 0.2
_FAILED_STARTS = 20


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    connection: Connection
    number: int
    sending: threading.Thread
    """Thread that sends the spec, which the worker reads when it has started."""
    heard: float = field(default_factory=time.monotonic)
    ready: bool = False
    leases: tuple[Lease, ...] = ()
    broken: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Workers as spawned processes on this machine.

    Attributes:
        workers: Number of processes; one per core by default.
    """

    workers: Annotated[int, Limits(0, most=1024)] | None = None

    def __post_init__(self) -> None:
        # More on one machine are a typing error.
        check_fields(self, FarmError)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return cores() if self.workers is None else self.workers

    @property
    def threads(self) -> int:
        """Threads per worker: the cores divided by the workers."""
        return max(1, cores() // max(1, self.num_workers))

    def run(self, spec: JobSpec, report: Callable[[], None]) -> None:
        """Run workers until no row is pending, and restart dead ones.

        Args:
            spec: The job and its limits.
            report: Called regularly to report progress.

        Raises:
            FarmError: If a worker fails, or workers die without finishing a row.
        """
        with stop_on_signals() as stop:
            _Supervisor(spec, report).run(range(self.num_workers), stop)
            stop.raise_if_requested()

    def run_along(self, spec: JobSpec, report: Callable[[], None], job: Job) -> None:
        """Run as the first worker in this process, because the others take seconds to start.

        Args:
            spec: The job and its limits.
            report: Called regularly to report progress.
            job: The job of `spec` in this process.

        Raises:
            FarmError: If a worker fails, or workers die without finishing a row.
        """
        others = StopRequest()
        failed: list[BaseException] = []

        def supervise() -> None:
            try:
                _Supervisor(spec, report).run(range(1, self.num_workers), others)
            except BaseException as error:  # for the thread that waits
                failed.append(error)

        beside = threading.Thread(target=supervise, name="supervisor", daemon=True)
        # An interrupt ends the work of this process immediately, as without workers.
        with stop_on_signals(raise_from=1) as stop:
            beside.start()
            try:
                rows = spec.open_rows()
                with LeaseKeeper(spec, rows, end=lambda _: None) as keeper:
                    along = Puller(
                        spec, rows, job, stopped=lambda: bool(failed), longest_wait=_TICK
                    )
                    along.run(keeper)
                others.times = 2  # no row is pending, also for workers that are still starting
            except KeyboardInterrupt:
                if not stop.is_requested:
                    raise  # the job's own
            finally:
                others.times = max(1, others.times)
                beside.join()
            stop.raise_if_requested()
        if failed:
            raise failed[0]


class _Supervisor:
    def __init__(self, spec: JobSpec, report: Callable[[], None]) -> None:
        self._spec, self._report = spec, report
        self._packed = pickle.dumps(spec)
        self._rows: Rows = spec.open_rows()
        self._before = len(self._rows.done())
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._deaths = self._failed_starts = 0
        self._stopping = False

    def run(self, numbers: range, stop: StopRequest) -> None:
        try:
            for number in numbers:
                self._workers.append(self._start(number))
            while self._workers:
                self._turn(stop)
                self._report()
        finally:
            self._kill_all()

    def _turn(self, stop: StopRequest) -> None:
        if stop.is_requested and not self._stopping:
            self._stopping = True
            self._ask_to_stop()
        if stop.is_immediate:
            return self._kill_all()
        watched: list[Any] = [worker.process.sentinel for worker in self._workers]
        watched += [worker.connection for worker in self._workers]
        wait(watched, timeout=_TICK)
        patience = 2 * self._spec.lease_seconds + 5.0
        for worker in list(self._workers):
            self._listen(worker)
            if not worker.process.is_alive():
                self._listen(worker)  # its last messages
                self._workers.remove(worker)
                self._remove_dead(worker)
            elif worker.ready and worker.leases and time.monotonic() - worker.heard > patience:
                # Not even its lease keeper runs: it is stuck in native code that holds the GIL.
                worker.process.kill()
        return None

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        # Send the spec, which may hold a data set, later: with it among the arguments a starting
        # process could not be ended before it has imported torch.
        process = self._context.Process(target=work_in_process, args=(theirs,))
        with environment(self._spec.threads, number):
            process.start()
        theirs.close()
        sending = threading.Thread(target=self._send, args=(ours,), name="spec", daemon=True)
        sending.start()
        return _Worker(process, ours, number, sending)

    def _send(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is handled elsewhere
            connection.send_bytes(self._packed)

    def _listen(self, worker: _Worker) -> None:
        try:
            while worker.connection.poll():
                message: WorkerMessage = worker.connection.recv()
                worker.heard = time.monotonic()
                if message.kind == "ready":
                    worker.ready, self._failed_starts = True, 0
                elif message.kind == "holds":
                    worker.leases = message.leases
                elif message.kind == "finished":
                    worker.finished = True
                else:
                    worker.broken = message.text
        except (EOFError, OSError):
            return  # closed: the process has ended or is about to

    def _remove_dead(self, worker: _Worker) -> None:
        process = worker.process
        process.join()
        code = process.exitcode
        worker.sending.join()
        worker.connection.close()
        process.close()
        if code == BROKEN and worker.broken is not None:
            raise broken_worker("a worker", worker.broken)
        for lease in worker.leases:  # not delivered, whatever the exit code
            if self._rows.has(lease.row):
                self._rows.release(lease)
            else:
                self._rows.fail(lease, f"the worker {lease.owner} died: {_describe(code)}")
        if worker.finished or self._stopping or (code == STOPPED and not worker.leases):
            return
        self._check_progress(worker, code)
        self._workers.append(self._start(worker.number))

    def _check_progress(self, worker: _Worker, code: int | None) -> None:
        # An error predicts failures of other workers, a signal before the first row does not.
        by_error = code is not None and code >= 0
        self._deaths += by_error or bool(worker.leases)
        self._failed_starts += 0 if worker.ready else _FAILED_STARTS if by_error else 1
        barren = self._deaths >= self._spec.give_up_after
        if barren and (done := len(self._rows.done())) > self._before:
            barren, self._deaths, self._before = False, 0, done
        if barren or self._failed_starts >= _FAILED_STARTS:
            raise FarmError(
                "workers die without finishing a row",
                code="farm.workers_die",
                found=f"{self._deaths} ended, the last one by {_describe(code)}",
                fix="Run one row in this process (workers=0) to see why. A script that starts "
                'workers needs `if __name__ == "__main__":` around its code.',
            )

    def _ask_to_stop(self) -> None:
        for worker in self._workers:
            if worker.sending.is_alive():  # it has no rows yet, and sends must not overlap
                worker.process.kill()
                continue
            with contextlib.suppress(OSError):  # it has ended already
                worker.connection.send("stop")

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            self._listen(worker)
            worker.process.join()
            worker.sending.join()
            for lease in worker.leases:
                self._rows.release(lease)
            worker.connection.close()
            worker.process.close()
        self._workers.clear()


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
