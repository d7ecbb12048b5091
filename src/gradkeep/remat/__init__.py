"""Training in fewer bytes: evict tensors, recompute them when they are needed.

`simulator` runs recorded steps in smaller budgets, `planned` and `online` train in them, `tracing` is
what these see of torch.
"""

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.remat.simulator import (
    Action,
    Graph,
    Heuristic,
    MemoryEvent,
    Op,
    Optimum,
    Policy,
    Program,
    ProgramStep,
    Schedule,
    SimulationResult,
    StepKind,
    Storage,
    Timeline,
    chain,
    checked,
    chen,
    collapse_aliases,
    eliminate_constants,
    heuristic,
    heuristics,
    keep_all,
    keeping,
    merge_tuples,
    optimal,
    read_log,
    register,
    revolve,
    simplify,
    simulate,
    unlimited_peak,
)

if TYPE_CHECKING:
    from gradkeep.remat.online import OnlineReport
    from gradkeep.remat.planned import (
        BudgetPoint,
        BudgetReport,
        DroppedActivation,
        Explanation,
        MemoryBudget,
        StashedTensor,
        budget_is_active,
        memory_budget,
        stash,
    )
    from gradkeep.remat.tracing import Recorder, record

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
_PLANNED = (
    *("BudgetPoint", "BudgetReport", "DroppedActivation", "Explanation", "MemoryBudget"),
    *("StashedTensor", "budget_is_active", "memory_budget", "stash"),
)
__getattr__ = lazy_names(
    "gradkeep.remat",
    {
        **dict.fromkeys(_PLANNED, "gradkeep.remat.planned"),
        **dict.fromkeys(("Recorder", "record"), "gradkeep.remat.tracing"),
        "OnlineReport": "gradkeep.remat.online",
    },
    renamed={
        "Event": "gradkeep.remat.MemoryEvent",
        "Kind": "gradkeep.remat.StepKind",
        "Outcome": "gradkeep.remat.SimulationResult",
        "Report": "gradkeep.remat.BudgetReport",
        "Step": "gradkeep.remat.ProgramStep",
    },
)
