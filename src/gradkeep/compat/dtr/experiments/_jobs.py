"""Run jobs, each in a process of its own, with a time limit and repeated tries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradkeep.compat.dtr.experiments._trial import FAILED, read_result, write_result
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something for a process of its own to do."""

    fields: dict[str, Any]
    """What to do, as the process reads it."""
    about: dict[str, Any]
    """What the result says besides what came out."""
    out: Path
    timeout: float
    retries: int


@dataclass(slots=True)
class Processes:
    """The processes that run now; all end with `stop`."""

    report_errors: bool = True
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def run(
        self, jobs: Sequence[Job], *, workers: int, done: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """The results of the jobs, in their order."""
        with ThreadPoolExecutor(max(1, workers)) as pool:
            futures = [pool.submit(self._tried, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    self._check(future.result())
                    done()
            except BaseException:
                # Interrupted, or the first failure is the last: end all others before leaving.
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise
        return [future.result() for future in futures]

    def stop(self) -> None:
        """End the processes that run."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()

    def _check(self, result: dict[str, Any]) -> None:
        if not self.report_errors and result["status"] in FAILED:
            raise RematError(
                f"a trial ended with {result['status']}",
                found=f"{result.get('model')}: {result.get('message')}",
                fix="report_errors: true goes on with the other trials",
            )

    def _tried(self, job: Job) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for attempt in range(job.retries + 1):
            result = self._once(job, {**job.about, "retries": attempt})
            if result["status"] not in FAILED or self._stopped:
                break
        if result["status"] in FAILED and not self._stopped:
            write_result(job.out, result)
        return result

    def _once(self, job: Job, about: dict[str, Any]) -> dict[str, Any]:
        fields = {**job.fields, "about": about, "out": str(job.out), "parent": os.getpid()}
        with self._lock:
            if self._stopped:
                return {**about, "status": "error", "message": "stopped"}
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gradkeep.compat.dtr.experiments._trial",
                    json.dumps(fields),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                # An interrupt from the terminal is for the parent: it ends the others itself, and
                # none of them leaves the result that it failed.
                start_new_session=True,
            )
            self._running.add(process)
        try:
            _, told = process.communicate(timeout=job.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            message = f"took longer than {job.timeout:g} s"
            return {**about, "status": "timeout", "message": message}
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode == 0:
            found = read_result(job.out)
            if found is not None:
                return found
        ending = f"signal {-process.returncode}" if process.returncode < 0 else "an error"
        return {**about, "status": "error", "message": told.strip()[-2000:] or f"ended by {ending}"}
