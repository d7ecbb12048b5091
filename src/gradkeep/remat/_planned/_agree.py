"""Several recordings of one step become one trace, if they are recordings of the same step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.remat._planned._trace import Operation, Trace

T = TypeVar("T")


def agreed(kept: Trace, cloned: Trace) -> Trace | None:
    """The trace of a step recorded twice, or None if it did different things.

    From the cloning recording come the natural deaths and which operators can be run again; from
    both the least cost. An operator that was given another number each time is not run again.
    """
    if not _same(kept, cloned):
        return None
    core = kept.core
    operations = tuple(
        replace(
            theirs,
            cost=min(ours.cost, theirs.cost),
            run=theirs.run if _same_numbers(ours, theirs) else None,
        )
        for ours, theirs in _pairs(kept.operations, cloned.operations, core.operations)
    )
    storages = tuple(
        replace(
            ours,
            natural=min(theirs.death, ours.death),
            pinned=ours.pinned or theirs.pinned,
        )
        for ours, theirs in _pairs(kept.storages, cloned.storages, core.storages)
    )
    slots = tuple(
        replace(ours, marks=ours.marks if ours.marks == theirs.marks else frozenset())
        for ours, theirs in _pairs(kept.slots, cloned.slots, core.slots)
    )
    sources = {
        value: source
        for value, source in kept.sources.items()
        if cloned.sources.get(value) == source
    }
    return replace(
        kept,
        operations=operations + kept.operations[core.operations :],
        storages=storages + kept.storages[core.storages :],
        slots=slots + kept.slots[core.slots :],
        sources=sources,
        open_slots=kept.open_slots | cloned.open_slots,
    )


def cheaper(trace: Trace, other: Trace) -> Trace:
    """The trace with the smaller costs of one more recording, if that was the same step."""
    if not _same(trace, other):
        return trace
    count = trace.core.operations
    pairs = _pairs(trace.operations, other.operations, count)
    operations = tuple(replace(ours, cost=min(ours.cost, theirs.cost)) for ours, theirs in pairs)
    return replace(trace, operations=operations + trace.operations[count:])


def _same_numbers(left: Operation, right: Operation) -> bool:
    """Whether an operator can be run again, and was given the same both times."""
    both = left.run is not None and right.run is not None
    return both and (left.args, left.kwargs) == (right.args, right.kwargs)


def _same(left: Trace, right: Trace) -> bool:
    """Whether two steps did the same until the last saved tensor was asked for."""
    core = left.core
    return (
        core == right.core
        and left.keeps_graph == right.keeps_graph
        and left.order == right.order
        and left.events[: core.events] == right.events[: core.events]
        and left.values[: core.values] == right.values[: core.values]
        and all(
            a == replace(b, marks=a.marks) for a, b in _pairs(left.slots, right.slots, core.slots)
        )
        and all(a.size == b.size for a, b in _pairs(left.storages, right.storages, core.storages))
        and all(a.same(b) for a, b in _pairs(left.operations, right.operations, core.operations))
    )


def same_step(left: Trace, right: Trace) -> bool:
    """Whether two steps did the same with the same numbers."""
    count = left.core.operations
    return _same(left, right) and all(
        (a.args, a.kwargs) == (b.args, b.kwargs)
        for a, b in _pairs(left.operations, right.operations, count)
    )


def _pairs(left: Sequence[T], right: Sequence[T], count: int) -> Iterator[tuple[T, T]]:
    return zip(left[:count], right[:count], strict=True)
