"""A recorded training step as data: values, the operators that made them, the tensors autograd saved.

A *value* is a storage at one version: an in-place operator makes the next value of the same storage.
Tensors are references to values with a geometry, so views need no records.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from gradkeep.remat._rerun import TensorRef
from gradkeep.remat._tensors import Geometry, map_nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor

    from gradkeep.remat.planned._autograd_graph import GraphBelow


class MadeValue(NamedTuple):
    """A value that an operator makes: the position and geometry of the result that holds it."""

    position: int
    """Position among the results; -1 for an argument written in place."""
    value: int
    geometry: Geometry
    exact: bool = True
    """False for a workspace with undefined bytes."""


class TraceEvent(NamedTuple):
    """One event."""

    kind: Literal["op", "pack", "unpack"]
    number: int
    """Number of the operator or of the slot."""


class TraceLengths(NamedTuple):
    """Lengths at the last request. Later entries belong to the optimizer or the next batch, and may vary."""

    events: int
    operations: int
    slots: int
    storages: int
    values: int


NOTHING = TraceLengths(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operator that made or changed values."""

    name: str
    run: Callable[..., Any] | None
    """None if it is not known how to run it again."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    makes: tuple[MadeValue, ...]
    overwrites: tuple[int, ...]
    """Values that it changes in place; the new ones use their memory."""
    reads: frozenset[int]
    """Values among the arguments, if it can be run again."""
    cost: float
    """Least measured seconds."""
    event: int
    grad_mode: bool = True
    random: bool = False
    device: str = "cpu"
    """Device of its random generator."""
    layer: str = ""
    """Module that was running."""
    first_result: bool = False
    """It recomputes the first result of the operator before it, with a cost of its own."""
    backward: bool = False
    """It runs in the backward pass."""

    def same(self, other: TracedOperation) -> bool:
        """Return True if both do the same work, regardless of costs and number arguments."""
        ours = (self.name, self.overwrites, self.reads, self.grad_mode, len(self.makes))
        if ours != (other.name, other.overwrites, other.reads, other.grad_mode, len(other.makes)):
            return False
        for ours_result, theirs_result in zip(self.makes, other.makes, strict=True):
            alike = self.backward or equal_up_to_size(ours_result.geometry, theirs_result.geometry)
            if ours_result != theirs_result and not (
                alike and ours_result == theirs_result._replace(geometry=ours_result.geometry)
            ):
                return False
        return True

    def describe(self) -> str:
        """Describe the operator, its module and its results."""
        shapes = ", ".join(str(list(result.geometry.size)) for result in self.makes)
        return f"{self.name} in {self.layer or 'the step'} giving {shapes}"


def equal_up_to_size(first: Geometry, second: Geometry) -> bool:
    """Return True if both are equal, or integer tensors of the same type that differ in size."""
    dtype = first.dtype
    indices = not dtype.is_floating_point and not dtype.is_complex
    return first == second or (
        indices and dtype is second.dtype and len(first.size) == len(second.size)
    )


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A tensor that autograd saved."""

    value: int
    geometry: Geometry
    device: torch.device
    seen: GraphBelow
    """Autograd graph below it."""
    event: int
    leaf: int | None = None
    """Id of the parameter that it views, or None."""
    varies: bool = False
    """Its size varies from step to step: it is always kept, and nothing is recomputed from it."""
    is_final: bool = True
    """Its storage has its value when it is saved; False if other parts of the storage are written later."""

    def same(self, other: SavedSlot) -> bool:
        """Return True if it is the same saved tensor, up to its size."""
        alike = replace(other, geometry=self.geometry, varies=self.varies)
        return self == alike and equal_up_to_size(self.geometry, other.geometry)


@dataclass(frozen=True, slots=True)
class TracedStorage:
    """Size and lifetime of a storage (from event `birth`, before event `death`)."""

    size: int
    birth: int
    death: int
    natural: int
    """Death if autograd had not saved it."""
    constant: bool
    """It existed before the step."""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A storage at a version."""

    storage: int
    maker: int | None
    """Operator that makes it; None for constants and values that cannot be recomputed."""


@dataclass(frozen=True)
class StepTrace:
    """One step. Event `e` sees every storage with `birth <= e < death`."""

    events: tuple[TraceEvent, ...]
    operations: tuple[TracedOperation, ...]
    slots: tuple[SavedSlot, ...]
    order: tuple[int, ...]
    """Slots in the order of requests by the backward pass."""
    request_events: tuple[int, ...]
    """Event of each request."""
    freed: tuple[int, ...]
    """First event at which the requesting node is done, per request."""
    storages: tuple[TracedStorage, ...]
    values: tuple[TracedValue, ...]
    open_slots: frozenset[int]
    """Slots that were neither requested nor released when the recording ended."""
    sources: dict[int, Any] = field(default_factory=dict)
    """How to find each persistent constant in a later step."""
    lengths: TraceLengths = NOTHING
    """Lengths at the request of the last saved tensor."""
    keeps_graph: bool = False
    """The backward pass retained the graph."""
    unwatched: bool = False
    """Some nodes of the backward pass ran without the mode: their temporaries are not counted."""
    optimizer_bytes: int = 0
    """Bytes of optimizer states among the storages, from the first event on."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Recorded start in bytes of constants that move within their storage, such as batches of a data set."""

    @cached_property
    def seconds(self) -> float:
        """Cost of all operators."""
        return sum(operation.cost for operation in self.operations if not operation.first_result)

    @property
    def peak(self) -> int:
        """Largest number of bytes alive at once."""
        return max(self.levels(), default=0)

    def levels(self) -> list[int]:
        """Return the bytes alive at each event."""
        change = [0] * (len(self.events) + 2)
        for stored in self.storages:
            change[stored.birth] += stored.size
            change[min(stored.death, len(self.events)) if stored.death >= 0 else -1] -= stored.size
        total, levels = 0, []
        for step in change[: len(self.events)]:
            total += step
            levels.append(total)
        return levels

    def allocated_between_checks(self) -> list[int]:
        """Return the bytes allocated after each saved tensor and each request, until the next one."""
        checks = [at for at, event in enumerate(self.events) if event.kind != "op"]
        growth = [0] * len(checks)
        for stored in self.storages:
            check = bisect.bisect_left(checks, stored.birth) - 1
            if check >= 0 and not stored.constant:
                growth[check] += stored.size
        return growth


def join_saved_versions(
    slots: Sequence[SavedSlot],
    operations: Sequence[TracedOperation],
    values: Sequence[TracedValue],
) -> tuple[SavedSlot, ...]:
    """Let all saved parts of a storage refer to its last saved version, if no later write changed them.

    A recurrent cell computes its gates in place, part by part, and saves each part after its own write:
    together they can be dropped and recomputed as one value.
    """
    last: dict[int, int] = {}
    for slot in slots:
        last[values[slot.value].storage] = max(slot.value, last.get(values[slot.value].storage, 0))
    writes: dict[int, list[tuple[int, Geometry]]] = {}
    for operation in operations:
        for result in operation.makes:
            if result.position < 0:
                written = (result.value, result.geometry)
                writes.setdefault(values[result.value].storage, []).append(written)

    def join(slot: SavedSlot) -> SavedSlot:
        storage = values[slot.value].storage
        later = [geometry for value, geometry in writes.get(storage, ()) if value > slot.value]
        if not later or last[storage] == slot.value:
            return slot
        if any(map(slot.geometry.overlaps, later)):
            return slot
        return replace(slot, value=last[storage], is_final=False)

    return tuple(map(join, slots))


T = TypeVar("T")


def merge_traces(plain: StepTrace, cloned: StepTrace) -> StepTrace | None:
    """Merge a plain and a cloning recording of a step; return None if they differ.

    The natural deaths and the rerun functions come from the cloning recording.
    """
    if not _same(plain, cloned):
        return None
    lengths = plain.lengths
    storages = tuple(
        replace(
            ours,
            natural=min(theirs.death, ours.death),
            pinned=ours.pinned or theirs.pinned,
        )
        for ours, theirs in _pairs(plain.storages, cloned.storages, lengths.storages)
    )
    sources = {
        value: source
        for value, source in plain.sources.items()
        if cloned.sources.get(value) == source
    }
    cloned_operations = cloned.operations[: lengths.operations]
    agreed = replace(
        plain,
        operations=cloned_operations + plain.operations[lengths.operations :],
        storages=storages + plain.storages[lengths.storages :],
        sources=sources,
        open_slots=plain.open_slots | cloned.open_slots,
    )
    return with_least_costs(agreed, plain, cloned)


def with_least_costs(trace: StepTrace, *others: StepTrace) -> StepTrace:
    """Return the trace with the least costs and largest sizes of more recordings of the same step.

    Operators whose arguments or results differ between recordings are not run again.
    """
    ends = trace.lengths
    for other in others:
        if not _same(trace, other):
            continue
        operations = tuple(
            replace(
                ours,
                cost=min(ours.cost, theirs.cost),
                run=ours.run if _has_same_arguments(ours, theirs) else None,
            )
            for ours, theirs in _pairs(trace.operations, other.operations, ends.operations)
        )
        storages = tuple(
            replace(ours, size=max(ours.size, theirs.size))
            for ours, theirs in _pairs(trace.storages, other.storages, ends.storages)
        )
        slots = tuple(
            replace(ours, varies=ours.varies or ours.geometry != theirs.geometry)
            for ours, theirs in _pairs(trace.slots, other.slots, ends.slots)
        )
        trace = replace(
            trace,
            operations=operations + trace.operations[ends.operations :],
            storages=storages + trace.storages[ends.storages :],
            slots=slots + trace.slots[ends.slots :],
        )
    return trace


def with_larger_tail(trace: StepTrace, other: StepTrace) -> StepTrace:
    """Return the trace with the events of another recording after the last request, if they take more memory.

    In gradient accumulation only the last step is followed by the optimizer.
    """
    if not _same(trace, other):
        return trace
    ends = trace.lengths
    ours, theirs = trace.levels()[ends.events :], other.levels()[ends.events :]
    if max(theirs, default=0) <= max(ours, default=0):
        return trace
    storages = tuple(
        replace(mine, death=more.death) if mine.death > ends.events < more.death else mine
        for mine, more in _pairs(trace.storages, other.storages, ends.storages)
    )
    return replace(
        trace,
        events=trace.events[: ends.events] + other.events[ends.events :],
        operations=trace.operations[: ends.operations] + other.operations[ends.operations :],
        slots=trace.slots[: ends.slots] + other.slots[ends.slots :],
        storages=storages + other.storages[ends.storages :],
        values=trace.values[: ends.values] + other.values[ends.values :],
        optimizer_bytes=other.optimizer_bytes,
    )


def with_constant(trace: StepTrace, nbytes: int) -> StepTrace:
    """Return the trace with additional bytes of optimizer states."""
    end = len(trace.events)
    beside = TracedStorage(nbytes, 0, end, end, constant=True)
    return replace(
        trace,
        storages=(*trace.storages, beside),
        optimizer_bytes=trace.optimizer_bytes + nbytes,
    )


def _has_same_arguments(first: TracedOperation, second: TracedOperation) -> bool:
    """Return True if an operator can be run again and had the same arguments both times."""
    both = first.run is not None and second.run is not None
    ours, theirs = (
        (first.args, first.kwargs, first.makes),
        (second.args, second.kwargs, second.makes),
    )
    return both and ours == theirs


def _same(first: StepTrace, second: StepTrace) -> bool:
    """Return True if two steps are the same until the last request."""
    return find_difference(first, second) is None


def find_difference(first: StepTrace, second: StepTrace) -> str | None:
    """Describe the first difference between two steps until the last request, or return None."""
    ends, others = first.lengths, second.lengths
    operations = zip(
        first.operations[: ends.operations], second.operations[: others.operations], strict=False
    )
    for ours, theirs in operations:
        if not ours.same(theirs):
            return f"one step runs {ours.describe()}, another {theirs.describe()}"
    slots = zip(first.slots[: ends.slots], second.slots[: others.slots], strict=False)
    for number, (saved, other) in enumerate(slots):
        if not saved.same(other):
            before, after = saved.geometry, other.geometry
            return (
                f"saved tensor {number} is {list(before.size)} {before.dtype} in one step, "
                f"{list(after.size)} {after.dtype} in another, or has another origin"
            )
    for what, ours_, theirs_ in (
        ("operators", ends.operations, others.operations),
        ("tensors are saved", ends.slots, others.slots),
        ("events", ends.events, others.events),
    ):
        if ours_ != theirs_:
            return f"{ours_} {what} in one step, {theirs_} in another"
    if first.keeps_graph != second.keeps_graph or first.order != second.order:
        return "the backward passes differ: another order of requests, or a retained graph"
    if (
        ends != others
        or first.events[: ends.events] != second.events[: ends.events]
        or first.values[: ends.values] != second.values[: ends.values]
    ):
        return "tensors are made or released in another order"
    return None


def same_step(planned: StepTrace, later: StepTrace) -> bool:
    """Return True if a later step equals a planned one, including number arguments."""
    ends = planned.lengths
    return (
        _same(planned, later)
        and all(
            a.run is None or (a.args, a.kwargs, a.makes) == (b.args, b.kwargs, b.makes)
            for a, b in _pairs(planned.operations, later.operations, ends.operations)
        )
        and all(
            a.varies or a.geometry == b.geometry
            for a, b in _pairs(planned.slots, later.slots, ends.slots)
        )
    )


def _pairs(first: Sequence[T], second: Sequence[T], count: int) -> Iterator[tuple[T, T]]:
    return zip(first[:count], second[:count], strict=True)


class _Cut(NamedTuple):
    value: int
    start: int
    """Bytes from the beginning of the storage."""
    stop: int

    def shows(self, geometry: Geometry) -> bool:
        start, stop = geometry.span
        return self.start <= start and stop <= self.stop

    def seen(self, geometry: Geometry) -> Geometry:
        """Return the geometry relative to the start of this part."""
        return geometry._replace(offset=geometry.offset - self.start // geometry.dtype.itemsize)


class CutConstants:
    """Tensors of one step that are parts of constants; new values are appended to `values`."""

    def __init__(self, values: list[TracedValue]) -> None:
        self._values = values
        self._cuts: dict[int, list[_Cut]] = {}

    def cut(self, constant: int, tensor: Tensor) -> tuple[int, Geometry]:
        """Return the value and geometry of a tensor on the storage of a constant."""
        geometry = Geometry.of(tensor)
        cuts = self._cuts.setdefault(constant, [])
        known = next((cut for cut in cuts if cut.shows(geometry)), None)
        if known is None:
            value = constant
            if cuts:
                value = len(self._values)
                self._values.append(TracedValue(self._values[constant].storage, None))
            known = _Cut(value, *geometry.span)
            cuts.append(known)
        return known.value, known.seen(geometry)

    def anchors(self, slots: Sequence[SavedSlot]) -> dict[int, int]:
        """Return the start of the first saved tensor of each value."""
        anchors: dict[int, int] = {cut.value: 0 for cuts in self._cuts.values() for cut in cuts}
        for slot in reversed(slots):
            if slot.value in anchors:
                anchors[slot.value] = slot.geometry.offset * slot.geometry.dtype.itemsize
        return anchors

    def resolve(self, operation: TracedOperation) -> TracedOperation:
        """Return the operator with references to parts; without `run` if it reads an unknown part."""
        if operation.run is None or not operation.reads & self._cuts.keys():
            return operation
        reads: list[int] = []

        def cut(ref: TensorRef) -> TensorRef:
            if ref.value in self._cuts:
                parts = [part for part in self._cuts[ref.value] if part.shows(ref.geometry)]
                if not parts:
                    raise LookupError
                part = parts[0]
                ref = TensorRef(part.value, part.seen(ref.geometry))
            reads.append(ref.value)
            return ref

        try:
            args, kwargs = map_nested((operation.args, operation.kwargs), cut, TensorRef)
        except LookupError:  # an unknown part
            return replace(operation, run=None, args=(), kwargs=(), reads=frozenset())
        return replace(operation, args=args, kwargs=kwargs, reads=frozenset(reads))
