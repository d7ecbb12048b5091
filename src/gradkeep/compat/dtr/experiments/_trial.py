"""One trial of an experiment: the question it asks, how a worker answers it, and where that is kept.

A result is a JSON file that is there whole or not at all, so a kill at any time loses nothing done.
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
    from gradkeep.remat.simulator._core import Policy

Type = Literal["baseline", "simrd", "optimal", "dtr", "planned", "checkpoint"]
TYPES: tuple[Type, ...] = ("baseline", "simrd", "optimal", "dtr", "planned", "checkpoint")
"""Plain training; simulated, or the optimum, on its recorded step; on the live model, decided as it
runs, by plan, or with `torch.utils.checkpoint`."""
SIMULATED = ("simrd", "optimal")
FAILED = ("error", "timeout")
"""What ends without an answer; all other endings are answers."""
LIVE = ("dtr", "planned", "checkpoint")
PLACEMENTS = (
    *("2 segments", "3 segments", "4 segments", "8 segments"),
    *("all", "even", "odd", "first half", "last half"),
)
SEGMENTS = re.compile(r"([1-9]\d*) segments?")
"""Where `torch.utils.checkpoint` can be placed in a model, by name."""
_ASKED = {
    "baseline": (),
    "simrd": ("heuristic", "policy", "limit", "sample", "skip_small"),
    "optimal": ("time_limit",),
    "dtr": ("heuristic", "limit", "sample", "skip_small"),
    "planned": (),
    "checkpoint": ("placement",),
}


@dataclass(frozen=True, slots=True)
class TrialWork:
    """What is trained: everything that a recording or a measurement depends on."""

    name: str
    """In the zoo."""
    sizes: tuple[tuple[str, float], ...]
    seed: int = 0
    repeats: int = 5
    warmup: int = 1
    threads: int = 1
    """More than one pays for large sizes; on a busy machine its times mean little."""

    @property
    def key(self) -> str:
        """The same for the same work."""
        return f"{self.name}-{digest(dataclasses.asdict(self))}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement, or one simulation."""

    model: str
    """As the configuration says it."""
    type: Type
    kind: Literal["fixed", "ratio", "param_sweep"]
    work: TrialWork
    budget: float = math.inf
    """Bytes; of a ratio, infinite until the baseline is known."""
    ratio: float | None = None
    heuristic: str = "dtr-eq"
    policy: Policy = "eager"
    limit: float = 10.0
    """More than so many times the plain time is thrashing."""
    sample: bool = False
    """Look at about 2 sqrt(n) storages of the pool only."""
    skip_small: bool = False
    """Pass over storages below 1 % of the mean size."""
    placement: str | None = None
    """Where checkpoints are."""
    time_limit: float = 20.0
    """Seconds for the integer program."""
    timeout: float = 600.0
    retries: int = 0
    """How often a trial that failed is tried again."""
    log: str | None = None
    """Simulate this log in place of one that is recorded; a ratio is one of its own peak."""
    log_mark: str = ""
    """What the log held when the configuration was read."""
    save_log: bool = False
    """Put the log of its step where the configuration says."""

    @property
    def key(self) -> str:
        """The same for the same question, however it was asked for."""
        if self.type == "baseline":
            return f"baseline-{self.work.key}"
        work = dataclasses.asdict(self.work)
        of = [work] if self.log is None else [self.log, self.log_mark]
        question = digest([*of, self.asked, self.ratio, str(self.budget)])
        return f"{self.type}-{self.work.name}-{question}"

    @property
    def asked(self) -> dict[str, Any]:
        """What this type of trial depends on besides the work and the budget."""
        return {name: getattr(self, name) for name in _ASKED[self.type]}

    @property
    def about(self) -> dict[str, Any]:
        """What the result says besides what came out."""
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
            **self.asked,
        }

    @property
    def baseline(self) -> Trial:
        """The measurement that a ratio refers to."""
        plain = Trial(self.model, "baseline", "fixed", self.work)
        return dataclasses.replace(plain, timeout=self.timeout, retries=self.retries)


def digest(value: Any) -> str:
    """A short name for a value of JSON's types."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result: a reader sees all of it or nothing."""
    replace_file(path, json.dumps(result, indent=1) + "\n")


def read_result(path: Path) -> dict[str, Any] | None:
    """A result that is there and whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "status" in found else None


def known_placement(name: str) -> bool:
    """Whether a name means something, whatever the model.

    >>> known_placement("5 segments"), known_placement("everywhere")
    (True, False)
    """
    return name in PLACEMENTS or SEGMENTS.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, eq=False)
class TrialTask:
    """One thing to do, as a worker reads it."""

    trial: Trial
    out: Path
    log: Path | None = None
    budget: float = math.inf
    record: bool = False
    """Record the step of the trial to the log, instead of the trial itself."""

    @property
    def simulated(self) -> bool:
        """Whether nothing is trained."""
        return self.trial.type in SIMULATED and not self.record

    @property
    def about(self) -> dict[str, Any]:
        """What the result says besides what came out."""
        if self.record:
            return {"key": self.trial.work.key, "model": self.trial.model}
        return self.trial.about


@dataclass(frozen=True, slots=True, eq=False)
class TrialJob:
    """The job of a farm: row n is the task n, whose result is written before the row is done."""

    tasks: tuple[TrialTask, ...]
    heuristics: dict[str, Callable[[], Heuristic]] = field(default_factory=dict)
    """Those that were registered where the experiment was started."""

    def __call__(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        for name, make in self.heuristics.items():
            if name not in heuristics():
                register(name, make)
        for number in numbers:
            task = self.tasks[number]
            # The command's own answer goes to stdout: nothing that a model prints may be in it.
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
            return optimal_trial(task.log, budget, **trial.asked)
        return simulate_trial(task.log, budget, trial.asked)
    # Loads torch, which simulating does without.
    from gradkeep.compat.dtr.experiments import _live as live

    if task.record:
        assert task.log is not None
        return live.make_log(trial.work, task.log)
    if trial.type == "baseline":
        return live.measure(trial.work)
    if trial.type == "dtr":
        return live.measure_online(trial.work, budget, **trial.asked)
    if trial.type == "planned":
        return live.measure_planned(trial.work, budget)
    return live.measure_checkpoints(trial.work, **trial.asked)


def simulate_trial(log: Path, budget: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the recorded step in the budget."""
    program = read_log(log)
    start = time.perf_counter()
    trials = heuristic(asked["heuristic"]).trials
    outcomes = [simulate(program, budget=budget, seed=seed, **asked) for seed in range(trials)]
    spent = time.perf_counter() - start
    # Of random choices the mean of their seeds is told, where all of them ran to their end.
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
    """The cheapest schedule for the recorded step, where its graph is small enough to tell."""
    program = read_log(log)
    peak = unlimited_peak(program)
    room = peak if math.isinf(budget) else int(budget)
    start = time.perf_counter()
    found = optimum_point(program, room, time_limit=time_limit)
    result: dict[str, Any] = {
        "status": found.status,
        "budget": None if math.isinf(budget) else int(budget),
        "unlimited_peak": peak,
        "constant_bytes": program.constant_bytes,
        "operators": found.operators,
        "simulation_seconds": time.perf_counter() - start,
        "message": found.message,
    }
    if found.overhead is not None:
        result |= {"overhead": found.overhead, "peak": found.peak}
    return result
