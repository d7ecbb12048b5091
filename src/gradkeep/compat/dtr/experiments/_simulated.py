"""Trials on a recorded step: what a heuristic would do, and the best that anything could do."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from gradkeep.remat.simulator import optimum_point, read_log, simulate, unlimited_peak

if TYPE_CHECKING:
    from pathlib import Path


def simulate_trial(log: Path, budget: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the recorded step in the budget."""
    program = read_log(log)
    start = time.perf_counter()
    outcome = simulate(program, budget=budget, **asked)
    spent = time.perf_counter() - start
    return {
        "status": outcome.status,
        "time": outcome.compute / 1e9,
        "base_time": outcome.base_compute / 1e9,
        "remat_time": outcome.remat_compute / 1e9,
        "overhead": outcome.overhead,
        "budget": None if math.isinf(budget) else int(budget),
        "peak": outcome.peak,
        "unlimited_peak": unlimited_peak(program),
        "constant_bytes": program.constant_bytes,
        "operators": len(program.ops),
        "evictions": outcome.evictions,
        "rematerializations": outcome.rematerializations,
        "heuristic_evaluations": outcome.heuristic_evaluations,
        "accesses": outcome.accesses,
        "simulation_seconds": spent,
    }


def optimal_trial(log: Path, budget: float, *, time_limit: float) -> dict[str, Any]:
    """The cheapest schedule for the recorded step, where its graph is small enough to tell."""
    program = read_log(log)
    peak = unlimited_peak(program)
    room = peak if math.isinf(budget) else int(budget)
    start = time.perf_counter()
    found = optimum_point(program, room, time_limit=time_limit)
    spent = time.perf_counter() - start
    result: dict[str, Any] = {
        "status": found.status,
        "budget": None if math.isinf(budget) else int(budget),
        "unlimited_peak": peak,
        "constant_bytes": program.constant_bytes,
        "operators": found.operators,
        "simulation_seconds": spent,
        "message": found.message,
    }
    if found.overhead is not None:
        result |= {"overhead": found.overhead, "peak": found.peak}
    return result
