"""What a budget says about itself: before running, and after."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep._budgets import format_bytes
from gradkeep.remat.planned._evaluate import Treatment
from gradkeep.remat.planned._planner import floor_of
from gradkeep.remat.planned._search import search_plan

if TYPE_CHECKING:
    from gradkeep.remat.online._runtime import OnlineReport
    from gradkeep.remat.planned._plan_cache import StepPlan
    from gradkeep.remat.planned._planner import BudgetSettings, StepPlanner


@dataclass(frozen=True, slots=True)
class DroppedActivation:
    """A saved tensor that is made again."""

    layer: str
    operator: str
    shape: tuple[int, ...]
    bytes: int
    seconds: float
    """To make it again from saved values around it."""
    again: bool
    """Made anew at every request, instead of once."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        times = ", at every request" if self.again else ""
        return (
            f"{self.operator} {shape} in {self.layer or 'the step'}: frees {format_bytes(self.bytes)}, "
            f"{self.seconds * 1e3:.2f} ms to make again{times}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan does and why."""

    budget: int
    peak: int
    """Bytes without a budget."""
    floor: int
    """The least budget for which a plan was found."""
    predicted_peak: int
    predicted_slowdown: float
    """Time of a step by time without a budget."""
    candidates: int
    dropped: tuple[DroppedActivation, ...]
    """The cheapest per byte first."""
    planning_seconds: float

    def __str__(self) -> str:
        lines = [
            (
                f"budget {format_bytes(self.budget)} of a peak of {format_bytes(self.peak)} "
                f"({self.budget / max(self.peak, 1):.2f}); the floor is {format_bytes(self.floor)}"
            ),
            (
                f"predicted: peak {format_bytes(self.predicted_peak)}, "
                f"time x{self.predicted_slowdown:.3f}"
            ),
            (
                f"dropped: {len(self.dropped)} of {self.candidates} saved tensors that can be made again, "
                "those that cost least per byte first"
            ),
        ]
        lines += [f"  {value}" for value in self.dropped[:20]]
        if len(self.dropped) > 20:
            lines.append(f"  and {len(self.dropped) - 20} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """How the steps so far went."""

    planned: int
    """Steps that followed a plan."""
    recorded: int
    kept: int
    """Steps that kept everything, because no plan fitted."""
    undone: int
    """Steps that were undone, because a value made again differed."""
    online: int
    """Steps that were left to the online runtime."""
    evicting: OnlineReport | None
    """What that did in the latest block."""
    budget: int | None
    predicted_peak: int | None
    measured_peak: int | None
    """The most live tensor bytes that were measured, states of optimizers included. This, the budget and
    the prediction are of the plan that took most."""
    recompute_share: float | None
    """Time spent on making values again, by the time of the rest of the step."""
    rss: int
    """The process's largest resident memory so far, recordings included; allocators give back late."""
    cuda_peak: int | None
    """The largest number of bytes that the CUDA allocator gave out."""
    reasons: tuple[str, ...]
    """Why steps kept everything, the latest last."""

    def __str__(self) -> str:
        lines = [
            (
                f"steps: {self.planned} planned, {self.recorded} recorded, {self.kept} kept everything, "
                f"{self.undone} undone" + (f", {self.online} online" if self.online else "")
            )
        ]
        if self.evicting is not None:
            lines.append(f"online (experimental): {self.evicting}")
        if self.budget is not None and self.predicted_peak is not None:
            measured = "not measured yet"
            if self.measured_peak is not None:
                measured = format_bytes(self.measured_peak)
            lines.append(
                f"live tensors: peak {measured}, predicted {format_bytes(self.predicted_peak)}, "
                f"budget {format_bytes(self.budget)}"
            )
        if self.recompute_share is not None:
            lines.append(f"recomputation: {self.recompute_share:.1%} of the time of the rest")
        lines.append(f"process: largest resident memory {format_bytes(self.rss)}")
        if self.cuda_peak is not None:
            lines.append(f"CUDA: largest allocation {format_bytes(self.cuda_peak)}")
        lines += [f"note: {reason}" for reason in dict.fromkeys(self.reasons[-3:])]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """What a budget costs."""

    budget: int
    fits: bool
    peak: int
    """Predicted, of the best plan; if it does not fit, the least that was found."""
    slowdown: float

    def __str__(self) -> str:
        if not self.fits:
            return f"{format_bytes(self.budget)}: does not fit; {format_bytes(self.peak)} would"
        return f"{format_bytes(self.budget)}: time x{self.slowdown:.3f}"


def budget_point(plan: StepPlan, budget: int, settings: BudgetSettings) -> BudgetPoint:
    """Plan a recorded step for a budget."""
    problem = plan.compiled.problem
    found = search_plan(problem, budget, seed=settings.seed, effort=settings.effort)
    slowdown = 1 + found.evaluation.seconds / max(problem.trace.seconds, 1e-9)
    return BudgetPoint(budget, found.fits, found.evaluation.peak, slowdown)


def explain_plan(plan: StepPlan, settings: BudgetSettings) -> Explanation:
    """Tell what a plan drops; finding the floor takes as long as planning."""
    problem, trace = plan.compiled.problem, plan.compiled.trace
    evaluation = plan.compiled.evaluation
    found = []
    for candidate, state in zip(problem.candidates, plan.compiled.states, strict=True):
        if state == Treatment.KEEP:
            continue
        maker = trace.values[candidate.value].maker
        assert maker is not None
        operation = trace.operations[maker]
        made = next(made for made in operation.makes if made.value == candidate.value)
        found.append(
            DroppedActivation(
                layer=operation.layer,
                operator=operation.name,
                shape=made.geometry.size,
                bytes=candidate.size,
                seconds=candidate.cost,
                again=state == Treatment.AGAIN,
            )
        )
    least = floor_of(problem, seed=settings.seed, effort=settings.effort)
    lowest = least.evaluation.peak + plan.reserve
    floor = min(lowest, plan.predicted_peak if plan.drops else plan.peak)
    return Explanation(
        budget=plan.budget,
        peak=problem.peak,
        floor=floor,
        predicted_peak=plan.predicted_peak,
        predicted_slowdown=1 + evaluation.seconds / max(trace.seconds, 1e-9),
        candidates=len(problem.candidates),
        dropped=tuple(sorted(found, key=lambda value: value.seconds / value.bytes)),
        planning_seconds=plan.seconds,
    )


def _most_bytes(plan: StepPlan) -> tuple[int, int]:
    return plan.measured_peak or 0, plan.predicted_peak


def budget_report(planner: StepPlanner) -> BudgetReport:
    """Sum up the steps so far."""
    counts = planner.counts
    plan = max(planner.plans, key=_most_bytes, default=planner.last)
    rest = counts.busy - counts.recomputed
    scale = 1 if sys.platform == "darwin" else 1024
    return BudgetReport(
        planned=counts.planned,
        recorded=counts.recorded,
        kept=counts.kept,
        undone=counts.undone,
        online=counts.online,
        evicting=planner.online_fallback.latest,
        budget=None if plan is None else plan.budget,
        predicted_peak=None if plan is None else plan.predicted_peak,
        measured_peak=None if plan is None else plan.measured_peak,
        recompute_share=counts.recomputed / rest if rest > 0 else None,
        rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        cuda_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        reasons=tuple(counts.reasons),
    )
