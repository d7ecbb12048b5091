"""Experiments by configuration: train, record, simulate, and put it all in tables and pictures.

    OUT/results/  one JSON file per trial; what is there is not run again
    OUT/logs/     the recorded steps, one per model with sizes
    OUT/summary/  a CSV table per model
    OUT/graphs/   a picture per model

A trial writes its result in one move when it is done, so a kill at any time loses nothing done.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradkeep.compat.dtr.experiments._jobs import Job, Processes
from gradkeep.compat.dtr.experiments._tables import points, write_graphs, write_summaries
from gradkeep.compat.dtr.experiments._trial import FAILED, LIVE, SIMULATED, read_result
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradkeep.compat.dtr.experiments._config import DtrExperiment
    from gradkeep.compat.dtr.experiments._trial import Trial, TrialWork
    from gradkeep.remat.simulator import SweepRow

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExperimentReport:
    """What an experiment gave."""

    results: tuple[Result, ...]
    """One per trial, in the configuration's order; measurements that a ratio needed come after."""
    ran: int
    reused: int
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> list[SweepRow]:
        """The trials in budgets and with checkpoints, as a sweep's lines."""
        return points(self.results)

    @property
    def failed(self) -> int:
        """Trials that ended with an error or took too long."""
        return sum(result["status"] in FAILED for result in self.results)


def run_experiment(
    experiment: DtrExperiment,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExperimentReport:
    """Run the trials that have no result yet, then write all tables and pictures.

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
        self.processes = Processes(report_errors=experiment.report_errors)
        trials = experiment.trials
        implied = [trial.baseline for trial in trials if trial.ratio is not None]
        asked = {(trial.model, trial.key) for trial in trials}
        extra = {(t.model, t.key): t for t in implied if (t.model, t.key) not in asked}
        self.trials = (*trials, *extra.values())
        self.results: dict[str, Result] = {}
        self.done = 0

    def run(self, workers: int) -> ExperimentReport:
        wanted = {trial.key: trial for trial in self.trials}
        for folder in ("results", "logs"):
            try:
                (self.out / folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RematError(
                    "the folder for results cannot be made", path=self.out, found=str(error)
                ) from error
        for key in wanted:
            found = read_result(self._path(key))
            if found is not None and not (self.retry_failed and found["status"] in FAILED):
                self.results[key] = found
        reused = len(self.results)
        left = [trial for key, trial in wanted.items() if key not in self.results]
        self.total = len(wanted)
        self.done = reused
        self._tell()
        measured = [trial for trial in left if trial.type == "baseline"]
        live = [trial for trial in left if trial.type in LIVE]
        simulated = [trial for trial in left if trial.type in SIMULATED]
        self._run([self._job(trial, _work(trial)) for trial in measured], workers=1)
        self._run(self._possible(live, {}), workers=1)
        logs = self._record(simulated)
        self._run(self._possible(simulated, logs), workers=workers)
        rows = tuple(self._row(trial) for trial in self.trials)
        files = write_summaries(rows, self.out / "summary")
        pictures, notes = write_graphs(rows, self.out / "graphs")
        return ExperimentReport(rows, len(left), reused, (*files, *pictures), notes)

    def _run(self, jobs: list[Job], *, workers: int) -> None:
        if jobs:
            found = self.processes.run(jobs, workers=workers, done=self._one_more)
            for job, result in zip(jobs, found, strict=True):
                self.results[job.about["key"]] = result

    def _record(self, trials: Iterable[Trial]) -> dict[str, Result]:
        """Record each step that has no log yet; the results by the key of the work."""
        found: dict[str, Result] = {}
        jobs: dict[str, Job] = {}
        for trial in trials:
            key = trial.work.key
            log, out = self._log(trial.work), self.out / "logs" / f"{key}.json"
            there = read_result(out)
            if log.exists() and there is not None and there["status"] == "ok":
                found[key] = there
                continue
            job = jobs.get(key)
            jobs[key] = Job(
                {**_work(trial), "do": "record", "log": str(log)},
                {"key": key, "model": trial.model},
                out,
                max(trial.timeout, job.timeout if job else 0.0),
                max(trial.retries, job.retries if job else 0),
            )
        if jobs:
            made = self.processes.run(list(jobs.values()), workers=1, done=lambda: None)
            found.update(zip(jobs, made, strict=True))
        return found

    def _possible(self, trials: Iterable[Trial], logs: dict[str, Result]) -> list[Job]:
        """The jobs of these trials; if what one builds on has failed, then that is its result."""
        jobs = []
        for trial in trials:
            needed = [("recording", logs[trial.work.key])] if trial.type in SIMULATED else []
            if trial.ratio is not None:
                needed.append(("baseline", self.results[trial.baseline.key]))
            failed = next((one for one in needed if one[1]["status"] in FAILED), None)
            if failed is None:
                jobs.append(self._in_budget(trial))
                continue
            what, result = failed
            self.results[trial.key] = {
                **_about(trial),
                "status": result["status"],
                "message": f"its {what} failed: {result.get('message')}",
            }
            self._one_more()
        return jobs

    def _in_budget(self, trial: Trial) -> Job:
        budget = trial.budget
        if trial.ratio is not None:
            budget = int(trial.ratio * self.results[trial.baseline.key]["peak"])
        on: dict[str, Any] = _work(trial)
        if trial.type in SIMULATED:
            on = {"log": str(self._log(trial.work))}
        fields = {**on, "do": trial.type, "asked": trial.asked}
        return self._job(trial, {**fields, "budget": None if math.isinf(budget) else budget})

    def _job(self, trial: Trial, fields: dict[str, Any]) -> Job:
        return Job(fields, _about(trial), self._path(trial.key), trial.timeout, trial.retries)

    def _path(self, key: str) -> Path:
        return self.out / "results" / f"{key}.json"

    def _log(self, work: TrialWork) -> Path:
        return self.out / "logs" / f"{work.key}.log"

    def _row(self, trial: Trial) -> Result:
        # The same question may be asked of two names: the result is shared, the names are not.
        return {**self.results[trial.key], **_about(trial)}

    def _one_more(self) -> None:
        self.done += 1
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total)


def _work(trial: Trial) -> dict[str, Any]:
    return {"do": trial.type, "work": dataclasses.asdict(trial.work)}


def _about(trial: Trial) -> dict[str, Any]:
    return {
        "key": trial.key,
        "model": trial.model,
        "zoo": trial.work.name,
        "type": trial.type,
        "kind": trial.kind,
        "batch_size": dict(trial.work.sizes)["batch_size"],
        "sizes": dict(trial.work.sizes),
        "seed": trial.work.seed,
        **({} if trial.type in ("baseline", "checkpoint") else {"ratio": trial.ratio}),
        **trial.asked,
    }
