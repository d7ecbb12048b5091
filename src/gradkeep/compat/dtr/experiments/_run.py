"""Run experiments by configuration: train, record, simulate, and write tables and figures.

    OUT/results/  one JSON file per trial; existing results are not run again
    OUT/logs/     the recorded steps, one per model with sizes
    OUT/summary/  a CSV table per model
    OUT/graphs/   a figure per model

Trials run on a farm of local processes, which enforces timeouts and retries. Each
writes its result atomically, so a kill at any time loses no finished trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradkeep.store as stores
from gradkeep import farm
from gradkeep.compat.dtr.experiments._tables import points, write_graphs, write_summaries
from gradkeep.compat.dtr.experiments._trial import (
    FAILED,
    LIVE,
    SIMULATED,
    TrialJob,
    TrialTask,
    read_result,
    write_result,
)
from gradkeep.errors import RematError
from gradkeep.remat.simulator._heuristics import registered_heuristics
from gradkeep.remat.simulator._program import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradkeep.compat.dtr.experiments._config import DtrExperiment
    from gradkeep.compat.dtr.experiments._trial import Trial, TrialWork
    from gradkeep.farm._run import Progress
    from gradkeep.remat.simulator._sweep import SweepRow

Result = dict[str, Any]
_TIMEOUT_MESSAGE = re.compile(
    r"^TimeoutError: row \d+ took longer than \S+ s each\s*\Z", re.MULTILINE
)
_WORKER_SUFFIX = re.compile(r"\nafter \S+ s by \S+\Z")
_GRADKEEP_ERROR = re.compile(r"^gradkeep\.errors\.\w+: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ExperimentReport:
    """Results of an experiment."""

    results: tuple[Result, ...]
    """One per trial, in the order of the configuration, then baselines that a ratio needed."""
    ran: int
    reused: int
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> list[SweepRow]:
        """Rows of a sweep for the trials with budgets and checkpoints."""
        return points(self.results)

    @property
    def failed(self) -> int:
        """Number of trials that failed or timed out."""
        return sum(result["status"] in FAILED for result in self.results)


def run_experiment(
    experiment: DtrExperiment,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExperimentReport:
    """Run the trials without a result, then write all tables and figures.

    Training and recording run one at a time, so that they do not disturb each other; simulations
    run on `workers` processes.
    """
    runner = _ExperimentRunner(Path(out), experiment, retry_failed=retry_failed, progress=progress)
    return runner.run(workers or os.cpu_count() or 1)


class _ExperimentRunner:
    def __init__(
        self,
        out: Path,
        experiment: DtrExperiment,
        *,
        retry_failed: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.out, self.retry_failed, self.progress = out, retry_failed, progress
        self.report_errors = experiment.report_errors
        self.log_dest, self.simrd_config = experiment.log_dest, experiment.simrd_config
        trials = experiment.trials
        implied = [t.baseline for t in trials if t.ratio is not None and t.log is None]
        keys = {(trial.model, trial.key) for trial in trials}
        extra = {(t.model, t.key): t for t in implied if (t.model, t.key) not in keys}
        self.trials = (*trials, *extra.values())
        self.results: dict[str, Result] = {}
        self.done = 0

    def run(self, workers: int) -> ExperimentReport:
        trials = {trial.key: trial for trial in self.trials}
        for folder in ("results", "logs"):
            try:
                (self.out / folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RematError(
                    "the folder for results cannot be created",
                    code="compat.out_not_writable",
                    path=self.out,
                    found=str(error),
                ) from error
        for key in trials:
            result = read_result(self._path(key))
            if result is not None and not (self.retry_failed and result["status"] in FAILED):
                self.results[key] = result
        reused = len(self.results)
        pending = [trial for key, trial in trials.items() if key not in self.results]
        self.total = len(trials)
        self.done = reused
        self._report_progress()
        simulated = [trial for trial in pending if trial.type in SIMULATED]
        # One at a time, each in its own process, so that they do not disturb each other.
        for trial in pending:
            if trial.type == "baseline":
                self._run([TrialTask(trial, self._path(trial.key))], workers=1)
        for task in self._build_tasks([trial for trial in pending if trial.type in LIVE], {}):
            self._run([task], workers=1)
        saved = [trial for trial in self.trials if trial.save_log]
        logs = self._record([*(t for t in simulated if t.log is None), *saved])
        self._run(self._build_tasks(simulated, logs), workers=workers)
        recorded = [
            (trial, self._log(trial.work))
            for trial in saved
            if logs[trial.work.key]["status"] not in FAILED
        ]
        logs_saved = [log for _, log in recorded]
        if self.log_dest is not None:
            logs_saved = save_logs(recorded, self.log_dest, self.simrd_config)
        # Two models may share a result under different names.
        rows = tuple({**self.results[trial.key], **trial.about} for trial in self.trials)
        files = write_summaries(rows, self.out / "summary")
        pictures, notes = write_graphs(rows, self.out / "graphs")
        return ExperimentReport(rows, len(pending), reused, (*files, *pictures, *logs_saved), notes)

    def _run(self, tasks: list[TrialTask], *, workers: int, report_progress: bool = True) -> None:
        """Run tasks and store their results by key, including failures."""
        alike: dict[tuple[float, int], list[TrialTask]] = {}
        for task in tasks:
            alike.setdefault((task.trial.timeout, task.trial.retries), []).append(task)
        for group in alike.values():
            before = self.done

            def progress(finished: int, before: int = before) -> None:
                self.done = before + finished
                self._report_progress()

            self.results |= run_tasks(
                group,
                workers=workers,
                stop_at_failure=not self.report_errors,
                progress=progress if report_progress else lambda _: None,
            )

    def _record(self, trials: Iterable[Trial]) -> dict[str, Result]:
        """Record each step without a log; return the results by the key of the work."""
        results: dict[str, Result] = {}
        slowest: dict[str, Trial] = {}
        for trial in trials:
            key = trial.work.key
            there = read_result(self.out / "logs" / f"{key}.json")
            if self._log(trial.work).exists() and there is not None and there["status"] == "ok":
                results[key] = there
                continue
            other = slowest.get(key, trial)
            timeout, retries = max(trial.timeout, other.timeout), max(trial.retries, other.retries)
            slowest[key] = dataclasses.replace(trial, timeout=timeout, retries=retries)
        for key, trial in slowest.items():
            out = self.out / "logs" / f"{key}.json"
            self._run(
                [TrialTask(trial, out, self._log(trial.work), record=True)],
                workers=1,
                report_progress=False,
            )
            results[key] = self.results.pop(key)
        return results

    def _build_tasks(self, trials: Iterable[Trial], logs: dict[str, Result]) -> list[TrialTask]:
        """Build the tasks of trials; a trial whose prerequisite failed gets that result."""
        jobs = []
        for trial in trials:
            recorded = trial.type in SIMULATED and trial.log is None
            needed = [("recording", logs[trial.work.key])] if recorded else []
            if trial.ratio is not None and trial.log is None:
                needed.append(("baseline", self.results[trial.baseline.key]))
            failed = next((one for one in needed if one[1]["status"] in FAILED), None)
            if failed is None:
                jobs.append(self._build_task(trial))
                continue
            what, result = failed
            self.results[trial.key] = {
                **trial.about,
                "status": result["status"],
                "message": f"its {what} failed: {result.get('message')}",
            }
            self.done += 1
            self._report_progress()
        return jobs

    def _build_task(self, trial: Trial) -> TrialTask:
        budget, log = trial.budget, None
        if trial.log is not None:
            log = Path(trial.log)
        elif trial.type in SIMULATED:
            log = self._log(trial.work)
        if trial.log is None and trial.ratio is not None:
            budget = int(trial.ratio * self.results[trial.baseline.key]["peak"])
        return TrialTask(trial, self._path(trial.key), log, budget)

    def _path(self, key: str) -> Path:
        return self.out / "results" / f"{key}.json"

    def _log(self, work: TrialWork) -> Path:
        return self.out / "logs" / f"{work.key}.log"

    def _report_progress(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total)


class _FirstFailureError(Exception):
    """Stops the run at the first failure."""


def run_tasks(
    tasks: Sequence[TrialTask],
    *,
    workers: int,
    stop_at_failure: bool,
    progress: Callable[[int], None],
) -> dict[str, Result]:
    """Run tasks with one timeout and number of retries as rows of a farm; return the results by key."""
    attempts = tasks[0].trial.retries + 1
    names = {task.trial.heuristic for task in tasks}
    own = {name: make for name, make in registered_heuristics().items() if name in names}

    def look(seen: Progress) -> None:
        progress(seen.done + seen.failed)
        if stop_at_failure and seen.failed:
            raise _FirstFailureError

    with tempfile.TemporaryDirectory(prefix="gradkeep-trials-") as folder:
        store = stores.open(folder, durability="process")
        rows = store.rows("trials", stores.Schema((stores.Array("done"),)), num_rows=len(tasks))
        with contextlib.suppress(_FirstFailureError):
            farm.run(
                store,
                "trials",
                TrialJob(tuple(tasks), own),
                workers=min(workers, len(tasks)),
                threads=max(1 if task.simulated else task.trial.work.threads for task in tasks),
                timeout=tasks[0].trial.timeout,
                max_attempts=attempts,
                # An interrupted trial is run again as a whole.
                grace=0.0,
                # Trials are independent: failures do not predict each other.
                give_up_after=10**9,
                progress=look,
            )
        ended = [
            (tasks[state.row], state)
            for state in rows.states(max_attempts=attempts)
            if state.state in ("done", "failed")
        ]
    results = {task.about["key"]: _finish_task(task, state) for task, state in ended}
    for result in results.values():
        if stop_at_failure and result["status"] in FAILED:
            raise RematError(
                f"a trial ended with status {result['status']}",
                code="compat.trial_failed",
                found=f"{result.get('model')}: {result.get('message')}",
                fix="Set report_errors: true to continue with the other trials.",
            )
    return results


def _finish_task(task: TrialTask, state: stores.RowState) -> Result:
    """Return the result of a task; write failures here, because the worker may be dead."""
    result = read_result(task.out) if state.state == "done" else None
    if result is not None and state.attempts == 0:
        return result
    if result is not None:
        result["retries"] = state.attempts
    else:
        about = {**task.about, "retries": max(state.attempts - 1, 0)}
        result = {**about, **_failure(task, state.error or "the result file is missing")}
    write_result(task.out, result)
    return result


def _failure(task: TrialTask, error: str) -> Result:
    """Extract the message of a row's traceback; only the message for errors of gradkeep."""
    if _TIMEOUT_MESSAGE.search(error):
        return {"status": "timeout", "message": f"took longer than {task.trial.timeout:g} s"}
    text = _WORKER_SUFFIX.sub("", error.rstrip())
    matches = list(_GRADKEEP_ERROR.finditer(text))
    return {
        "status": "error",
        "message": text[matches[-1].end() if matches else 0 :].strip()[-2000:],
    }


def save_logs(
    recorded: Sequence[tuple[Trial, Path]], folder: Path, manifest: str | None
) -> list[Path]:
    """Copy each log as `MODEL-BATCH-BUDGET-KEY.log`; repeating it changes nothing."""
    try:
        written = [_copy_log(trial, log, folder) for trial, log in recorded]
        if manifest is not None:
            written.append(_extend_manifest(folder / manifest, recorded, written))
    except OSError as error:
        raise RematError(
            "log_dest: the logs cannot be saved",
            code="compat.logs_not_saved",
            path=folder,
            found=str(error),
        ) from error
    return list(dict.fromkeys(written))


def _copy_log(trial: Trial, log: Path, folder: Path) -> Path:
    batch = dict(trial.work.sizes)["batch_size"]
    limit = trial.ratio if trial.ratio is not None else trial.budget
    words = "inf" if math.isinf(limit) else f"{limit:g}"
    path = folder / f"{trial.model}-{batch}-{words}-{trial.work.key}.log"
    replace_file(path, log.read_text())
    return path


def _extend_manifest(
    path: Path, recorded: Sequence[tuple[Trial, Path]], written: Sequence[Path]
) -> Path:
    """Add new logs to a manifest."""
    try:
        models = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise RematError(
            "simrd_config exists but cannot be read",
            code="compat.simrd_config",
            path=path,
            found=str(error),
        ) from error
    for (trial, _), log in zip(recorded, written, strict=True):
        listed = models.setdefault(trial.model, [])
        if any(entry.get("log") == str(log) for entry in listed):
            continue
        sizes = dict(trial.work.sizes)
        title = f"{trial.model} ({sizes.pop('batch_size')})"
        description = ", ".join(f"{key} {value:g}" for key, value in sizes.items())
        listed.append(
            {"name": title, "title": title, "desc": description, "log": str(log), "has_start": True}
        )
    write_result(path, models)
    return path
