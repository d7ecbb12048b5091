"""What a worker does: record a step, or answer a trial, and write down what came out.

A result is a JSON file that is there whole or not at all, so a kill at any time loses nothing done.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.compat.dtr.experiments._trial import SIMULATED, TrialWork, write_result
from gradkeep.remat import heuristic, heuristics, read_log, register, simulate, unlimited_peak
from gradkeep.remat.simulator._optimal import optimum_point

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.remat import Heuristic


@dataclass(frozen=True, slots=True, eq=False)
class TrialTask:
    """One thing to do, as a worker reads it."""

    fields: dict[str, Any]
    """What to do."""
    about: dict[str, Any]
    """What the result says besides what came out."""
    out: Path
    timeout: float
    retries: int


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
                result = _result(task.fields)
            write_result(task.out, {**task.about, "retries": 0, **result})
        return [{"done": np.float32(1)} for _ in numbers]


def _result(fields: dict[str, Any]) -> dict[str, Any]:
    asked, budget, do = fields.get("asked", {}), fields.get("budget"), fields["do"]
    room = math.inf if budget is None else budget
    if do in SIMULATED:
        log = Path(fields["log"])
        if fields.get("ratio") is not None:
            room = int(fields["ratio"] * unlimited_peak(read_log(log)))
        if do == "optimal":
            return optimal_trial(log, room, **asked)
        return simulate_trial(log, room, asked)
    # Loads torch, which simulating does without.
    from gradkeep.compat.dtr.experiments import _live as live

    work: TrialWork = fields["work"]
    if do == "record":
        return live.make_log(work, Path(fields["log"]))
    if do == "baseline":
        return live.measure(work)
    if do == "dtr":
        return live.measure_online(work, room, **asked)
    if do == "planned":
        return live.measure_planned(work, room)
    return live.measure_checkpoints(work, **asked)


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
