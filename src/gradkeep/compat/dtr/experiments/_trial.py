"""One trial of an experiment: its options, how a worker runs it, and its result file.

A result is a JSON file that is written atomically, so a kill at any time loses no finished trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.remat import heuristic, heuristics, read_log, register, simulate, unlimited_peak
from gradkeep.remat.simulator._optimal import optimum_point
from gradkeep.remat.simulator._program import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gradkeep.remat import Heuristic
    from gradkeep.remat._eviction_core import Policy

Type = Literal["baseline", "simrd", "optimal", "dtr", "planned", "checkpoint"]
TYPES: tuple[Type, ...] = ("baseline", "simrd", "optimal", "dtr", "planned", "checkpoint")
"""Plain training; simulation or optimum of its recorded step; on the live model: online eviction, a plan,
or `torch.utils.checkpoint`.
"""
SIMULATED = ("simrd", "optimal")
FAILED = ("error", "timeout")
"""Statuses without an answer; all others are answers."""
LIVE = ("dtr", "planned", "checkpoint")
PLACEMENTS = (
    *("2 segments", "3 segments", "4 segments", "8 segments"),
    *("all", "even", "odd", "first half", "last half"),
)
SEGMENTS = re.compile(r"([1-9]\d*) segments?")
"""Pattern of the placement in segments."""
_OPTIONS = {
    "baseline": (),
    "simrd": ("heuristic", "policy", "limit", "sample", "skip_small"),
    "optimal": ("time_limit",),
    "dtr": ("heuristic", "limit", "sample", "skip_small"),
    "planned": (),
    "checkpoint": ("placement",),
}


@dataclass(frozen=True, slots=True)
class TrialWork:
    """Everything that a recording or a measurement depends on."""

    name: str
    """Name in the zoo."""
    sizes: tuple[tuple[str, float], ...]
    seed: int = 0
    repeats: int = 5
    warmup: int = 1
    threads: int = 1
    """More than one pays off for large sizes; on a busy machine its times are unreliable."""

    @property
    def key(self) -> str:
        """Key that identifies the work."""
        return f"{self.name}-{digest(dataclasses.asdict(self))}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement or simulation."""

    model: str
    """Name in the configuration."""
    type: Type
    kind: Literal["fixed", "ratio", "param_sweep"]
    work: TrialWork
    budget: float = math.inf
    """Bytes; with a ratio, infinite until the baseline is known."""
    ratio: float | None = None
    heuristic: str = "dtr-eq"
    policy: Policy = "eager"
    limit: float = 10.0
    """Slowdown above which it is thrashing."""
    sample: bool = False
    """Score only about 2 sqrt(n) storages of the pool."""
    skip_small: bool = False
    """Skip storages below 1 % of the mean size."""
    placement: str | None = None
    """Placement of checkpoints."""
    time_limit: float = 20.0
    """Seconds for the integer program."""
    timeout: float = 600.0
    retries: int = 0
    """Number of retries after a failure."""
    log: str | None = None
    """Simulate this log instead of a recorded one; a ratio refers to its own peak."""
    log_mark: str = ""
    """Hash of the log when the configuration was read."""
    save_log: bool = False
    """Save the log of its step where the configuration says."""

    @property
    def key(self) -> str:
        """Key that identifies the trial, independent of its spelling in the configuration."""
        if self.type == "baseline":
            return f"baseline-{self.work.key}"
        work = dataclasses.asdict(self.work)
        of = [work] if self.log is None else [self.log, self.log_mark]
        question = digest([*of, self.options, self.ratio, str(self.budget)])
        return f"{self.type}-{self.work.name}-{question}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of this type of trial besides the work and the budget."""
        return {name: getattr(self, name) for name in _OPTIONS[self.type]}

    @property
    def about(self) -> dict[str, Any]:
        """Description of the trial in its result."""
        sizes = dict(self.work.sizes)
        return {
            "key": self.key,
            "model": self.model,
            "zoo": self.work.name,
            "type": self.type,
            "kind": self.kind,
            "batch_size": sizes["batch_size"],
            "sizes": sizes,
            "seed": self.work.seed,
            **({} if self.type in ("baseline", "checkpoint") else {"ratio": self.ratio}),
            **self.options,
        }

    @property
    def baseline(self) -> Trial:
        """Measurement that a ratio refers to."""
        plain = Trial(self.model, "baseline", "fixed", self.work)
        return dataclasses.replace(plain, timeout=self.timeout, retries=self.retries)


def digest(value: Any) -> str:
    """Return a short hash of a value of JSON types."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result atomically."""
    replace_file(path, json.dumps(result, indent=1) + "\n")


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result, or return None if there is no complete one."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and "status" in result else None


def is_placement(name: str) -> bool:
    """Return True if a name is a placement for some model.

    >>> is_placement("5 segments"), is_placement("everywhere")
    (True, False)
    """
    return name in PLACEMENTS or SEGMENTS.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, eq=False)
class TrialTask:
    """One task of a worker."""

    trial: Trial
    out: Path
    log: Path | None = None
    budget: float = math.inf
    record: bool = False
    """Record the step of the trial to the log instead of running the trial."""

    @property
    def simulated(self) -> bool:
        """Return True if nothing is trained."""
        return self.trial.type in SIMULATED and not self.record

    @property
    def about(self) -> dict[str, Any]:
        """Description of the task in its result."""
        if self.record:
            return {"key": self.trial.work.key, "model": self.trial.model}
        return self.trial.about


@dataclass(frozen=True, slots=True, eq=False)
class TrialJob:
    """Job of a farm: row n is task n, whose result is written before the row is done."""

    tasks: tuple[TrialTask, ...]
    heuristics: dict[str, Callable[[], Heuristic]] = field(default_factory=dict)
    """Heuristics registered in the starting process."""

    def __call__(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        for name, make in self.heuristics.items():
            if name not in heuristics():
                register(name, make)
        for number in numbers:
            task = self.tasks[number]
            # Keep output of models out of the command's own output.
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                result = _result(task)
            write_result(task.out, {**task.about, "retries": 0, **result})
        return [{"done": np.float32(1)} for _ in numbers]


def _result(task: TrialTask) -> dict[str, Any]:
    trial, budget = task.trial, task.budget
    if task.simulated:
        assert task.log is not None
        if trial.log is not None and trial.ratio is not None:
            budget = int(trial.ratio * unlimited_peak(read_log(task.log)))
        if trial.type == "optimal":
            return optimal_trial(task.log, budget, **trial.options)
        return simulate_trial(task.log, budget, trial.options)
    # Loads torch, which simulations do not need.
    from gradkeep.compat.dtr.experiments import _live as live

    if task.record:
        assert task.log is not None
        return live.make_log(trial.work, task.log)
    if trial.type == "baseline":
        return live.measure(trial.work)
    if trial.type == "dtr":
        return live.measure_online(trial.work, budget, **trial.options)
    if trial.type == "planned":
        return live.measure_planned(trial.work, budget)
    return live.measure_checkpoints(trial.work, **trial.options)


def simulate_trial(log: Path, budget: float, options: dict[str, Any]) -> dict[str, Any]:
    """Simulate the recorded step within the budget."""
    program = read_log(log)
    start = time.perf_counter()
    trials = heuristic(options["heuristic"]).trials
    outcomes = [simulate(program, budget=budget, seed=seed, **options) for seed in range(trials)]
    spent = time.perf_counter() - start
    # Random choices report the mean over seeds if all of them finished.
    outcome = next((one for one in outcomes if one.status != "ok"), outcomes[0])
    overheads = [one.overhead for one in outcomes]
    counts = (
        *("status", "overhead", "peak", "evictions", "rematerializations"),
        *("heuristic_evaluations", "accesses"),
    )
    result = {name: getattr(outcome, name) for name in counts} | {
        "time": outcome.compute / 1e9,
        "base_time": outcome.base_compute / 1e9,
        "remat_time": outcome.remat_compute / 1e9,
        "budget": None if math.isinf(budget) else int(budget),
        "unlimited_peak": unlimited_peak(program),
        "constant_bytes": program.constant_bytes,
        "operators": len(program.ops),
        "simulation_seconds": spent,
    }
    if trials > 1 and outcome.status == "ok":
        mean = sum(overheads) / trials
        result |= {
            "overhead": mean,
            "least_overhead": min(overheads),
            "most_overhead": max(overheads),
            "time": mean * outcome.base_compute / 1e9,
            "remat_time": (mean - 1) * outcome.base_compute / 1e9,
        }
    return result


def optimal_trial(log: Path, budget: float, *, time_limit: float) -> dict[str, Any]:
    """Find the cheapest schedule of the recorded step, if its graph is small enough."""
    program = read_log(log)
    peak = unlimited_peak(program)
    allowed = peak if math.isinf(budget) else int(budget)
    start = time.perf_counter()
    optimum = optimum_point(program, allowed, time_limit=time_limit)
    result: dict[str, Any] = {
        "status": optimum.status,
        "budget": None if math.isinf(budget) else int(budget),
        "unlimited_peak": peak,
        "constant_bytes": program.constant_bytes,
        "operators": optimum.operators,
        "simulation_seconds": time.perf_counter() - start,
        "message": optimum.message,
    }
    if optimum.overhead is not None:
        result |= {"overhead": optimum.overhead, "peak": optimum.peak}
    return result
