"""Training in fewer bytes: evict tensors, recompute them when they are needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradkeep.remat.simulator._baselines import chen, keep_all, keeping, revolve
from gradkeep.remat.simulator._core import Policy
from gradkeep.remat.simulator._heuristics import Heuristic, heuristic, heuristics, register
from gradkeep.remat.simulator._log import read_log
from gradkeep.remat.simulator._optimal import Optimum, optimal
from gradkeep.remat.simulator._program import Kind, Op, Program, Step, chain
from gradkeep.remat.simulator._schedule import (
    Action,
    Graph,
    Schedule,
    checked,
    collapse_aliases,
    eliminate_constants,
    merge_tuples,
    simplify,
)
from gradkeep.remat.simulator._simulate import Event, Outcome, Timeline, simulate, unlimited_peak

if TYPE_CHECKING:
    from gradkeep.remat.planned._memory_budget import MemoryBudget, memory_budget
    from gradkeep.remat.planned._report import Explanation, Report
    from gradkeep.remat.tracing._log_recorder import Recorder, record

__all__ = [
    "Action",
    "Event",
    "Explanation",
    "Graph",
    "Heuristic",
    "Kind",
    "MemoryBudget",
    "Op",
    "Optimum",
    "Outcome",
    "Policy",
    "Program",
    "Recorder",
    "Report",
    "Schedule",
    "Step",
    "Timeline",
    "chain",
    "checked",
    "chen",
    "collapse_aliases",
    "eliminate_constants",
    "heuristic",
    "heuristics",
    "keep_all",
    "keeping",
    "memory_budget",
    "merge_tuples",
    "optimal",
    "read_log",
    "record",
    "register",
    "revolve",
    "simplify",
    "simulate",
    "unlimited_peak",
]


_WITH_TORCH = {
    "Explanation": "gradkeep.remat.planned._report",
    "MemoryBudget": "gradkeep.remat.planned._memory_budget",
    "Recorder": "gradkeep.remat.tracing._log_recorder",
    "Report": "gradkeep.remat.planned._report",
    "memory_budget": "gradkeep.remat.planned._memory_budget",
    "record": "gradkeep.remat.tracing._log_recorder",
}


def __getattr__(name: str) -> Any:
    # Recording and training need torch, simulating does not: the commands answer without loading it.
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'gradkeep.remat' has no attribute {name!r}")
