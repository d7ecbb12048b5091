"""Training in fewer bytes: evict tensors, recompute them when they are needed.

`simulator` runs recorded steps in smaller budgets, `planned` and `online` train in them, `tracing` is
what these see of torch.
"""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.remat.simulator._baselines import chen, keep_all, keeping, revolve
from gradkeep.remat.simulator._core import Policy, Storage
from gradkeep.remat.simulator._cost_ratio import Heuristic
from gradkeep.remat.simulator._heuristics import heuristic, heuristics, register
from gradkeep.remat.simulator._log import read_log
from gradkeep.remat.simulator._optimal import Optimum, optimal
from gradkeep.remat.simulator._program import Op, Program, ProgramStep, StepKind, chain
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
from gradkeep.remat.simulator._simulate import (
    MemoryEvent,
    SimulationResult,
    Timeline,
    simulate,
    unlimited_peak,
)

if TYPE_CHECKING:
    from gradkeep.remat.online._runtime import OnlineReport
    from gradkeep.remat.planned._memory_budget import MemoryBudget, memory_budget
    from gradkeep.remat.planned._report import (
        BudgetPoint,
        BudgetReport,
        DroppedActivation,
        Explanation,
    )
    from gradkeep.remat.planned._session import StashedTensor, budget_is_active, stash
    from gradkeep.remat.tracing._log_recorder import Recorder, record

__all__ = [
    "Action",
    "BudgetPoint",
    "BudgetReport",
    "DroppedActivation",
    "Explanation",
    "Graph",
    "Heuristic",
    "MemoryBudget",
    "MemoryEvent",
    "OnlineReport",
    "Op",
    "Optimum",
    "Policy",
    "Program",
    "ProgramStep",
    "Recorder",
    "Schedule",
    "SimulationResult",
    "StashedTensor",
    "StepKind",
    "Storage",
    "Timeline",
    "budget_is_active",
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
    "stash",
    "unlimited_peak",
]

# Recording and training need torch, simulating does not: the commands answer without loading it.
__getattr__ = lazy_names(
    __name__,
    {
        "BudgetPoint": "gradkeep.remat.planned._report",
        "BudgetReport": "gradkeep.remat.planned._report",
        "DroppedActivation": "gradkeep.remat.planned._report",
        "Explanation": "gradkeep.remat.planned._report",
        "MemoryBudget": "gradkeep.remat.planned._memory_budget",
        "OnlineReport": "gradkeep.remat.online._runtime",
        "Recorder": "gradkeep.remat.tracing._log_recorder",
        "StashedTensor": "gradkeep.remat.planned._session",
        "budget_is_active": "gradkeep.remat.planned._session",
        "memory_budget": "gradkeep.remat.planned._memory_budget",
        "record": "gradkeep.remat.tracing._log_recorder",
        "stash": "gradkeep.remat.planned._session",
    },
)
