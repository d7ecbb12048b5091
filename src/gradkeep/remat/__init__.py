"""Training within a memory budget: evict tensors and recompute them when they are needed.

`simulator` runs recorded steps in smaller budgets; `planned` and `online` train within a budget. The
modules next to them observe torch: storages, operators and how to run them again.
"""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.remat.simulator._heuristics import heuristic, heuristics, register
from gradkeep.remat.simulator._neighborhoods import Heuristic
from gradkeep.remat.simulator._optimal import Optimum, optimal
from gradkeep.remat.simulator._program import Program, chain, read_log
from gradkeep.remat.simulator._schedule import Graph, chen, keep_all, revolve, simplify
from gradkeep.remat.simulator._simulate import SimulationResult, simulate, unlimited_peak

if TYPE_CHECKING:
    from gradkeep.remat._log_recorder import Recorder, record
    from gradkeep.remat.planned._memory_budget import (
        BudgetPoint,
        BudgetReport,
        Explanation,
        MemoryBudget,
        memory_budget,
    )
    from gradkeep.remat.planned._session import stash

__all__ = [
    "BudgetPoint",
    "BudgetReport",
    "Explanation",
    "Graph",
    "Heuristic",
    "MemoryBudget",
    "Optimum",
    "Program",
    "Recorder",
    "SimulationResult",
    "chain",
    "chen",
    "heuristic",
    "heuristics",
    "keep_all",
    "memory_budget",
    "optimal",
    "read_log",
    "record",
    "register",
    "revolve",
    "simplify",
    "simulate",
    "stash",
    "unlimited_peak",
]

# Simulation does not need torch: commands that only simulate start without loading it.
__getattr__ = lazy_names(
    "gradkeep.remat",
    {
        **dict.fromkeys(("MemoryBudget", "memory_budget"), "gradkeep.remat.planned._memory_budget"),
        **dict.fromkeys(
            ("BudgetPoint", "BudgetReport", "Explanation"), "gradkeep.remat.planned._memory_budget"
        ),
        "stash": "gradkeep.remat.planned._session",
        **dict.fromkeys(("Recorder", "record"), "gradkeep.remat._log_recorder"),
    },
)
