"""`memory_budget`: train inside a number of bytes, without changing the model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from gradkeep import _arguments
from gradkeep._budgets import format_bytes, parse_budget, parse_bytes
from gradkeep.errors import BudgetError, RematError, StepChangedError
from gradkeep.remat.planned._evaluate import Treatment
from gradkeep.remat.planned._plan_cache import read_plans, write_plans
from gradkeep.remat.planned._planner import BudgetSettings, Mode, StepPlanner, find_floor
from gradkeep.remat.planned._search import search_plan
from gradkeep.remat.planned._session import BudgetSession, current_session, stash
from gradkeep.remat.simulator._heuristics import heuristic as heuristic_named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from gradkeep.remat.online._runtime import OnlineReport
    from gradkeep.remat.planned._plan_cache import StepPlan
    from gradkeep.remat.planned._programs import Check
    from gradkeep.remat.planned._session import StashedTensor


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
    unplanned: int
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
                f"steps: {self.planned} planned, {self.recorded} recorded, {self.unplanned} kept everything, "
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
    plan_found = search_plan(problem, budget, seed=settings.seed, effort=settings.effort)
    slowdown = 1 + plan_found.evaluation.seconds / max(problem.trace.seconds, 1e-9)
    return BudgetPoint(budget, plan_found.fits, plan_found.evaluation.peak, slowdown)


def explain_plan(plan: StepPlan, settings: BudgetSettings) -> Explanation:
    """Tell what a plan drops; finding the floor takes as long as planning."""
    problem, trace = plan.compiled.problem, plan.compiled.trace
    evaluation = plan.compiled.evaluation
    dropped = []
    for candidate, state in zip(problem.candidates, plan.compiled.states, strict=True):
        if state == Treatment.KEEP:
            continue
        maker = trace.values[candidate.value].maker
        assert maker is not None
        operation = trace.operations[maker]
        result = next(result for result in operation.makes if result.value == candidate.value)
        dropped.append(
            DroppedActivation(
                layer=operation.layer,
                operator=operation.name,
                shape=result.geometry.size,
                bytes=candidate.size,
                seconds=candidate.cost,
                again=state == Treatment.REPEAT,
            )
        )
    least = find_floor(problem, seed=settings.seed, effort=settings.effort)
    lowest = least.evaluation.peak + plan.reserve
    floor = min(lowest, plan.predicted_peak if plan.drops else plan.peak)
    return Explanation(
        budget=plan.budget,
        peak=problem.peak,
        floor=floor,
        predicted_peak=plan.predicted_peak,
        predicted_slowdown=1 + evaluation.seconds / max(trace.seconds, 1e-9),
        candidates=len(problem.candidates),
        dropped=tuple(sorted(dropped, key=lambda value: value.seconds / value.bytes)),
        planning_seconds=plan.seconds,
    )


def budget_report(planner: StepPlanner) -> BudgetReport:
    """Sum up the steps so far."""
    counts = planner.counts
    plan = max(
        planner.plans, key=lambda p: (p.measured_peak or 0, p.predicted_peak), default=planner.last
    )
    other_seconds = counts.busy - counts.recomputed
    scale = 1 if sys.platform == "darwin" else 1024
    return BudgetReport(
        planned=counts.planned,
        recorded=counts.recorded,
        unplanned=counts.unplanned,
        undone=counts.undone,
        online=counts.online,
        evicting=planner.online_fallback.latest,
        budget=None if plan is None else plan.budget,
        predicted_peak=None if plan is None else plan.predicted_peak,
        measured_peak=None if plan is None else plan.measured_peak,
        recompute_share=counts.recomputed / other_seconds if other_seconds > 0 else None,
        rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        cuda_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        reasons=tuple(counts.reasons),
    )


P = ParamSpec("P")
T = TypeVar("T")


class MemoryBudget:
    """A budget for training steps; made by `memory_budget`."""

    def __init__(self, settings: BudgetSettings, *, planner: StepPlanner | None = None) -> None:
        self._planner = StepPlanner(settings) if planner is None else planner
        self._session: BudgetSession | None = None

    def __repr__(self) -> str:
        return f"memory_budget({self._planner.settings.budget!r})"

    def __enter__(self) -> Self:
        session = BudgetSession(self._planner, automatic=True)
        session.open()
        self._session = session
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(error)

    @contextlib.contextmanager
    def step(self, inputs: Any = None) -> Iterator[Self]:
        """One training step, whatever it does: several forward and backward passes, accumulation.

        `inputs` are tensors, in any nesting, that the step reads: those which autograd does not save
        can then be read again.
        """
        with self._step(inputs):
            yield self

    @contextlib.contextmanager
    def _step(self, inputs: Any, **options: bool) -> Iterator[None]:
        tensors = tuple(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        session = BudgetSession(self._planner, automatic=False, inputs=tensors, **options)
        session.open()
        try:
            yield
        except BaseException as error:
            session.close(error)
            raise
        session.close(None)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate a function that does one training step.

        If the step turns out to differ from its plan when gradients are already on their way, what it
        changed is put back and it is run again, keeping everything.
        """

        self._planner.repeatable = True

        @functools.wraps(function)
        def budgeted(*args: P.args, **kwargs: P.kwargs) -> T:
            inputs = (args, kwargs)
            try:
                with self._step(inputs, repeatable=True):
                    return function(*args, **kwargs)
            except StepChangedError:
                with self._step(inputs, keep_all=True):
                    return function(*args, **kwargs)

        return budgeted

    @_arguments.checked(RematError)
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Never drop this tensor; call it in every step. Returns the tensor."""
        session = current_session()
        if session is not None:
            session.pin(tensor)
        return tensor

    @_arguments.checked(RematError)
    def stash(self, tensor: torch.Tensor) -> StashedTensor:
        """Save a tensor for a hook of the backward pass, where `.get()` gives it back, once.

        Unlike one that is simply held, it may be dropped and made again.
        """
        return stash(tensor)

    def explain(self) -> Explanation:
        """What the latest plan drops and why, its predicted peak and slowdown, and the floor."""
        self._planner.make_plans()
        return explain_plan(self._latest(), self._planner.settings)

    def report(self) -> BudgetReport:
        """How the steps so far went: measured peak, recomputation, resident memory."""
        return budget_report(self._planner)

    def replan(self, budget: float | str) -> MemoryBudget:
        """Another budget for the same steps, planned from the same recordings."""
        self._planner.make_plans()
        settings = dataclasses.replace(self._planner.settings, budget=parse_budget(budget))
        return MemoryBudget(settings, planner=self._planner.replan(settings))

    def curve(self, budgets: Sequence[float | str]) -> tuple[BudgetPoint, ...]:
        """What each of these budgets would cost the latest plan's step; nothing is run.

        Cost: seconds of planning per budget.
        """
        self._planner.make_plans()
        plan = self._latest()
        settings = self._planner.settings
        all_settings = [
            dataclasses.replace(settings, budget=parse_budget(budget)) for budget in budgets
        ]
        return tuple(budget_point(plan, one.bytes_of(plan.peak), one) for one in all_settings)

    def _latest(self) -> StepPlan:
        if self._planner.last is None:
            raise RematError(
                "there is no plan yet",
                found=f"{self._planner.counts.recorded} recorded steps: {self._planner.explain_missing_plan()}",
                expected=f"{self._planner.settings.recordings} that do the same",
                fix="train a few steps inside the budget, all of the same kind",
            )
        return self._planner.last

    @_arguments.checked(RematError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far as JSON."""
        self._planner.make_plans()
        write_plans(path, self._planner.plans)

    @_arguments.checked(RematError)
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Read plans; each is used as soon as two recordings show the step that it was made for."""
        self._planner.saved |= {plan.digest: plan for plan in read_plans(path)}
        return self


@_arguments.checked(BudgetError)
def memory_budget(
    budget: float | str,
    *,
    mode: Mode = "auto",
    seed: int = 0,
    recordings: int = 3,
    min_size: int | str | None = None,
    effort: float = 1.0,
    heuristic: str = "dtr-eq",
    check: Check = "full",
) -> MemoryBudget:
    """Train inside a number of bytes: exactly the same numbers, without changing the model.

    `budget` is bytes, text such as `"2GiB"`, or a fraction (a float up to 1) of what a step takes
    without a budget. Counted are the live bytes of tensors. The first steps (`recordings`, at least 2)
    run as always and are recorded; from then on activations are dropped and made again by plan. Use it
    as a context manager around one or many training steps, as `with budget.step(inputs=batch):`, or as
    a decorator of a step function. Cost: seconds of planning (`effort` scales them), then what
    `explain` predicts.

    `mode="online"`, experimental, evicts storages while the step runs, chosen by a `heuristic`, for
    models whose steps differ each time: operators take tens of microseconds longer. `"auto"` plans,
    and turns to it after repeated misses, with a `BudgetWarning`.

    Whatever is made again is compared with what it was before autograd gets it: every byte, by a hash of
    64 bits. `check="sampled"` compares about 32 numbers of each tensor instead: a hidden change of few
    elements, of a kind that the autograd graph does not show, can then give a wrong gradient unnoticed.

    >>> import torch, gradkeep as gk
    >>> net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    ...                             for _ in range(6)))
    >>> budget = gk.memory_budget(0.8)
    >>> with budget:
    ...     for _ in range(5):
    ...         net.zero_grad()
    ...         net(torch.ones(256, 64)).sum().backward()
    >>> done = budget.report()
    >>> done.recorded, done.planned, done.measured_peak <= done.budget
    (3, 2, True)
    """
    if recordings < 2:
        raise BudgetError(
            f"too few recordings: {recordings}; expected at least 2, to see what stays the same"
        )
    smallest = None if min_size is None else parse_bytes(min_size)
    if not effort > 0:
        raise BudgetError("the effort of planning is positive", found=effort)
    heuristic_named(heuristic)  # tells now that there is none, not in the middle of a training
    return MemoryBudget(
        BudgetSettings(
            parse_budget(budget), seed, smallest, recordings, effort, mode, heuristic, check
        )
    )
