"""Training in fewer bytes: evict tensors, recompute them when they are needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradkeep.remat._baselines import chen, keep_all, keeping, revolve
from gradkeep.remat._core import Policy
from gradkeep.remat._graphs import chain
from gradkeep.remat._heuristics import Heuristic, heuristic, heuristics, register
from gradkeep.remat._log import read_log
from gradkeep.remat._optimal import Optimum, optimal
from gradkeep.remat._program import Kind, Op, Program, Step
from gradkeep.remat._rewrite import collapse_aliases, eliminate_constants, merge_tuples, simplify
from gradkeep.remat._schedule import Action, Graph, Schedule, checked
from gradkeep.remat._simulate import Outcome, simulate, unlimited_peak
from gradkeep.remat._timeline import Event, Timeline

if TYPE_CHECKING:
    from gradkeep.remat._planned._budget import MemoryBudget, memory_budget
    from gradkeep.remat._planned._report import Explanation, Report
    from gradkeep.remat._recorder import Recorder, record

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
    "Explanation": "gradkeep.remat._planned._report",
    "MemoryBudget": "gradkeep.remat._planned._budget",
    "Recorder": "gradkeep.remat._recorder",
    "Report": "gradkeep.remat._planned._report",
    "memory_budget": "gradkeep.remat._planned._budget",
    "record": "gradkeep.remat._recorder",
}


def __getattr__(name: str) -> Any:
    # Recording and training need torch, simulating does not: the commands answer without loading it.
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'gradkeep.remat' has no attribute {name!r}")
