"""Training by plan: record a step, search what to drop, compile the plan, follow it, report."""

from gradkeep.remat.planned._memory_budget import MemoryBudget, memory_budget
from gradkeep.remat.planned._report import (
    BudgetPoint,
    BudgetReport,
    DroppedActivation,
    Explanation,
)
from gradkeep.remat.planned._session import StashedTensor, budget_is_active, stash

__all__ = [
    "BudgetPoint",
    "BudgetReport",
    "DroppedActivation",
    "Explanation",
    "MemoryBudget",
    "StashedTensor",
    "budget_is_active",
    "memory_budget",
    "stash",
]
