"""`memory_budget`: train inside a number of bytes, without changing the model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from gradkeep import _annotations
from gradkeep._budgets import parse_budget, parse_bytes
from gradkeep.errors import BudgetError, RematError, StepChanged
from gradkeep.remat.planned._plan_cache import read_plans, write_plans
from gradkeep.remat.planned._planner import BudgetSettings, Mode, StepPlanner
from gradkeep.remat.planned._report import budget_point, budget_report, explain_plan
from gradkeep.remat.planned._session import BudgetSession, session_here, stash
from gradkeep.remat.simulator._heuristics import heuristic as heuristic_named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from gradkeep.remat.planned._plan_cache import StepPlan
    from gradkeep.remat.planned._programs import Check
    from gradkeep.remat.planned._report import BudgetPoint, BudgetReport, Explanation
    from gradkeep.remat.planned._session import StashedTensor

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
    def _step(
        self, inputs: Any, *, keep_all: bool = False, repeatable: bool = False
    ) -> Iterator[None]:
        given = tuple(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        session = BudgetSession(
            self._planner,
            automatic=False,
            inputs=given,
            keep_all=keep_all,
            repeatable=repeatable,
        )
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
            except StepChanged:
                with self._step(inputs, keep_all=True):
                    return function(*args, **kwargs)

        return budgeted

    @_annotations.checked(RematError)
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Never drop this tensor; call it in every step. Returns the tensor."""
        session = session_here()
        if session is not None:
            session.pin(tensor)
        return tensor

    @_annotations.checked(RematError)
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

    def anew(self, budget: float | str) -> MemoryBudget:
        """Another budget for the same steps, planned from the same recordings."""
        self._planner.make_plans()
        settings = dataclasses.replace(self._planner.settings, budget=parse_budget(budget))
        return MemoryBudget(settings, planner=self._planner.planned_anew(settings))

    def curve(self, budgets: Sequence[float | str]) -> tuple[BudgetPoint, ...]:
        """What each of these budgets would cost the latest plan's step; nothing is run.

        Cost: seconds of planning per budget.
        """
        self._planner.make_plans()
        plan = self._latest()
        settings = self._planner.settings
        asked = [dataclasses.replace(settings, budget=parse_budget(budget)) for budget in budgets]
        return tuple(budget_point(plan, one.bytes_of(plan.peak), one) for one in asked)

    def _latest(self) -> StepPlan:
        if self._planner.last is None:
            raise RematError(
                "there is no plan yet",
                found=f"{self._planner.counts.recorded} recorded steps: {self._planner.missing_plan()}",
                expected=f"{self._planner.settings.recordings} that do the same",
                fix="train a few steps inside the budget, all of the same kind",
            )
        return self._planner.last

    @_annotations.checked(RematError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far as JSON."""
        self._planner.make_plans()
        write_plans(path, self._planner.plans)

    @_annotations.checked(RematError)
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Read plans; each is used as soon as two recordings show the step that it was made for."""
        self._planner.saved |= {plan.digest: plan for plan in read_plans(path)}
        return self


@_annotations.checked(BudgetError)
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
            "too few recordings",
            found=recordings,
            expected="at least 2, to see what stays the same",
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
