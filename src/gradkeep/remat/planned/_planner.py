"""The planner of a budget: turn recordings into plans, and switch to the online runtime if that fails."""

from __future__ import annotations

import functools
import math
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from gradkeep._budgets import format_bytes
from gradkeep.errors import BudgetError, BudgetWarning
from gradkeep.remat.planned._evaluate import PlanEvaluator, build_problem
from gradkeep.remat.planned._plan_cache import (
    OptimizerStates,
    StepPlan,
    StepRecordings,
    StepSignature,
    compute_digest,
)
from gradkeep.remat.planned._programs import compile_plan
from gradkeep.remat.planned._resident import (
    ResidentLimit,
    can_limit_resident_memory,
    return_freed_memory,
)
from gradkeep.remat.planned._search import FoundPlan, search_plan
from gradkeep.remat.planned._trace import same_step, with_constant

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.remat.online._runtime import OnlineReport, OnlineRuntime
    from gradkeep.remat.planned._evaluate import PlanningProblem
    from gradkeep.remat.planned._modules import Shapes
    from gradkeep.remat.planned._plan_cache import SavedPlan
    from gradkeep.remat.planned._planned_step import PlannedStep
    from gradkeep.remat.planned._programs import Check
    from gradkeep.remat.planned._step_recorder import StepRecorder
    from gradkeep.remat.planned._trace import StepTrace

Mode = Literal["auto", "planned", "online"]

_MAX_RECORDINGS = 9
"""Recordings of one kind of step that never repeats, or until a doubtful plan is forgotten."""
_REPEAT_FIX = (
    "plans need steps that repeat: keep shapes, operators and saved tensors the same from step to step, "
    "or use mode='online'"
)


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Options of `memory_budget`."""

    budget: int | float
    """Bytes, or a fraction of the recorded peak."""
    seed: int = 0
    min_size: int | None = None
    """Smaller storages are never dropped; None: 1/2000 of the peak."""
    recordings: int = 3
    effort: float = 1.0
    """Scales the search for plans."""
    mode: Mode = "auto"
    heuristic: str = "dtr-eq"
    """Eviction heuristic of the online runtime."""
    check: Check = "full"

    def bytes_of(self, peak: int) -> int:
        """Return the budget in bytes."""
        return int(self.budget * peak) if isinstance(self.budget, float) else self.budget

    def smallest(self, peak: int) -> int:
        """Return the smallest size worth dropping."""
        return max(1, peak // 2000) if self.min_size is None else self.min_size


@dataclass(slots=True, eq=False)
class StepCounts:
    """Number of steps by outcome."""

    recorded: int = 0
    planned: int = 0
    unplanned: int = 0
    """Kept everything, because no plan matched or the step left its plan."""
    undone: int = 0
    online: int = 0
    """Ran in the online runtime."""
    recomputed: float = 0.0
    """Seconds of recomputation in steps that followed a plan."""
    busy: float = 0.0
    """Seconds from the first saved tensor to the last request in these steps."""
    reasons: list[str] = field(default_factory=list)


class StepPlanner:
    """Collects recordings and makes plans from them."""

    def __init__(self, settings: BudgetSettings) -> None:
        self.settings = settings
        self.plans: list[StepPlan] = []
        self.recorded: list[StepRecordings] = []
        self.counts = StepCounts()
        self.saved: dict[str, SavedPlan] = {}
        self.last: StepPlan | None = None
        self.repeatable = False
        """Steps are repeated automatically, so existing gradients may be copied."""
        self.online_fallback = OnlineFallback(settings)
        self._warned: set[str] = set()
        """Warnings already shown."""
        self._forgotten = 0
        self._hopeless: list[StepSignature] = []
        self._states = OptimizerStates()
        self._stopped = False
        """Steps never repeat: nothing is recorded any more."""
        self._resident_start = 0
        """Resident memory before a step, in bytes."""
        self._begun: dict[Any, int] = {}
        """Number of recordings by what is known when the first tensor is saved."""

    @property
    def needs_recording(self) -> bool:
        """Return True if the next step should be recorded from its beginning."""
        unknown = not self.plans and not self._hopeless and not self._stopped
        return unknown or any(plan.doubtful for plan in self.plans)

    def needs_batch_recording(self, inputs: tuple[Tensor, ...], batch: Shapes | None) -> bool:
        """Return True if a step without saved tensors should be recorded; a batch of None means no module ran."""
        planned = [plan.kind for plan in self.plans if not plan.doubtful]
        known = (*planned, *self._hopeless)
        return not self._stopped and not any(kind.may_match(inputs, batch) for kind in known)

    def plans_for(
        self, tensor: Tensor, inputs: tuple[Tensor, ...], batch: Shapes = ()
    ) -> list[StepPlan]:
        """Return the plans that match a step's first saved tensor, latest first."""
        return [
            plan
            for plan in reversed(self.plans)
            if not plan.doubtful and plan.kind.matches_first_tensor(tensor, inputs, batch)
        ]

    def is_worth_recording(
        self, tensor: Tensor, inputs: tuple[Tensor, ...], batch: Shapes = ()
    ) -> bool:
        """Return True if another recording of such a step may lead to a plan."""
        return not self._stopped and not any(
            kind.matches_first_tensor(tensor, inputs, batch) for kind in self._hopeless
        )

    def should_clone(self, recording: StepRecorder, tensor: Tensor, batch: Shapes = ()) -> bool:
        """Return True if a recording should clone saved tensors: every second one.

        After every four the parity changes: if two kinds of steps that begin alike alternate,
        as in adversarial training, both are recorded both ways.
        """
        flags = recording.modules.flags()
        key = (
            tuple(tensor.shape),
            batch,
            recording.gradients,
            tuple(
                (flag.kind, flag.module if flag.has_tensors else None, flag.training)
                for flag in flags
            ),
        )
        self._begun[key] = count = self._begun.get(key, 0) + 1
        return (count % 2 == 0) != ((count - 1) // 4 % 2 == 1)

    def begin_step(self) -> None:
        """Read the resident memory before a step that is recorded or measured."""
        compared = self.needs_recording or any(plan.needs_measuring for plan in self.plans)
        if can_limit_resident_memory() and (compared or not self._resident_start):
            self._resident_start = return_freed_memory()

    def watch_resident(self, plan: StepPlan | None = None) -> ResidentLimit | None:
        """Return the started limit of a plan's step, or one that only measures."""
        if not self._resident_start or (plan is not None and plan.resident is None):
            return None
        limit = plan.resident if plan is not None else None
        if limit is None:
            limit = ResidentLimit(rise=2**62)
        limit.begin(self._resident_start)
        return limit

    def measure(self, meter: StepRecorder) -> int:
        """Return the peak of a watched step, optimizer states included."""
        return meter.finish(self._states).peak

    def add(self, recording: StepRecorder, inputs: tuple[Tensor, ...], batch: Shapes = ()) -> None:
        """Add a finished recording."""
        self._stop_if_steps_never_repeat()
        trace = recording.finish(self._states)
        self.online_fallback.peak = max(self.online_fallback.peak, trace.peak)
        if not trace.slots:
            return
        self.counts.recorded += 1
        kind = _build_signature(recording, inputs, batch)
        for plan in [plan for plan in self.plans if plan.kind.matches(kind)]:
            if same_step(plan.compiled.trace, trace):
                plan.doubtful, plan.misses = False, 0
                return
            if plan.doubtful:
                self.forget(plan)
        for plan in [plan for plan in self.plans if plan.doubtful]:
            plan.misses += 1
            if plan.misses > _MAX_RECORDINGS:
                self.forget(plan)
        group = next((known for known in self.recorded if known.kind.matches(kind)), None)
        if group is None:
            group = StepRecordings(kind)
            self.recorded.append(group)
        group.add(recording, trace)
        changed = (*group.changing, *recording.modules.changed())
        group.changing = tuple({id(buffer()): buffer for buffer in changed}.values())
        group.parameters = recording.modules.parameters()

    def _stop_if_steps_never_repeat(self) -> None:
        """Stop recording if most recordings were of steps that never repeated."""
        useful = self.settings.recordings * len(self.plans)
        useful += sum(group.count for group in self.recorded if group.count > 1)
        wasted = self.counts.recorded - useful
        # After 16 recordings of steps that never repeated, stop unless most steps follow plans.
        if wasted < 16 or self.counts.planned >= self.counts.recorded // 2:
            return
        self._stopped = True
        self.recorded.clear()
        why = f"{wasted} recorded steps, all different, ran without the budget"
        self.counts.reasons.append(why)
        if self.settings.mode == "planned":
            self._warn(
                why,
                "steps are recorded until a batch shape has occurred three times: pad or bucket "
                "batches to a few shapes, or use mode='online'",
            )
        self._switch_to_online()

    def make_plans(self) -> None:
        """Plan steps with enough recordings; raise `BudgetError` below the floor."""
        self._count_new_states()
        for group in list(self.recorded):
            trace = group.trace()
            if trace is None:
                if group.count > self.settings.recordings:
                    self._warn(
                        "recorded steps of one batch shape did not repeat, and ran without the "
                        "budget",
                        _REPEAT_FIX,
                    )
                if group.count >= _MAX_RECORDINGS:
                    self.recorded.remove(group)
                    self._hopeless.append(group.kind)
                    why = f"the step differs each time: {group.difference()}"
                    self.counts.reasons.append(why)
                    if self.settings.mode == "planned":
                        self._warn(f"no plan, so the budget is not enforced: {why}", _REPEAT_FIX)
                    self._switch_to_online()
                continue
            known = self.saved.get(compute_digest(trace)) if self.saved else None
            if group.count < self.settings.recordings and known is None:
                continue
            self.recorded.remove(group)
            self._adopt(group, trace, known)

    def _count_new_states(self) -> None:
        """Replan if optimizer states have grown."""
        for plan in list(self.plans):
            missing = self._states.nbytes - plan.compiled.trace.optimizer_bytes
            if missing > 0:
                self.plans.remove(plan)
                trace = with_constant(plan.compiled.trace, missing)
                self._adopt(StepRecordings.of(plan), trace, None)

    def _adopt(self, group: StepRecordings, trace: StepTrace, known: SavedPlan | None) -> None:
        missing = self._states.nbytes - trace.optimizer_bytes
        if missing > 0:
            trace = with_constant(trace, missing)
        problem = build_problem(trace, min_size=self.settings.smallest(trace.peak))
        self._plan(group, problem, known)

    def replan(self, settings: BudgetSettings) -> StepPlanner:
        """Plan the same recordings with other settings."""
        planner = StepPlanner(settings)
        planner.saved, planner.repeatable = self.saved, self.repeatable
        for plan in self.plans:
            planner._plan(StepRecordings.of(plan), plan.compiled.problem, None)
        return planner

    def _plan(
        self,
        group: StepRecordings,
        problem: PlanningProblem,
        known: SavedPlan | None,
        *,
        overhead: int = 0,
    ) -> None:
        settings, trace = self.settings, problem.trace
        start = time.perf_counter()
        budget = settings.bytes_of(trace.peak)
        # Undoing a step needs copies; a step that drops nothing is never undone.
        reserve = self._reserve(group)
        target = budget - overhead
        if trace.peak > target:
            target = max(1, target - reserve)
        best = _evaluate_saved(problem, known, target) or search_plan(
            problem, target, seed=settings.seed, effort=settings.effort
        )
        if not best.fits:
            best = self._plan_near_floor(problem, target)
        if not best.fits:
            floor = best.evaluation.peak + reserve + overhead
            raise BudgetError(
                "the training step does not fit the budget",
                code="budget.below_floor",
                found=f"{budget} bytes ({format_bytes(budget)})",
                expected=f"at least the floor of {floor} bytes ({format_bytes(floor)}); "
                f"without a budget the step takes {trace.peak} bytes ({format_bytes(trace.peak)})",
                fix="Raise the budget, or make the batch smaller.",
            )
        ready = compile_plan(problem, best.states, best.evaluation, check=settings.check)
        seconds = time.perf_counter() - start
        self.last = StepPlan(
            group.kind,
            ready,
            budget,
            reserve,
            group.changing,
            group.parameters,
            seconds,
            resident_rise=group.resident_rise,
            resident=self._resident_limit(trace, group.resident_rise),
            overhead=overhead,
        )
        self.plans.append(self.last)

    def _plan_near_floor(self, problem: PlanningProblem, target: int) -> FoundPlan:
        """Find a plan where only those with the smallest peaks may fit; improve the first that does."""
        settings = self.settings
        search = functools.partial(search_plan, seed=settings.seed, effort=settings.effort)
        least = search(problem, 1)
        if least.evaluation.peak > target:  # fewer bytes for much more time
            least = find_floor(problem, seed=settings.seed, effort=settings.effort)
        if least.evaluation.peak > target:
            return replace(least, fits=False)
        return search(problem, target, start=least.states)

    def _resident_limit(self, trace: StepTrace, plain_rise: int) -> ResidentLimit | None:
        """Return the limit of resident memory of a step that took `plain_rise` bytes without a budget."""
        # Below 64 MiB the interpreter's own allocations are as large as what a budget saves.
        if not plain_rise or trace.peak < 64 * 2**20:
            return None
        if isinstance(self.settings.budget, float) and self.settings.budget >= 1:
            return None  # as much as without a budget
        if any(slot.device.type != "cpu" for slot in trace.slots):
            return None
        start = sum(stored.size for stored in trace.storages if stored.birth == 0)
        plain = start + max(plain_rise, trace.peak - start)
        return ResidentLimit(
            self.settings.bytes_of(plain) - start, trace.allocated_between_checks()
        )

    def _compare_with_limit(self, plan: StepPlan, limit: ResidentLimit) -> None:
        """Plan a step again with room for the resident memory that exceeded its limit."""
        if not limit.is_exceeded:
            limit.was_exceeded = False
            return
        if not limit.was_exceeded:
            # Memory outside the step may have grown: compare the next step with a new beginning.
            limit.was_exceeded, self._resident_start = True, 0
            return
        excess = limit.latest - limit.rise
        over = f"a step took {format_bytes(excess)} more resident memory than the budget"
        self.plans.remove(plan)
        try:
            self._plan(
                StepRecordings.of(plan),
                plan.compiled.problem,
                None,
                overhead=plan.overhead + excess,
            )
        except BudgetError:
            limit.excess_is_known = True
            self.plans.append(plan)
            self._warn(
                f"{over}, and no plan takes less",
                f"raise the budget by {format_bytes(excess)}, or make the batch smaller",
            )

    def _reserve(self, group: StepRecordings) -> int:
        """Return the bytes of copies of buffers, and of gradients that exist before the step."""
        tensors = [tensor for reference in group.changing if (tensor := reference()) is not None]
        if self.repeatable and group.kind.gradients:
            tensors += [
                tensor for reference in group.parameters if (tensor := reference()) is not None
            ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def note_peak(self, plan: StepPlan, peak: int) -> None:
        """Record the live bytes of a planned step."""
        plan.measured_peak = max(peak, plan.measured_peak or 0)
        if peak > plan.budget:
            self._warn(
                f"a step took {format_bytes(peak)}, over the budget of {format_bytes(plan.budget)}: "
                f"{format_bytes(plan.predicted_peak)} were planned, and something outside the "
                "recorded step holds the rest",
                "release tensors that persist across steps, such as histories of an optimizer, or "
                "raise the budget by their size",
            )

    def _warn(self, what: str, remedy: str) -> None:
        """Warn once."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"memory budget: {what}; {remedy}", BudgetWarning, stacklevel=2)

    def note_step(self, plan: StepPlan, run: PlannedStep) -> None:
        """Record the outcome of a planned step."""
        if run.changed is None:
            plan.runs += 1
            plan.misses = 0
            self.last = plan
            self.counts.planned += 1
            self.counts.recomputed += run.recomputed / 1e9
            self.counts.busy += (run.ended - run.began) / 1e9
            if plan.resident is not None and plan in self.plans and plan.runs > 1:
                self._compare_with_limit(plan, plan.resident)
            return
        self.counts.reasons.append(run.changed)
        if run.undone:
            self.counts.undone += 1
            plan.doubtful = True
            return
        self.counts.unplanned += 1
        self._warn(
            f"a step kept everything and may have exceeded the budget: {run.changed}",
            "steps of one kind must do the same each time; it is recorded again if this continues",
        )
        plan.misses += 1
        # After two misses in a row steps are recorded until one follows the plan or proves it
        # outdated.
        if plan.misses >= 2:
            plan.doubtful = True

    def note_online_step(self, online: OnlineRuntime) -> None:
        """Record a step of the online runtime."""
        self.counts.online += 1
        report = self.online_fallback.finish_step(online)
        if report.gave_up:
            why = f"{report.reason}, so eviction stopped"
        elif report.over:
            why = "no storage could be evicted"
        else:
            return
        self._warn(f"an online step exceeded the budget: {why}", "raise the budget")

    def explain_missing_plan(self) -> str:
        """Return why there is no plan."""
        for group in reversed(self.recorded):
            difference = group.difference()
            if difference is not None:
                return difference
        return self.counts.reasons[-1] if self.counts.reasons else "too few steps so far"

    def _switch_to_online(self) -> None:
        if self.settings.mode == "auto" and not self.online_fallback.chosen:
            self.online_fallback.chosen = True
            self.recorded.clear()
            why = self.counts.reasons[-1] if self.counts.reasons else "most steps were new"
            what = "plans did not match: from now on storages are evicted online, which is experimental"
            self.counts.reasons.append(what)
            self._warn(f"{what} and slower ({why})", _REPEAT_FIX)

    def forget(self, plan: StepPlan) -> None:
        """Remove an outdated plan so that its step is recorded again."""
        self._forgotten += 1
        # After four forgotten plans, assume that steps never repeat.
        if self._forgotten >= 4:
            self._switch_to_online()
        if plan in self.plans:
            self.plans.remove(plan)


def find_floor(problem: PlanningProblem, *, seed: int = 0, effort: float = 1.0) -> FoundPlan:
    """Find the plan with the smallest peak.

    The search counts operators instead of seconds, so that two recordings of a step have the same floor.
    """
    counted = replace(
        problem,
        costs=(1.0,) * len(problem.costs),
        candidates=tuple(replace(one, cost=len(one.recipe)) for one in problem.candidates),
    )
    smallest = search_plan(counted, 1, seed=seed, effort=effort)
    return replace(smallest, evaluation=PlanEvaluator(problem)(smallest.states))


def _evaluate_saved(
    problem: PlanningProblem, known: SavedPlan | None, budget: int
) -> FoundPlan | None:
    if known is None or len(known.states) != len(problem.candidates):
        return None
    evaluation = PlanEvaluator(problem)(known.states)
    if evaluation.peak > budget:
        return None
    return FoundPlan(known.states, evaluation, fits=True, evaluations=1)


def _build_signature(
    recording: StepRecorder, inputs: tuple[Tensor, ...], batch: Shapes
) -> StepSignature:
    first = recording.first
    return StepSignature(
        size=first.geometry.size,
        stride=first.geometry.stride,
        dtype=first.geometry.dtype,
        flags=recording.modules.flags(),
        parameters=recording.parameters,
        gradients=recording.gradients,
        inputs=tuple(tuple(tensor.shape) for tensor in inputs),
        batch=batch,
    )


class OnlineFallback:
    """Runs steps without a plan in the online runtime."""

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        self.chosen = settings.mode == "online"
        """Steps run in the online runtime."""
        self.peak = 0
        """Largest known number of bytes of a step without a budget."""
        self.latest: OnlineReport | None = None
        """Report on the latest block."""
        self._online: OnlineRuntime | None = None

    def enter(self) -> OnlineRuntime:
        """Enter the runtime."""
        from gradkeep.remat.online._runtime import OnlineRuntime

        if self._online is None:
            self._online = OnlineRuntime(heuristic=self._settings.heuristic)
        self._online.budget = self._bytes()
        return self._online.__enter__()

    def finish_step(self, online: OnlineRuntime) -> OnlineReport:
        """Report on a step; the first one, without a budget, gives the peak that fractions refer to."""
        if self.peak == 0:
            self.peak = online.live.peak
            online.reset_peak()
            online.limit_to(self._bytes())
        self.latest = online.report()
        return self.latest

    def exit(self, online: OnlineRuntime, error: BaseException | None) -> None:
        """Exit the runtime; everything is restored."""
        online.__exit__(None if error is None else type(error), error, None)
        self.latest = online.report()

    def _bytes(self) -> float:
        budget = self._settings.budget
        if isinstance(budget, float):
            return int(budget * self.peak) if self.peak else math.inf
        return budget
