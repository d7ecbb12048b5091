"""One `with`: the hooks are on, steps begin and end, and each is recorded, planned or kept whole."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gradkeep import _arguments
from gradkeep.errors import BudgetError, RematError
from gradkeep.remat._tensors import (
    OperatorWatcher,
    exclude_from_compiler,
    exclude_mode_from_compiler,
    is_inside_compiled,
)
from gradkeep.remat.planned._modules import BatchShapes
from gradkeep.remat.planned._planned_step import (
    PlainStep,
    PlannedStep,
    Step,
    StepSnapshot,
    UndecidedStep,
    WatchedStep,
    unpack,
)
from gradkeep.remat.planned._step_recorder import KeptTensor, StepRecorder

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.remat._tensors import OperatorCall
    from gradkeep.remat.online._runtime import OnlineRuntime
    from gradkeep.remat.planned._modules import Shapes
    from gradkeep.remat.planned._plan_cache import StepPlan
    from gradkeep.remat.planned._planner import StepPlanner

_ctc_loss = torch.ctc_loss


def _ctc_loss_with_int_lengths(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
    """`torch.ctc_loss` on the CPU as it runs unwatched, with lengths as numbers.

    While a mode watches, torch takes another operator, which saves the lengths too.
    """
    if not log_probs.is_cuda:
        with torch._C._DisableTorchDispatch():
            lengths = tuple(
                length.tolist() if isinstance(length, torch.Tensor) else length
                for length in lengths
            )
    return _ctc_loss(log_probs, targets, *lengths, **options)


class RecordingMode(OperatorWatcher):
    """Shows operators to the recorder it was given last; it can come and go between two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: StepRecorder | None = None
        self._on = False

    @property
    def watching(self) -> bool:  # type: ignore[override]
        """Whether a recording wants to see operators now."""
        return self.recording is not None and not self.recording.quiet

    def on_operator(self, call: OperatorCall) -> None:
        """Show an operator to the recording."""
        if self.recording is not None:
            self.recording.on_operator(call)

    def start(self, recording: StepRecorder) -> None:
        """Watch for this recording from now on."""
        self.recording = recording
        if not self._on:
            if is_inside_compiled():
                raise RematError(
                    "a training step begins inside of a compiled function, where torch lets no mode "
                    "come or go",
                    fix="put `with budget.step():` around each step, or let an optimizer step inside "
                    "of the block: then steps begin outside of what is compiled",
                )
            self.__enter__()  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss_with_int_lengths
            self._on = True

    def stop(self) -> None:
        """Watch no more; the mode itself goes as soon as no other mode lies upon it."""
        self.recording = None
        if self._on and _get_current_dispatch_mode() is self and not is_inside_compiled():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss
            self._on = False


_current_task = torch._C._current_graph_task_id
_active = threading.local()


class BudgetSession:
    """Hooks of one thread, from entering to leaving a block.

    With `automatic`, a step ends when an optimizer has stepped, or when something is saved again
    after a backward pass. Otherwise the block is one step.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        automatic: bool,
        inputs: tuple[Tensor, ...] = (),
        keep_all: bool = False,
        repeatable: bool = False,
    ) -> None:
        self._planner = planner
        self._automatic = automatic
        self._inputs = inputs
        self._keep_all = keep_all
        self._repeatable = repeatable
        self._mode = exclude_mode_from_compiler(RecordingMode)()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            exclude_from_compiler(self._pack), exclude_from_compiler(unpack)
        )
        self._recording: StepRecorder | None = None
        self._run: Step | None = None
        self._plan: StepPlan | None = None
        self._recorded_batch: Shapes = ()
        self._meter: StepRecorder | None = None
        self._snapshot: StepSnapshot | None = None
        self._running: tuple[torch.nn.Module, ...] = ()
        self._online: OnlineRuntime | None = None
        self._batch = BatchShapes(self._is_next_step, self._on_batch)
        self._detached = False
        """It was left in another thread: its hooks are still there, and do nothing."""

    # The block

    def open(self) -> None:
        """Switch the hooks on."""
        before = current_session()
        if before is not None and before._detached:
            before._remove_hooks()
        elif before is not None:
            raise BudgetError(
                "a memory budget is already in force here",
                fix="leave the outer block first: budgets cannot be nested",
            )
        self._begin()  # raises where no plan keeps the budget: nothing is switched on yet
        self._batch.open()
        _watch_optimizers()
        _active.session = self
        self._hooks.__enter__()

    def close(self, error: BaseException | None) -> None:
        """Switch the hooks off, whatever happened."""
        if current_session() is not self:
            self._detach()
        self._remove_hooks()
        if error is None:
            try:
                self._end()
            finally:  # a warning may be an error
                self._stop_evicting(None)
            return
        self._stop_evicting(error)
        self._abandon()
        self._mode.stop()
        if isinstance(self._run, PlannedStep) and self._plan is not None and self._run.undone:
            self._planner.note_step(self._plan, self._run)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise RematError(
                "torch.func transforms cannot run inside a memory budget: torch forbids saved-tensor "
                "hooks there",
                fix="move them out of the block, or use gradkeep's capture for per-sample gradients",
            ) from error

    def _remove_hooks(self) -> None:
        """The hooks of this thread go."""
        _active.session = None
        self._batch.close()
        self._hooks.__exit__(None, None, None)
        if self._detached:
            self._mode.stop()

    def _detach(self) -> NoReturn:
        """Hooks can only be taken off in their own thread: until that enters a budget, they do nothing."""
        self._detached = self._keep_all = True
        self._abandon()
        self._mode.recording = None
        self._run = PlainStep()
        raise BudgetError(
            "a memory budget was left in another thread than it was entered",
            fix="enter and leave it in the thread that trains; there it does nothing any more",
        )

    # Steps

    def _begin(self) -> None:
        self._run = self._plan = None
        if self._keep_all:
            return
        self._planner.make_plans()
        if self._planner.online_fallback.chosen:
            if self._online is None:
                self._online = self._planner.online_fallback.enter()
            return
        self._snapshot = StepSnapshot()
        # What is handed over shows the batch at once.
        if self._planner.needs_recording or (
            self._inputs and self._planner.needs_batch_recording(self._inputs, None)
        ):
            self._record()
        elif any(plan.needs_measuring for plan in self._planner.plans):
            self._measure()

    def _record(self) -> None:
        self._abandon()
        self._recording = StepRecorder(
            cloning=self._cloning, inputs=self._inputs, running=self._running
        )
        self._mode.start(self._recording)

    def _abandon(self) -> None:
        """Forget what is being recorded or measured."""
        for recording in (self._recording, self._meter):
            if recording is not None:
                recording.abandon()
        self._recording = self._meter = None

    def _is_next_step(self) -> bool:
        """Whether the next call of a module belongs to another step."""
        return self._automatic and self._has_requests()

    def _on_batch(self, running: tuple[torch.nn.Module, ...]) -> None:
        """The first module of a step is called: recordings begin here, so that all of them are alike."""
        if is_inside_compiled():
            return  # no mode may come or go there
        if self._is_next_step():
            self._end()
            self._begin()
        undecided = self._run is None and not (self._recording and self._recording.saved)
        if not undecided or self._keep_all or self._online is not None:
            return
        should_record = self._planner.needs_batch_recording(self._inputs, self._batch.shapes)
        if self._inputs and should_record == (self._recording is not None):
            return
        self._running = running
        if should_record:
            self._record()
            return
        self._abandon()
        self._mode.stop()
        if any(plan.needs_measuring for plan in self._planner.plans):
            self._measure()

    def _cloning(self, recording: StepRecorder, tensor: Tensor) -> bool:
        # Later calls in the same step, as of accumulated passes, do not count.
        self._recorded_batch = self._batch.shapes
        return self._planner.cloning(recording, tensor, self._batch.shapes)

    def _end(self) -> None:
        recording, run, meter = self._recording, self._run, self._meter
        # A step may be found to be over when the next one is already inside of a module.
        watched = recording or meter
        self._running = () if watched is None else watched.modules.running
        self._recording = self._run = self._meter = None
        self._mode.stop()
        if recording is not None:
            self._planner.add(recording, self._inputs, self._recorded_batch)
        if meter is not None:
            peak = self._planner.measure(meter)
            if self._plan is not None and isinstance(run, PlannedStep) and run.changed is None:
                self._planner.note_peak(self._plan, peak)
        if isinstance(run, PlannedStep) and self._plan is not None:
            self._planner.note_step(self._plan, run)
        elif isinstance(run, PlainStep) and self._online is not None:
            self._planner.note_online_step(self._online)
        elif isinstance(run, PlainStep) and not self._detached:
            self._planner.counts.unplanned += 1

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: if there was a backward pass, the step is over."""
        if self._automatic and self._has_requests():
            self._end()
            self._batch.begin()
            self._begin()

    def _has_requests(self) -> bool:
        current = self._recording or self._run
        return current is not None and current.requests > 0

    def _begin_step(self, tensor: Tensor) -> Step | StepRecorder:
        """A step's first tensor is saved: now it can be told what kind of step it is."""
        planner = self._planner
        if self._keep_all or self._online is not None:
            self._run = PlainStep() if self._online is None else WatchedStep()
            return self._run
        plans = planner.plans_for(tensor, self._inputs, self._batch.shapes)
        if self._meter is not None and not any(plan.needs_measuring for plan in plans):
            self._meter.abandon()
            self._meter = None
            self._mode.stop()
        if not plans:
            if planner.is_worth_recording(tensor, self._inputs, self._batch.shapes):
                self._record()
                assert self._recording is not None
                return self._recording
            self._run = PlainStep()
            return self._run
        if len(plans) > 1:
            self._run = UndecidedStep(plans, self._follow)
            return self._run
        return self._follow(plans[0])

    def _follow(self, plan: StepPlan) -> PlannedStep:
        snapshot = self._snapshot if plan.drops else None
        if snapshot is not None:
            snapshot.capture(plan.changing, plan.parameters, copies=self._repeatable)
        self._plan = plan
        run = self._run = PlannedStep(plan.compiled, self._inputs, snapshot=snapshot)
        if plan.needs_measuring and self._meter is None:
            self._measure()
        return run

    def _measure(self) -> None:
        """The first step of a plan shows whether it keeps what it promises."""
        self._meter = StepRecorder(cloning=False, inputs=self._inputs, running=self._running)
        self._mode.start(self._meter)

    def _pack(self, tensor: Tensor) -> Any:
        current: Any = self._recording or self._run
        if current is None:
            current = self._begin_step(tensor)
        elif self._automatic and current.requests and _current_task() == -1:
            self._end()
            self._begin()
            current = self._recording or self._begin_step(tensor)
        return current.pack(tensor)

    def pin(self, tensor: Tensor) -> None:
        """Never drop this tensor; counts in steps that are recorded."""
        if self._recording is not None:
            self._recording.pin(tensor)
        if self._online is not None:
            self._online.pin(tensor)

    def _stop_evicting(self, error: BaseException | None) -> None:
        if self._online is not None:
            online, self._online = self._online, None
            self._planner.online_fallback.exit(online, error)


class StashedTensor:
    """A tensor that somebody wants back in the backward pass."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get(self) -> Tensor:
        """The tensor, once; made again if it was dropped."""
        # Hooks live as long as the graph: the bytes must not.
        handle, self._handle = self._handle, None
        if handle is None:
            raise RematError("a stashed tensor can be had once", fix="stash it twice")
        return unpack(handle)


@_arguments.checked(RematError)
def stash(tensor: Tensor) -> StashedTensor:
    """Save a tensor for the backward pass as autograd does, so that a budget may drop it.

    A hook that holds a tensor itself keeps its bytes; one that stashes it does not.
    """
    session = current_session()
    handle = KeptTensor(None, -1, tensor.detach(), tensor._version)
    return StashedTensor(handle if session is None else session._pack(tensor))


def budget_is_active() -> bool:
    """Tell whether a step inside a memory budget runs in this thread."""
    return current_session() is not None


def current_session() -> BudgetSession | None:
    """The session of this thread."""
    session: BudgetSession | None = getattr(_active, "session", None)
    return session


@functools.cache
def _watch_optimizers() -> None:
    """Once and for good, after the planner's hook, which counts the states that end with the step."""

    def stepped(*_: Any) -> None:
        session = current_session()
        if session is not None:
            session.optimizer_stepped()

    register_optimizer_step_post_hook(stepped)
