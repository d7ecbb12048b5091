"""One `with`: the hooks are on, steps begin and end, and each is recorded, planned or kept whole."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradkeep.errors import BudgetError, RematError
from gradkeep.remat.planned._planned_step import Deciding, Kept, Plain, Run, Snapshot, unpack
from gradkeep.remat.planned._step_recorder import Recording, RecordingMode
from gradkeep.remat.tracing._tensors import beside_compiler

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.remat.online import Online
    from gradkeep.remat.planned._plan_cache import Plan
    from gradkeep.remat.planned._planner import Book

_task = torch._C._current_graph_task_id
_active = threading.local()


class Session:
    """Hooks of one thread, from entering to leaving a block.

    With `automatic`, a step ends when an optimizer has stepped, or when something is saved again
    after a backward pass. Otherwise the block is one step.
    """

    def __init__(
        self,
        book: Book,
        *,
        automatic: bool,
        inputs: tuple[Tensor, ...] = (),
        keep_all: bool = False,
        repeatable: bool = False,
    ) -> None:
        self._book = book
        self._automatic = automatic
        self._inputs = inputs
        self._keep_all = keep_all
        self._repeatable = repeatable
        self._watch = beside_compiler(RecordingMode)()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._optimizer_hook: Any = None
        self._recording: Recording | None = None
        self._run: Run | Plain | Deciding | None = None
        self._plan: Plan | None = None
        self._meter: Recording | None = None
        self._snapshot: Snapshot | None = None
        self._running: tuple[torch.nn.Module, ...] = ()
        self._online: Online | None = None

    # The block

    def open(self) -> None:
        """Switch the hooks on."""
        if getattr(_active, "session", None) is not None:
            raise BudgetError(
                "a memory budget is already in force here",
                fix="leave the outer block first: budgets cannot be nested",
            )
        self._begin()
        _active.session = self
        self._hooks.__enter__()
        if self._automatic:
            self._optimizer_hook = register_optimizer_step_post_hook(self._stepped)

    def close(self, error: BaseException | None) -> None:
        """Switch the hooks off, whatever happened."""
        if getattr(_active, "session", None) is not self:
            raise BudgetError(
                "a memory budget was left in another thread than it was entered",
                fix="enter and leave it in the thread that trains",
            )
        _active.session = None
        self._hooks.__exit__(None, None, None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        if error is None:
            self._end()
            self._stop_evicting(None)
            return
        self._stop_evicting(error)
        for recording in (self._recording, self._meter):
            if recording is not None:
                recording.abandon()
        self._recording = self._meter = None
        self._watch.rest()
        if isinstance(self._run, Run) and self._plan is not None and self._run.undone:
            self._book.finished(self._plan, self._run)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise RematError(
                "torch.func transforms cannot run inside a memory budget: torch forbids saved-tensor "
                "hooks there",
                fix="move them out of the block, or use gradkeep's capture for per-sample gradients",
            ) from error

    # Steps

    def _begin(self) -> None:
        self._run = self._plan = None
        if self._keep_all:
            return
        self._book.make_plans()
        if self._book.evicting.chosen:
            if self._online is None:
                self._online = self._book.evicting.enter()
            return
        self._snapshot = Snapshot()
        if self._book.curious:
            self._record()
        elif any(plan.measured_peak is None for plan in self._book.plans):
            self._measure()

    def _record(self) -> None:
        self._recording = Recording(
            cloning=self._book.cloning, inputs=self._inputs, running=self._running
        )
        self._watch.show(self._recording)

    def _end(self) -> None:
        recording, run, meter = self._recording, self._run, self._meter
        # A step may be found to be over when the next one is already inside of a module.
        watched = recording or meter
        self._running = () if watched is None else watched.modules.running
        self._recording = self._run = self._meter = None
        self._watch.rest()
        if recording is not None:
            self._book.add(recording, self._inputs)
        if meter is not None:
            peak = meter.finish().peak
            if self._plan is not None and isinstance(run, Run) and run.changed is None:
                self._plan.measured_peak = peak
        if isinstance(run, Run) and self._plan is not None:
            self._book.finished(self._plan, run)
        elif isinstance(run, Plain) and self._online is not None:
            self._book.tally.online += 1
            self._book.evicting.step_is_over()
        elif isinstance(run, Plain):
            self._book.tally.kept += 1

    def _stepped(self, *_: Any) -> None:
        """An optimizer has stepped: if there was a backward pass, the step is over."""
        if getattr(_active, "session", None) is self and self._asked():
            self._end()
            self._begin()

    def _asked(self) -> bool:
        current = self._recording or self._run
        return current is not None and current.asked

    def _first(self, tensor: Tensor) -> Run | Plain | Deciding | Recording:
        """A step's first tensor is saved: now it can be told what kind of step it is."""
        book = self._book
        if self._keep_all or self._online is not None:
            self._run = Plain()
            return self._run
        plans = book.plans_for(tensor, self._inputs)
        if self._meter is not None and all(plan.measured_peak is not None for plan in plans):
            self._meter.abandon()
            self._meter = None
            self._watch.rest()
        if not plans:
            if book.worth_recording(tensor, self._inputs):
                self._record()
                assert self._recording is not None
                return self._recording
            self._run = Plain()
            return self._run
        if len(plans) > 1:
            self._run = Deciding(plans, self._follow)
            return self._run
        return self._follow(plans[0])

    def _follow(self, plan: Plan) -> Run:
        snapshot = self._snapshot if plan.drops else None
        if snapshot is not None:
            snapshot.look(plan.changing, plan.parameters, copies=self._repeatable)
        self._plan = plan
        run = self._run = Run(plan.compiled, self._inputs, snapshot=snapshot)
        if plan.measured_peak is None and self._meter is None:
            self._measure()
        return run

    def _measure(self) -> None:
        """The first step of a plan shows whether it keeps what it promises."""
        self._meter = Recording(cloning=False, inputs=self._inputs)
        self._watch.show(self._meter)

    def _pack(self, tensor: Tensor) -> Any:
        # Most tensors just stay: everything that they need is here, in one frame.
        run: Any = self._run
        if run is not None and _task() == -1:
            number = run.at
            expected = run.quick.get(number)
            if expected is not None and not (self._automatic and run.asks):
                nbytes, size, leaf = expected
                if tensor.nbytes == nbytes and (size is None or tensor.shape == size):
                    run.at = number + 1
                    # A leaf can be held as it is; anything else may hold its node, and that us.
                    held = tensor if leaf and tensor.grad_fn is None else tensor.detach()
                    return held, tensor._version, number, run
        return self._pack_slowly(tensor)

    def _pack_slowly(self, tensor: Tensor) -> Any:
        recording = self._recording
        current: Any = self._run if recording is None else recording
        if current is None:
            current = self._first(tensor)
        elif self._automatic and current.asked and _task() == -1:
            self._end()
            self._begin()
            current = self._recording or self._first(tensor)
        return current.pack(tensor)

    def pin(self, tensor: Tensor) -> None:
        """Never drop this tensor; counts in steps that are recorded."""
        if self._recording is not None:
            self._recording.pin(tensor)
        if self._online is not None:
            self._online.pin(tensor)

    def _stop_evicting(self, error: BaseException | None) -> None:
        if self._online is not None:
            self._online = None
            self._book.evicting.leave(error)


class Stashed:
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


def stash(tensor: Tensor) -> Stashed:
    """Save a tensor for the backward pass as autograd does, so that a budget may drop it.

    A hook that holds a tensor itself keeps its bytes; one that stashes it does not.
    """
    session = session_here()
    handle = Kept(None, -1, tensor.detach(), tensor._version)
    return Stashed(handle if session is None else session._pack(tensor))


def session_here() -> Session | None:
    """The session of this thread."""
    found: Session | None = getattr(_active, "session", None)
    return found
