"""Record one training step: operators, saved tensors, requests and storage lifetimes.

A dispatch mode sees the operators, saved-tensor hooks the rest. In a cloning recording autograd
gets copies, so that the originals die when Python releases them: that is what dropping them would free.
Every operator runs twice and is compared, to verify that running it again gives the same bits.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from gradkeep.remat._rerun import (
    FirstResultRerun,
    OperatorRerun,
    TensorRef,
    build_rerun,
    count_compared_results,
    verify_first_result_rerun,
    verify_rerun,
)
from gradkeep.remat._tensors import (
    MODE_SENSITIVE_NODES,
    Geometry,
    StorageRef,
    find_written_storages,
    has_storage,
    map_nested,
)
from gradkeep.remat.planned._autograd_graph import GraphWalk, parameter_id
from gradkeep.remat.planned._modules import ModuleTracker
from gradkeep.remat.planned._trace import (
    NOTHING,
    CutConstants,
    MadeValue,
    SavedSlot,
    StepTrace,
    TracedOperation,
    TracedStorage,
    TracedValue,
    TraceEvent,
    TraceLengths,
    join_saved_versions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from gradkeep.remat._tensors import OperatorCall
    from gradkeep.remat.planned._plan_cache import OptimizerStates
    from gradkeep.remat.planned._resident import ResidentLimit

_current_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def has_gradients(parameters: Iterable[weakref.ref[Any]]) -> bool:
    """Return True if any of them has a gradient."""
    return any((p := reference()) is not None and p.grad is not None for reference in parameters)


@dataclass(slots=True, eq=False)
class _AliveStorage:
    """A live storage."""

    number: int
    value: int
    ref: StorageRef


class KeptTensor:
    """Handle that autograd holds in place of a kept tensor."""

    __slots__ = ("__weakref__", "slot", "step", "tensor", "version")

    def __init__(self, step: Any, slot: int, tensor: Tensor, version: int) -> None:
        self.step, self.slot, self.tensor, self.version = step, slot, tensor, version

    def unpack(self) -> Tensor:
        """Return the tensor if it was not modified; notify `step`, if any, of the request."""
        check_version(self.tensor, self.version)
        if self.step is not None and _current_task() != -1:
            self.step.on_unpack(self.slot)
        return self.tensor


def check_version(tensor: Tensor, version: int) -> None:
    """Raise if a saved tensor was modified; hooks disable torch's own check."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tensor.type()} of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version} instead."
        )


class StepRecorder:
    """Records a running step; `finish` returns its trace."""

    def __init__(
        self,
        *,
        cloning: bool | Callable[[StepRecorder, Tensor], bool],
        inputs: Sequence[Tensor] = (),
        running: Sequence[nn.Module] = (),
        resident: ResidentLimit | None = None,
        reruns: bool = True,
    ) -> None:
        self._reruns = reruns
        """Find out how operators can run again, by running each of them twice."""
        self.resident = resident
        """Measures the resident memory of the step."""
        self.cloning = cloning is True
        self._choose_cloning = cloning if callable(cloning) else None
        self.walk = GraphWalk()
        self.modules = ModuleTracker(running)
        self.quiet = False
        self.requests = 0
        """Number of saved tensors requested by the backward pass."""
        self._inputs = inputs
        self._alive: dict[int, _AliveStorage] = {}
        self._events: list[TraceEvent] = []
        self._operations: list[TracedOperation] = []
        self._slots: list[SavedSlot] = []
        self._order: list[int] = []
        self._request_events: list[int] = []
        self._nodes: list[Any] = []
        self._storages: list[TracedStorage] = []
        self._values: list[TracedValue] = []
        self._constants: dict[int, weakref.ref[Tensor]] = {}
        self._clones: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._unreleased: dict[int, weakref.ref[KeptTensor]] = {}
        self._pinned: set[int] = set()
        self._saved_geometries: dict[int, list[Geometry]] = {}
        """Saved tensors by storage."""
        self._unchecked_writes: list[tuple[weakref.ref[Tensor], int, int]] = []
        """Writes that autograd may not count as a new version."""
        self._keeps_graph = False
        self._lengths = NOTHING
        self._dispatch_guard: Any = None
        self._unwatched = False
        self.parameters: tuple[weakref.ref[Parameter], ...] = ()
        """Parameters known when the first tensor was saved."""
        self.gradients = False
        """The parameters had gradients then."""
        self._cuts = CutConstants(self._values)
        for tensor in inputs:
            if has_storage(tensor):
                value, _ = self._cuts.cut(self._value_of(tensor), tensor)
                self._constants[value] = weakref.ref(tensor)

    # Operators

    def on_operator(self, call: OperatorCall) -> None:
        """Record an operator that ran."""
        self.quiet = True
        try:
            self._record_operator(call)
        finally:
            self.quiet = False

    def _record_operator(self, call: OperatorCall) -> None:
        if self._unchecked_writes:
            self._check_unversioned_writes()
        func, args, kwargs, signature, passed, results, spent = call
        inputs = [tensor for tensor in passed if has_storage(tensor)]
        for tensor in inputs:
            self._value_of(tensor)
        changed = find_written_storages(signature, args, kwargs) if signature.writes else {}
        fresh: list[tuple[int, Tensor]] = []
        for at, tensor in enumerate(results):
            if has_storage(tensor) and id(tensor.untyped_storage()) not in self._alive:
                fresh.append((at, tensor))
        if not fresh and not changed:
            return  # a view
        event = len(self._events)
        number = len(self._operations)
        backward = _current_task() != -1
        reads = [self._alive[id(t.untyped_storage())].value for t in inputs]
        trusted = count_compared_results(func, len(results))
        makes = [
            MadeValue(at, self._new(tensor, number), Geometry.of(tensor), exact=at < trusted)
            for at, tensor in fresh
        ]
        overwrites = []
        for storage in changed.values():
            alive = self._alive[id(storage)]
            overwrites.append(alive.value)
            target = next(t for t in inputs if t.untyped_storage() is storage)
            written = Geometry.of(target)
            if any(map(written.overlaps, self._saved_geometries.get(alive.number, ()))):
                self._unchecked_writes.append((weakref.ref(target), target._version, alive.number))
            for value, copy in list(self._clones.items()):
                # Autograd's saved tensor sees the write, so its copy must too.
                if self._values[value].storage == alive.number:
                    copy.copy_(storage)
            before, alive.value = alive.value, len(self._values)
            self._values.append(TracedValue(alive.number, number))
            makes.append(MadeValue(-1, alive.value, written))
            size = storage.nbytes()
            if size != self._storages[alive.number].size:
                self._resized(alive, size, before)
        self._add_event("op", number)
        recipe = OperatorRerun(None, (), ())
        if self._reruns and not backward and len(inputs) == len(passed):
            values = dict(zip(map(id, inputs), reads, strict=True))

            def shown(tensor: Tensor) -> TensorRef:
                return TensorRef(values[id(tensor)], Geometry.of(tensor))

            named = tuple((key, map_nested(value, shown, Tensor)) for key, value in kwargs.items())
            shown_args = map_nested(args, shown, Tensor)
            recipe = build_rerun(func, shown_args, named, results, in_place=bool(changed))
            if recipe.run is not None and not changed and not recipe.random:
                recipe = verify_rerun(recipe, func, args, kwargs, results)
            if recipe.first_result is not None:
                known = verify_first_result_rerun(recipe.first_result, func, args, kwargs, results)
                recipe = replace(recipe, first_result=known)
        first_result = recipe.first_result
        self._operations.append(
            TracedOperation(
                name=signature.name,
                run=None if first_result is not None else recipe.run,
                args=() if first_result is not None else recipe.args,
                kwargs=() if first_result is not None else recipe.kwargs,
                makes=tuple(makes) if first_result is None else tuple(makes[1:]),
                overwrites=tuple(overwrites),
                reads=frozenset() if recipe.run is None else recipe.reads(),
                cost=spent / 1e9,
                event=event,
                grad_mode=torch.is_grad_enabled(),
                random=recipe.random,
                device=results[0].device.type if results else "cpu",
                layer=self.modules.current,
                backward=backward,
            )
        )
        if first_result is not None and makes:
            self._split(first_result, makes)

    def _check_unversioned_writes(self) -> None:
        """Pin saved storages that an operator wrote without a new version.

        Autograd then uses the new content, as with the noise of `rrelu`, which is saved before it is drawn.
        """
        for reference, version, storage in self._unchecked_writes:
            tensor = reference()
            if tensor is None or tensor._version == version:
                self._pinned.add(storage)
        self._unchecked_writes.clear()

    def _split(self, first_result: FirstResultRerun, makes: list[MadeValue]) -> None:
        """Add a separate operation that recomputes the first result from the other results."""
        first = makes[0]
        others = tuple(
            TensorRef(result.value, result.geometry) for result in makes if result.position > 0
        )
        own = len(self._operations)
        self._values[first.value] = TracedValue(self._values[first.value].storage, own)
        args = (*first_result.args, *others)
        self._operations.append(
            replace(
                self._operations[-1],
                name=f"{self._operations[-1].name} (apply)",
                run=first_result.run,
                args=args,
                kwargs=(),
                makes=(first._replace(position=0),),
                overwrites=(),
                reads=frozenset(arg.value for arg in args if isinstance(arg, TensorRef)),
                cost=first_result.cost or self._operations[-1].cost,
                first_result=True,
            )
        )

    def _add_event(self, kind: Literal["op", "pack", "unpack"], index: int) -> None:
        node = _node()
        # By number: a reference to a node would keep its saved tensors alive.
        name = None if node is None else (node.name(), node._sequence_nr())
        self._nodes.append((_current_task(), name))
        self._events.append(TraceEvent(kind, index))

    # Storages

    def _value_of(self, tensor: Tensor) -> int:
        """Return the value that a tensor views; an unseen storage existed before the step."""
        storage = tensor.untyped_storage()
        alive = self._alive.get(id(storage))
        if alive is not None:
            if isinstance(tensor, Parameter) and alive.value in self._constants:
                self._constants[alive.value] = weakref.ref(tensor)
            return alive.value
        value = self._follow(storage, birth=0, constant=True)
        self._constants[value] = weakref.ref(tensor)
        return value

    def _saved_value(self, tensor: Tensor) -> tuple[int, Geometry]:
        """Return the value of a saved tensor, and its geometry."""
        value = self._value_of(tensor)
        reference = self._constants.get(value)
        if reference is None:
            return value, Geometry.of(tensor)
        first = reference()
        if first is not None and self.modules.find_source(first, {}) is not None:
            return value, Geometry.of(tensor)
        return self._cuts.cut(value, tensor)

    def _new(self, tensor: Tensor, maker: int) -> int:
        storage = tensor.untyped_storage()
        if id(storage) in self._alive:
            return self._alive[id(storage)].value
        value = self._follow(storage, birth=len(self._events), constant=False)
        self._values[value] = TracedValue(self._values[value].storage, maker)
        return value

    def _follow(self, storage: torch.UntypedStorage, *, birth: int, constant: bool) -> int:
        number, value, key = len(self._storages), len(self._values), id(storage)
        ref = StorageRef(storage, self._on_storage_freed)
        ref.key = key
        self._alive[key] = _AliveStorage(number, value, ref)
        self._storages.append(TracedStorage(storage.nbytes(), birth, -1, -1, constant))
        self._values.append(TracedValue(number, None))
        return value

    def _resized(self, alive: _AliveStorage, size: int, before: int) -> None:
        """End the old memory of a resized storage and begin the new one."""
        event = len(self._events)
        self._end(alive.number, event + 1)
        alive.number = len(self._storages)
        self._storages.append(TracedStorage(size, event, -1, -1, constant=False))
        maker = self._values[alive.value].maker
        self._values[alive.value] = TracedValue(alive.number, maker)

    def _on_storage_freed(self, ref: StorageRef) -> None:
        alive = self._alive.pop(ref.key, None)
        if alive is not None:
            self._end(alive.number, len(self._events))

    def _end(self, storage: int, event: int) -> None:
        self._storages[storage] = replace(self._storages[storage], death=event, natural=event)

    def _on_copy_freed(self, ref: StorageRef) -> None:
        self._alive.pop(ref.key, None)

    # Saved tensors and requests

    def pack(self, tensor: Tensor) -> KeptTensor:
        """Record a saved tensor; in a cloning recording autograd gets a copy."""
        if self.resident is not None:
            self.resident.check()
        self.quiet = True
        try:
            if _current_task() != -1 or not has_storage(tensor):
                # Saved during a backward pass, for double backward or by a checkpoint: always kept.
                return KeptTensor(None, -1, tensor.detach(), tensor._version)
            slot, event = len(self._slots), len(self._events)
            if slot == 0:
                self.parameters = self.modules.parameters()
                self.gradients = has_gradients(self.parameters)
                if self._choose_cloning is not None:
                    self.cloning = self._choose_cloning(self, tensor)
            value, geometry = self._saved_value(tensor)
            self._slots.append(
                SavedSlot(
                    value=value,
                    geometry=geometry,
                    device=tensor.device,
                    seen=self.walk.below(tensor),
                    event=event,
                    leaf=parameter_id(tensor),
                )
            )
            self._add_event("pack", slot)
            storage = self._alive[id(tensor.untyped_storage())].number
            self._saved_geometries.setdefault(storage, []).append(Geometry.of(tensor))
            held = self._copy_for_autograd(tensor) if self.cloning else tensor.detach()
            packed = KeptTensor(self, slot, held, held._version)
            self._unreleased[slot] = weakref.ref(packed)
            return packed
        finally:
            self.quiet = False

    def _copy_for_autograd(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive = self._alive[id(storage)]
        if self._storages[alive.number].constant:
            return tensor.detach()
        copy = self._clones.get(alive.value)
        if copy is None:
            copy = self._clones[alive.value] = storage.clone()  # type: ignore[no-untyped-call]
            # The backward pass uses the copy as the same value, without bytes of its own.
            ref = StorageRef(copy, self._on_copy_freed)
            ref.key = id(copy)
            self._alive[ref.key] = _AliveStorage(alive.number, alive.value, ref)
        return Geometry.of(tensor).on(copy)

    @property
    def saved(self) -> int:
        """Number of tensors saved so far."""
        return len(self._slots)

    def on_unpack(self, slot: int) -> None:
        """Record a request of the backward pass."""
        if self.resident is not None:
            self.resident.check()
        if self._unchecked_writes:
            self._check_unversioned_writes()
        self._keeps_graph |= keeps_graph()
        self.requests += 1
        self._order.append(slot)
        self._lengths = TraceLengths(
            events=len(self._events),
            operations=len(self._operations),
            slots=len(self._slots),
            storages=len(self._storages),
            values=len(self._values),
        )
        self._request_events.append(len(self._events))
        self._add_event("unpack", slot)
        node = _node()
        if node is not None and node.name() in MODE_SENSITIVE_NODES:
            self._pause_mode(node)

    def _pause_mode(self, node: Any) -> None:
        """Run a node without the dispatch mode, as it runs without a budget, and record its results afterwards."""
        self._unwatched = True
        if self._dispatch_guard is not None:
            return
        self._dispatch_guard = away = torch._C._DisableTorchDispatch()
        away.__enter__()  # type: ignore[no-untyped-call]

        def back(gradients: Sequence[Tensor | None], _: Any) -> None:
            away.__exit__(None, None, None)
            self._dispatch_guard = None
            for tensor in gradients:
                if tensor is None or not has_storage(tensor):
                    continue
                storage = tensor.untyped_storage()
                if id(storage) not in self._alive:
                    self._follow(storage, birth=len(self._events), constant=False)

        node.register_hook(back)

    def pin(self, tensor: Tensor) -> None:
        """Never drop this tensor's storage."""
        self._value_of(tensor)
        self._pinned.add(self._alive[id(tensor.untyped_storage())].number)

    # End of the step

    def abandon(self) -> None:
        """Discard a step that failed."""
        self.modules.close()
        self._alive.clear()

    def finish(self, states: OptimizerStates | None = None) -> StepTrace:
        """Return the trace; storages that die from here on are not part of the step."""
        self.modules.close()
        end = len(self._events)
        optimizer_bytes = 0 if states is None else self._count_states(states)
        for alive in self._alive.values():
            if self._storages[alive.number].death < 0:
                self._end(alive.number, end)
        self._alive.clear()
        requested = set(self._order)
        still = frozenset(
            slot
            for slot, packed in self._unreleased.items()
            if slot not in requested and packed() is not None
        )
        storages = [
            replace(stored, pinned=number in self._pinned)
            for number, stored in enumerate(self._storages)
        ]
        return StepTrace(
            events=tuple(self._events),
            operations=tuple(map(self._cuts.resolve, self._operations)),
            slots=join_saved_versions(self._slots, self._operations, self._values),
            order=tuple(self._order),
            request_events=tuple(self._request_events),
            freed=_find_free_events(self._request_events, self._nodes),
            storages=tuple(storages),
            values=tuple(self._values),
            open_slots=still,
            sources=self._sources(),
            lengths=self._lengths,
            keeps_graph=self._keeps_graph,
            optimizer_bytes=optimizer_bytes,
            anchors=self._cuts.anchors(self._slots),
            unwatched=self._unwatched,
        )

    def _count_states(self, states: OptimizerStates) -> int:
        """Count optimizer states from the first event on, even if they were created in this step."""
        total = 0
        for key, storage in states.storages().items():
            alive = self._alive.get(key)
            if alive is None:
                self._follow(storage, birth=0, constant=True)
            else:
                self._storages[alive.number] = replace(self._storages[alive.number], birth=0)
            total += storage.nbytes()
        return total

    def _sources(self) -> dict[int, Any]:
        sources: dict[int, Any] = {}
        positions = {id(tensor): at for at, tensor in enumerate(self._inputs)}
        for value, reference in self._constants.items():
            tensor = reference()
            if tensor is None or not self._storages[self._values[value].storage].constant:
                continue
            source = self.modules.find_source(tensor, positions)
            if source is not None:
                sources[value] = source
        return sources

    @property
    def first(self) -> SavedSlot:
        """First saved tensor."""
        return self._slots[0]


def _find_free_events(requests: Sequence[int], nodes: Sequence[Any]) -> tuple[int, ...]:
    """Find when each requested tensor is released: when another node of the same backward pass runs.

    A backward pass inside a node, as in a checkpoint, is a pass of its own.
    """
    end = len(nodes)
    free_events = dict.fromkeys(requests, end)
    waiting: dict[int, list[int]] = {}
    for event, (task, node) in enumerate(nodes):
        done = waiting if task == -1 else {task: waiting.get(task, [])}
        for known, pending in list(done.items()):
            for request in pending:
                if task == -1 or nodes[request][1] != node:
                    free_events[request] = min(free_events[request], event)
            waiting[known] = [request for request in pending if free_events[request] == end]
        if event in free_events:
            waiting.setdefault(task, []).append(event)
    return tuple(free_events[event] for event in requests)
