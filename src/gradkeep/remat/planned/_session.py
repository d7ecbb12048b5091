"""One `with` block of a budget: install hooks, detect steps, and record, plan or keep each of them."""

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
from gradkeep.remat.planned._resident import hold_freed_memory, release_hold
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
    """Call `torch.ctc_loss` on the CPU with integer lengths, as it runs without a mode.

    Under a dispatch mode torch uses another operator, which also saves the lengths.
    """
    if not log_probs.is_cuda:
        with torch._C._DisableTorchDispatch():
            lengths = tuple(
                length.tolist() if isinstance(length, torch.Tensor) else length
                for length in lengths
            )
    return _ctc_loss(log_probs, targets, *lengths, **options)


class RecordingMode(OperatorWatcher):
    """Pass operators to the current recorder; it can be entered and exited between two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: StepRecorder | None = None
        self._on = False

    @property
    def watching(self) -> bool:  # type: ignore[override]
        """Return True if the recorder wants to see operators now."""
        return self.recording is not None and not self.recording.quiet

    def on_operator(self, call: OperatorCall) -> None:
        """Pass an operator to the recorder."""
        if self.recording is not None:
            self.recording.on_operator(call)

    def start(self, recording: StepRecorder) -> None:
        """Pass operators to this recorder from now on."""
        self.recording = recording
        if not self._on:
            if is_inside_compiled():
                raise RematError(
                    "a training step begins inside a compiled function, where torch allows no change of "
                    "dispatch modes",
                    code="remat.step_in_compiled",
                    fix="Put `with budget.step():` around each step, or call the optimizer inside the "
                    "block, so that steps begin outside compiled functions.",
                )
            self.__enter__()  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss_with_int_lengths
            self._on = True

    def stop(self) -> None:
        """Stop recording; exit the mode as soon as no other mode is on top of it."""
        self.recording = None
        if self._on and _get_current_dispatch_mode() is self and not is_inside_compiled():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.ctc_loss = _ctc_loss
            self._on = False


_current_task = torch._C._current_graph_task_id
_active = threading.local()


class BudgetSession:
    """Hooks of one thread during a block.

    With `automatic`, a step ends when an optimizer has stepped, or when a tensor is saved
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
        self._holds_memory = False
        """The C library holds freed memory until a limit is reached."""
        self._batch = BatchShapes(self._is_next_step, self._on_batch)
        self._detached = False
        """It was exited in another thread: its hooks remain, and do nothing."""

    # The block

    def open(self) -> None:
        """Install the hooks."""
        before = current_session()
        if before is not None and before._detached:
            before._remove_hooks()
        elif before is not None:
            raise BudgetError(
                "a memory budget is already active in this thread",
                code="budget.nested",
                fix="Exit the outer block first: budgets cannot be nested.",
            )
        self._begin()  # may raise if no plan fits; nothing is installed yet
        self._batch.open()
        _watch_optimizers()
        _active.session = self
        self._hooks.__enter__()

    def close(self, error: BaseException | None) -> None:
        """Remove the hooks, also after an error."""
        if current_session() is not self:
            self._detach()
        self._remove_hooks()
        if error is None:
            try:
                self._end()
            finally:  # warnings may be turned into errors
                self._stop_evicting(None)
            return
        self._stop_evicting(error)
        self._abandon()
        self._mode.stop()
        if isinstance(self._run, PlannedStep) and self._plan is not None and self._run.undone:
            self._planner.note_step(self._plan, self._run)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise RematError(
                "torch.func transforms cannot run inside a memory budget, because torch forbids "
                "saved-tensor hooks there",
                code="remat.func_transform",
                fix="Move them out of the block, or use gradkeep.capture for per-sample gradients.",
            ) from error

    def _remove_hooks(self) -> None:
        """Remove the hooks of this thread."""
        _active.session = None
        if self._holds_memory:
            release_hold()
            self._holds_memory = False
        self._batch.close()
        self._hooks.__exit__(None, None, None)
        if self._detached:
            self._mode.stop()

    def _detach(self) -> NoReturn:
        """Disable the hooks: they can only be removed in their own thread."""
        self._detached = self._keep_all = True
        self._abandon()
        self._mode.recording = None
        self._run = PlainStep()
        raise BudgetError(
            "a memory budget was exited in another thread than it was entered",
            code="budget.wrong_thread",
            fix="Enter and exit it in the thread that trains; it is disabled there now.",
        )

    # Steps

    def _begin(self) -> None:
        self._run = self._plan = None
        if self._keep_all:
            return
        self._planner.make_plans()
        self._planner.begin_step()
        if self._planner.online_fallback.chosen:
            if self._online is None:
                self._online = self._planner.online_fallback.enter()
            return
        self._snapshot = StepSnapshot()
        # Explicit inputs identify the batch immediately.
        if self._planner.needs_recording or (
            self._inputs and self._planner.needs_batch_recording(self._inputs, None)
        ):
            self._record()
        elif any(plan.needs_measuring for plan in self._planner.plans):
            self._measure()

    def _record(self) -> None:
        self._abandon()
        self._recording = StepRecorder(
            cloning=self._cloning,
            inputs=self._inputs,
            running=self._running,
            resident=self._planner.watch_resident(),
        )
        self._mode.start(self._recording)

    def _abandon(self) -> None:
        """Discard the current recording or measurement."""
        for recording in (self._recording, self._meter):
            if recording is not None:
                recording.abandon()
        self._recording = self._meter = None

    def _is_next_step(self) -> bool:
        """Return True if the next call of a module belongs to another step."""
        return self._automatic and self._has_requests()

    def _on_batch(self, running: tuple[torch.nn.Module, ...]) -> None:
        """Start recording at the first module of a step, so that all recordings begin alike."""
        if is_inside_compiled():
            return  # modes must not change there
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
        # Later calls in the same step, as in gradient accumulation, do not count.
        self._recorded_batch = self._batch.shapes
        return self._planner.should_clone(recording, tensor, self._batch.shapes)

    def _end(self) -> None:
        recording, run, meter = self._recording, self._run, self._meter
        # The end of a step may be detected inside a module of the next one.
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
        """End the step after an optimizer step if there was a backward pass."""
        if self._automatic and self._has_requests():
            self._end()
            self._batch.begin()
            self._begin()

    def _has_requests(self) -> bool:
        current = self._recording or self._run
        return current is not None and current.requests > 0

    def _begin_step(self, tensor: Tensor) -> Step | StepRecorder:
        """Choose how to handle a step when its first tensor is saved."""
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
        resident = self._planner.watch_resident(plan)
        if resident is not None and not self._holds_memory:
            hold_freed_memory()
            self._holds_memory = True
        run = self._run = PlannedStep(
            plan.compiled, self._inputs, snapshot=snapshot, resident=resident
        )
        if plan.needs_measuring and self._meter is None:
            self._measure()
        return run

    def _measure(self) -> None:
        """Measure the peak of a planned step."""
        self._meter = StepRecorder(
            cloning=False, inputs=self._inputs, running=self._running, reruns=False
        )
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
        """Never drop this tensor; effective in recorded steps."""
        if self._recording is not None:
            self._recording.pin(tensor)
        if self._online is not None:
            self._online.pin(tensor)

    def _stop_evicting(self, error: BaseException | None) -> None:
        if self._online is not None:
            online, self._online = self._online, None
            self._planner.online_fallback.exit(online, error)


class StashedTensor:
    """Handle of a tensor for the backward pass."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get(self) -> Tensor:
        """Return the tensor, once; recompute it if it was dropped."""
        # Hooks live as long as the graph; the bytes must not.
        handle, self._handle = self._handle, None
        if handle is None:
            raise RematError(
                "the stashed tensor was already retrieved",
                code="remat.stash_used",
                fix="Stash it once per use.",
            )
        return unpack(handle)


@_arguments.checked(RematError)
def stash(tensor: Tensor) -> StashedTensor:
    """Save a tensor for the backward pass as autograd does, so that a budget may drop it.

    A hook that holds a tensor itself keeps its bytes in memory; a stashed tensor can be recomputed.

    Args:
        tensor: The tensor to save.

    Returns:
        A handle whose `.get()` returns the tensor once.
    """
    session = current_session()
    handle = KeptTensor(None, -1, tensor.detach(), tensor._version)
    return StashedTensor(handle if session is None else session._pack(tensor))


def budget_is_active() -> bool:
    """Return True inside a memory budget of this thread."""
    return current_session() is not None


def current_session() -> BudgetSession | None:
    """Return the session of this thread."""
    session: BudgetSession | None = getattr(_active, "session", None)
    return session


@functools.cache
def _watch_optimizers() -> None:
    """Install a permanent hook after the planner's, which counts the states at the end of the step."""

    def stepped(*_: Any) -> None:
        session = current_session()
        if session is not None:
            session.optimizer_stepped()

    register_optimizer_step_post_hook(stepped)
