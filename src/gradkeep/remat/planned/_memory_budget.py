"""`memory_budget`: train within a number of bytes, without changing the model."""

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
    """A saved tensor that is recomputed."""

    layer: str
    operator: str
    shape: tuple[int, ...]
    bytes: int
    seconds: float
    """Time to recompute it from saved values around it."""
    again: bool
    """Recomputed at every request instead of once."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        times = ", at every request" if self.again else ""
        return (
            f"{self.operator} {shape} in {self.layer or 'the step'}: frees {format_bytes(self.bytes)}, "
            f"{self.seconds * 1e3:.2f} ms to recompute{times}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Predicted effect of a plan, and the saved tensors that it drops.

    Attributes:
        budget: Bytes.
        peak: Bytes of the step without a budget.
        floor: Smallest budget for which a plan was found, in bytes.
        predicted_peak: Bytes of the step within the budget.
        predicted_slowdown: Time of a step divided by its time without a budget.
        candidates: Number of saved tensors that can be recomputed.
        dropped: Saved tensors that are dropped, cheapest per byte first.
        planning_seconds: Time that planning took.
    """

    budget: int
    peak: int
    floor: int
    predicted_peak: int
    predicted_slowdown: float
    candidates: int
    dropped: tuple[DroppedActivation, ...]
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
                f"dropped: {len(self.dropped)} of {self.candidates} saved tensors that can be recomputed, "
                "cheapest per byte first"
            ),
        ]
        lines += [f"  {value}" for value in self.dropped[:20]]
        if len(self.dropped) > 20:
            lines.append(f"  and {len(self.dropped) - 20} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Counts and measurements of the steps so far.

    Attributes:
        planned: Steps that followed a plan.
        recorded: Steps that were recorded.
        unplanned: Steps that kept everything, because no plan matched.
        undone: Steps that were undone, because a recomputed value differed.
        online: Steps that ran in the online runtime.
        evicting: Report of the online runtime on the latest block.
        budget: Bytes, of the plan with the largest peak; None without a plan.
        predicted_peak: Predicted live bytes of that plan.
        measured_peak: Largest measured number of live tensor bytes of that plan, optimizer states
            included.
        resident_budget: Allowed rise of resident memory over the beginning of a step, in bytes; None where it is
            not limited: on devices, with other allocators, and for steps below 64 MiB.
        resident_peak: Largest measured rise of resident memory of that plan's steps.
        recompute_share: Time of recomputation divided by the time of the rest of the step.
        rss: Largest resident memory of the process in bytes, recordings included; allocators return
            memory late.
        cuda_peak: Largest number of bytes allocated by the CUDA allocator, or None.
        reasons: Why steps kept everything, the latest last.
    """

    planned: int
    recorded: int
    unplanned: int
    undone: int
    online: int
    evicting: OnlineReport | None
    budget: int | None
    predicted_peak: int | None
    measured_peak: int | None
    resident_budget: int | None
    resident_peak: int | None
    recompute_share: float | None
    rss: int
    cuda_peak: int | None
    reasons: tuple[str, ...]

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
        if self.resident_budget is not None and self.resident_peak is not None:
            lines.append(
                f"resident memory: rise of {format_bytes(self.resident_peak)} in a step, "
                f"limit {format_bytes(self.resident_budget)}"
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
    """Predicted cost of a budget.

    Attributes:
        budget: Bytes.
        fits: True if a plan fits the budget.
        peak: Predicted bytes of the best plan; if it does not fit, the smallest peak found.
        slowdown: Time of a step divided by its time without a budget.
    """

    budget: int
    fits: bool
    peak: int
    slowdown: float

    def __str__(self) -> str:
        if not self.fits:
            return f"{format_bytes(self.budget)}: does not fit; {format_bytes(self.peak)} would"
        return f"{format_bytes(self.budget)}: time x{self.slowdown:.3f}"


def budget_point(plan: StepPlan, budget: int, settings: BudgetSettings) -> BudgetPoint:
    """Plan a recorded step for a budget."""
    problem = plan.compiled.problem
    best = search_plan(problem, budget, seed=settings.seed, effort=settings.effort)
    slowdown = 1 + best.evaluation.seconds / max(problem.trace.seconds, 1e-9)
    return BudgetPoint(budget, best.fits, best.evaluation.peak, slowdown)


def explain_plan(plan: StepPlan, settings: BudgetSettings) -> Explanation:
    """Explain what a plan drops; finding the floor takes as long as planning."""
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
    """Summarize the steps so far."""
    counts = planner.counts
    plan = max(
        planner.plans, key=lambda p: (p.measured_peak or 0, p.predicted_peak), default=planner.last
    )
    other_seconds = counts.busy - counts.recomputed
    scale = 1 if sys.platform == "darwin" else 1024
    resident = None if plan is None else plan.resident
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
        resident_budget=None if resident is None else resident.rise,
        resident_peak=None if resident is None else resident.peak,
        recompute_share=counts.recomputed / other_seconds if other_seconds > 0 else None,
        rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        cuda_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        reasons=tuple(counts.reasons),
    )


P = ParamSpec("P")
T = TypeVar("T")


class MemoryBudget:
    """A budget for training steps; create it with `memory_budget`.

    Args:
        settings: Validated options of `memory_budget`.
        planner: Planner with plans made from existing recordings.
    """

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
        """Run one training step in a `with` block, including several passes or gradient accumulation.

        Args:
            inputs: Tensors, in any nesting, that the step reads; they can then be used for recomputation even
                if autograd does not save them.

        Returns:
            A context manager.
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
        """Decorate a function that runs one training step.

        If the step differs from its plan when gradients are already being computed, its changes are
        undone and it runs again without dropping anything.
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
        """Never drop a tensor; call this in every step.

        Args:
            tensor: The tensor to keep.

        Returns:
            The same tensor.
        """
        session = current_session()
        if session is not None:
            session.pin(tensor)
        return tensor

    @_arguments.checked(RematError)
    def stash(self, tensor: torch.Tensor) -> StashedTensor:
        """Save a tensor for a hook of the backward pass.

        Unlike a tensor that the hook holds itself, it may be dropped and recomputed.

        Args:
            tensor: The tensor to save.

        Returns:
            A handle whose `.get()` returns the tensor once.
        """
        return stash(tensor)

    def explain(self) -> Explanation:
        """Explain the latest plan: what it drops, its predicted peak and slowdown, and the floor.

        Returns:
            The explanation; `str` of it is a readable summary.

        Raises:
            RematError: If there is no plan yet.
        """
        self._planner.make_plans()
        return explain_plan(self._latest(), self._planner.settings)

    def report(self) -> BudgetReport:
        """Report on the steps so far: measured peak, recomputation, resident memory.

        Returns:
            The report; `str` of it is a readable summary.
        """
        return budget_report(self._planner)

    def replan(self, budget: float | str) -> MemoryBudget:
        """Plan the recorded steps for another budget.

        Args:
            budget: Bytes, text such as `"2GiB"`, or a fraction of the peak without a budget.

        Returns:
            A new budget with plans from the same recordings.

        Raises:
            BudgetError: If a step does not fit the budget.
        """
        self._planner.make_plans()
        settings = dataclasses.replace(self._planner.settings, budget=parse_budget(budget))
        return MemoryBudget(settings, planner=self._planner.replan(settings))

    def curve(self, budgets: Sequence[float | str]) -> tuple[BudgetPoint, ...]:
        """Predict the cost of several budgets for the step of the latest plan, without running it.

        Cost: seconds of planning per budget.

        Args:
            budgets: Budgets as in `memory_budget`.

        Returns:
            One point per budget.

        Raises:
            RematError: If there is no plan yet.
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
                code="remat.no_plan",
                found=f"{self._planner.counts.recorded} recorded steps: {self._planner.explain_missing_plan()}",
                expected=f"{self._planner.settings.recordings} identical steps",
                fix="Train a few steps inside the budget, all of the same kind.",
            )
        return self._planner.last

    @_arguments.checked(RematError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far as JSON.

        Args:
            path: File to write.

        Raises:
            RematError: If the file cannot be written.
        """
        self._planner.make_plans()
        write_plans(path, self._planner.plans)

    @_arguments.checked(RematError)
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Read saved plans; each is used once two recordings show the step that it was made for.

        Args:
            path: File written by `save`.

        Returns:
            This budget.

        Raises:
            RematError: If the file cannot be read or does not contain plans.
        """
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
    """Train within a number of bytes, with bitwise the same results and without changing the model.

    The budget holds for the live bytes of tensors and, on Linux with glibc or jemalloc, for the resident memory of
    steps of 64 MiB or more. The first steps run as always and are recorded; from then on activations are dropped and
    recomputed by a plan. Use it as a context manager around one or many
    training steps, as `with budget.step(inputs=batch):`, or as a decorator of a step function. Cost: seconds
    of planning, then what `explain` predicts.

    Recomputed values are compared with the dropped ones before autograd gets them.

    Args:
        budget: Bytes, text such as `"2GiB"`, or a fraction (a float up to 1) of the peak without a budget.
        mode: `"planned"` follows plans. `"online"`, experimental, evicts storages while the step runs, for
            models whose steps differ each time; operators take tens of microseconds longer. `"auto"` plans,
            and switches to online after repeated misses, with a `BudgetWarning`.
        seed: Seed of the plan search.
        recordings: Number of steps to record before planning, at least 2.
        min_size: Smaller storages are never dropped; 1/2000 of the peak by default.
        effort: Scales the time spent on planning.
        heuristic: Eviction heuristic of the online mode.
        check: `"full"` compares every byte of recomputed values, by a 64-bit hash. `"sampled"` compares
            about 32 elements of each tensor: a change of few elements that the autograd graph does not show
            can then give a wrong gradient unnoticed.

    Returns:
        The budget, to enter, to call `step` of, or to decorate with.

    Raises:
        BudgetError: If an option is invalid.
        RematError: If the heuristic is unknown.

    Example:
        >>> import torch, gradkeep as gk
        >>> net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        ...                             for _ in range(6)))
        >>> budget = gk.memory_budget(0.8)
        >>> with budget:
        ...     for _ in range(5):
        ...         net.zero_grad()
        ...         net(torch.ones(256, 64)).sum().backward()
        >>> report = budget.report()
        >>> report.recorded, report.planned, report.measured_peak <= report.budget
        (3, 2, True)
    """
    if recordings < 2:
        raise BudgetError(
            f"recordings must be at least 2, got {recordings}", code="argument.invalid"
        )
    smallest = None if min_size is None else parse_bytes(min_size)
    if not effort > 0:
        raise BudgetError(f"effort must be positive, got {effort}", code="argument.invalid")
    heuristic_named(heuristic)  # fail early if it is unknown
    return MemoryBudget(
        BudgetSettings(
            parse_budget(budget), seed, smallest, recordings, effort, mode, heuristic, check
        )
    )
