"""One training step under a plan, by hooks only, with every drop checked beforehand.

At each saved tensor the plan is compared with the step: shape, type, order, and the autograd
graph below it with its scalars. Only then the tensor may be dropped. If something differs, everything from
there on is kept; tensors dropped before can still be recomputed, because the step was the recorded one up
to that point. Differences that the graph cannot show are found by fingerprints of recomputed values.
"""

from __future__ import annotations

import abc
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gradkeep.errors import RematError, StepChangedError
from gradkeep.remat._rerun import same_content
from gradkeep.remat._tensors import MODE_SENSITIVE_NODES, has_storage
from gradkeep.remat.planned._autograd_graph import GraphWalk
from gradkeep.remat.planned._programs import build_instruction, default_generator, replay
from gradkeep.remat.planned._step_recorder import KeptTensor, check_version, keeps_graph

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gradkeep.remat.planned._programs import CompiledPlan
    from gradkeep.remat.planned._resident import ResidentLimit


_current_task = torch._C._current_graph_task_id


def unpack(handle: Any) -> Tensor:
    """Return the tensor of a packed handle."""
    tensor: Tensor = handle.unpack()
    return tensor


class DroppedTensor:
    """Handle that autograd holds in place of a dropped tensor."""

    __slots__ = ("slot", "step")

    def __init__(self, step: PlannedStep, slot: int) -> None:
        self.step, self.slot = step, slot

    def unpack(self) -> Tensor:
        """Recompute the tensor."""
        step = self.step
        if _current_task() == -1:
            return step.rebuild_slot(self.slot)
        return step.unpack_slot(self.slot)


class Step(abc.ABC):
    """Handling of saved tensors during one training step."""

    at = 0
    """Number of tensors saved so far."""
    requests = 0
    """Number of saved tensors requested by the backward pass so far."""

    @abc.abstractmethod
    def pack(self, tensor: Tensor) -> Any:
        """Keep or drop a saved tensor; return a handle for `unpack`."""


class PlainStep(Step):
    """One step that keeps everything, as torch does."""

    def pack(self, tensor: Tensor) -> KeptTensor:
        """Keep a saved tensor."""
        return KeptTensor(
            None if _current_task() != -1 else self, 0, tensor.detach(), tensor._version
        )

    def on_unpack(self, slot: int) -> None:
        """Count a request."""
        self.requests += 1


class WatchedStep(PlainStep):
    """One step that keeps everything, inside the online runtime."""

    def on_unpack(self, slot: int) -> None:
        """Count a request; refuse a node whose gradient depends on the dispatch mode."""
        self.requests += 1
        node = torch._C._current_autograd_node()
        if node is not None and node.name() in MODE_SENSITIVE_NODES:
            raise RematError(
                "the online runtime would change the rounding of a gradient, because torch computes it by "
                "another formula under a dispatch mode",
                code="remat.mode_sensitive_gradient",
                found=node.name(),
                fix="Use mode='planned', or another operator, such as torch.where for masked_fill.",
            )


class UndecidedStep(Step):
    """Beginning of a step that several plans match: nothing is dropped until they differ."""

    def __init__(self, plans: list[Any], adopt: Callable[[Any], PlannedStep]) -> None:
        self._plans = plans
        self._adopt = adopt
        self._tensors: list[Tensor] = []
        self._handles: list[KeptTensor] = []

    def pack(self, tensor: Tensor) -> Any:
        """Keep a saved tensor, or continue with the only plan that matches."""
        if _current_task() != -1 or not has_storage(tensor):
            return KeptTensor(None, -1, tensor.detach(), tensor._version)
        number = len(self._tensors)
        fitting = [
            plan
            for plan in self._plans
            if number < len(plan.compiled.slots) and plan.compiled.slots[number].fits_leaf(tensor)
        ]
        self._plans = fitting or self._plans[:1]
        if len(self._plans) == 1 or self._plans[0].compiled.slots[number].drop:
            return self.decide(tensor)
        handle = KeptTensor(None, number, tensor.detach(), tensor._version)
        self._tensors.append(tensor)
        self._handles.append(handle)
        return handle

    def decide(self, tensor: Tensor) -> Any:
        """Pass the tensors saved so far to one plan, and then this tensor."""
        run = self._adopt(self._plans[0])
        for before, handle in zip(self._tensors, self._handles, strict=True):
            run.pack(before)
            handle.step = run
        return run.pack(tensor)


class PlannedStep(Step):
    """One step that follows a plan for as long as it matches."""

    def __init__(
        self,
        plan: CompiledPlan,
        inputs: Sequence[Tensor] = (),
        *,
        snapshot: StepSnapshot | None = None,
        resident: ResidentLimit | None = None,
    ) -> None:
        self._plan = plan
        self._snapshot = snapshot
        self._resident = resident
        self._values: list[Tensor | None] = [None] * len(plan.trace.values)
        self._versions: dict[int, int] = {}
        self._random_states: dict[tuple[int, str], Tensor] = {}
        self._fingerprints: dict[int, Any] = {}
        self._following = True
        self.changed: str | None = None
        """First difference from the plan, or None."""
        self.undone = False
        """A recomputed value differed, and the changes of the step were undone."""
        self.recomputed = 0
        """Nanoseconds of recomputation."""
        self.began = self.ended = perf_counter_ns()
        """Times of the first saved tensor and of the last request."""
        self._walk = GraphWalk()
        for value, source in plan.constants:
            tensor = source.find(inputs)
            if tensor is None:
                self.stop_following("a tensor that the plan reads is gone or was replaced")
                break
            self._values[value] = tensor
            self._versions[value] = tensor._version

    # Saving

    def pack(self, tensor: Tensor) -> Any:
        """Keep or drop a saved tensor; return a handle for `unpack`."""
        if _current_task() != -1 or not has_storage(tensor):
            return KeptTensor(None, -1, tensor.detach(), tensor._version)
        if self._resident is not None:
            self._resident.check()
        number = self.at
        self.at = number + 1
        if not self._following:
            return KeptTensor(self, number, tensor.detach(), tensor._version)
        slots = self._plan.slots
        if number >= len(slots):
            self.stop_following("more tensors were saved than in the recorded step")
            return KeptTensor(self, number, tensor.detach(), tensor._version)
        slot = slots[number]
        if not slot.fits(tensor) or (
            slot.expected is not None and self._walk.below(tensor) != slot.expected
        ):
            self.stop_following(f"saved tensor {number} is not the recorded one")
            return KeptTensor(self, number, tensor.detach(), tensor._version)
        if slot.plain:
            return KeptTensor(self, number, tensor.detach(), tensor._version)
        if slot.mark:
            self._walk.mark(tensor)
        if slot.random_state:
            for device in self._plan.devices:
                self._random_states[number, device] = default_generator(device).get_state()
        if slot.fingerprint is not None:
            self._fingerprints[slot.value] = slot.fingerprint.of(tensor)
        if slot.hold:
            self._values[slot.value] = tensor.detach()
            self._versions[slot.value] = tensor._version
        for value in slot.releases:
            self._values[value] = None
            # The recomputed tensor will have its own version.
            self._versions.pop(value, None)
        if slot.drop:
            return DroppedTensor(self, number)
        return KeptTensor(self, number, tensor.detach(), tensor._version)

    def stop_following(self, why: str) -> None:
        """Stop following the plan: keep everything from here on, release nothing."""
        self._following = False
        if self.changed is None:
            self.changed = why

    # Requests

    def on_unpack(self, number: int) -> int:
        """Count a request and run the plan's rebuild for it; return its position, or -1."""
        if self._resident is not None:
            self._resident.check()
        at = self.requests
        self.requests = at + 1
        plan = self._plan
        if not self._following:
            return -1
        if at == 0 and keeps_graph() != plan.trace.keeps_graph:
            self.stop_following("the backward pass keeps the graph, unlike the recorded one")
            return -1
        if at >= len(plan.order) or plan.order[at] != number:
            self.stop_following(
                "the backward pass requests tensors in another order than the recorded one"
            )
            return -1
        if at + 1 == len(plan.order):
            self.ended = perf_counter_ns()
        work = plan.work[at]
        if work is not None:
            self._run(work.instructions, work.sources, work.checks)
        elif not plan.slots[number].drop:
            for value in plan.releases[at]:
                self._values[value] = None
        return at

    def unpack_slot(self, number: int) -> Tensor:
        """Return a dropped tensor for the backward pass."""
        at = self.on_unpack(number)
        if at < 0:
            return self.rebuild_slot(number)
        slot = self._plan.slots[number]
        base = self._values[slot.value]
        assert base is not None
        for value in self._plan.releases[at]:
            self._values[value] = None
        return base if slot.view is None else slot.view.on_storage_of(base)

    def rebuild_slot(self, number: int) -> Tensor:
        """Recompute a dropped tensor out of order, from whatever is still in memory."""
        slot = self._plan.slots[number]
        if self._values[slot.value] is None:
            self._rebuild_value(slot.value)
        base = self._values[slot.value]
        assert base is not None
        return slot.exact.on_storage_of(base)

    def _rebuild_value(self, target: int) -> None:
        trace, values = self._plan.trace, self._values
        operations: set[int] = set()
        sources: set[int] = set()
        fresh: set[int] = set()
        stack = [(target, False)]
        while stack:
            value, forced = stack.pop()
            if not forced and values[value] is not None:
                sources.add(value)
                continue
            maker = trace.values[value].maker
            operation = None if maker is None else trace.operations[maker]
            if maker is None or operation is None or operation.run is None:
                self._undo(
                    "a dropped tensor cannot be recomputed, because its sources are gone",
                    self.changed,
                )
            fresh.update(result.value for result in operation.makes)
            if maker not in operations:
                operations.add(maker)
                stack += [(read, read in operation.overwrites) for read in operation.reads]
        held = {value: values[value] for value in fresh}
        for value, before in held.items():
            if before is None:
                self._versions.pop(value, None)
        random_slots = self._plan.problem.random_state
        instructions = [
            build_instruction(trace, number, {}, random_slot=random_slots.get(number, -1))
            for number in sorted(operations)
        ]
        dropped = [
            (slot.value, slot.fingerprint)
            for slot in self._plan.slots
            if slot.fingerprint is not None
            and slot.value in fresh
            and slot.value in self._fingerprints
        ]
        self._run(instructions, sorted(sources), dropped)
        for value, before in held.items():
            if before is not None:
                values[value] = before

    def _run(self, instructions: Any, sources: Any, checks: Any) -> None:
        start = perf_counter_ns()
        values, versions = self._values, self._versions
        for value in sources:
            source = values[value]
            assert source is not None
            if source._version != versions.get(value, source._version):
                check_version(source, versions[value])
        replay(instructions, values, self._random_states)
        for value, fingerprint in checks:
            base = values[value]
            if base is not None and not same_content(
                fingerprint.of(base), self._fingerprints[value]
            ):
                self.changed = "a recomputed value differs"
                self._undo(
                    "a recomputed tensor differs from the dropped one: this step computed something else "
                    "than the recorded one, in a way that the autograd graph does not show",
                    _describe(self._plan, value),
                )
        self.recomputed += perf_counter_ns() - start

    def _undo(self, message: str, details: str | None) -> NoReturn:
        """Undo the changes of the step, because none of its gradients is right, and raise."""
        self.undone = True
        is_complete = self._snapshot is not None and self._snapshot.is_complete
        if self._snapshot is not None:
            self._snapshot.restore()
        fix = (
            "Run the step again: random state, statistics and gradients are restored, and it will be "
            "recorded again. A step function decorated with the budget is repeated automatically."
            if is_complete
            else "Clear the gradients and run the step again: it will be recorded again."
        )
        raise StepChangedError(message, found=details, fix=fix)


def _describe(plan: CompiledPlan, value: int) -> str:
    maker = plan.trace.values[value].maker
    if maker is None:
        return f"value {value}"
    operation = plan.trace.operations[maker]
    return f"{operation.name} in {operation.layer or 'the step'}"


class StepSnapshot:
    """Random states and buffers at the beginning of a step, gradients when its first tensor is saved.

    Gradients are taken later, because most steps begin by clearing them.
    """

    def __init__(self) -> None:
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Any, Tensor | None]] = []
        self.is_complete = True
        """Everything can be restored; gradients from before the step need a copy."""

    def capture(
        self,
        buffers: Sequence[weakref.ref[Tensor]],
        parameters: Sequence[weakref.ref[Any]],
        *,
        copies: bool,
    ) -> None:
        """Copy buffers, and existing gradients only if `copies` is true."""
        alive = [buffer for reference in buffers if (buffer := reference()) is not None]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in alive]
        for reference in parameters:
            parameter = reference()
            if parameter is None:
                continue
            before = parameter.grad
            if before is None:
                self._gradients.append((parameter, None))
            elif copies:
                self._gradients.append((parameter, before.detach().clone()))
            else:
                self.is_complete = False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for buffer, copy in self._buffers:
            buffer.copy_(copy)
        for parameter, gradient in self._gradients:
            if gradient is None or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
