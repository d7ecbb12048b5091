"""Several recordings of one step become one trace, if they are recordings of the same step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradkeep.remat._planned._trace import Trace


def agreed(kept: Trace, cloned: Trace) -> Trace | None:
    """The trace of a step recorded twice, or None if it did different things.

    From the cloning recording come the natural deaths and which operators can be run again; from
    both the least cost. An operator that was given another number each time is not run again.
    """
    if not _same(kept, cloned):
        return None
    operations = tuple(
        replace(
            theirs,
            # A way of its own was timed by itself, in the cloning recording only.
            cost=theirs.cost if theirs.apart else min(ours.cost, theirs.cost),
            run=theirs.run if (ours.args, ours.kwargs) == (theirs.args, theirs.kwargs) else None,
        )
        for ours, theirs in zip(kept.operations, cloned.operations, strict=True)
    )
    storages = tuple(
        replace(
            ours,
            natural=min(theirs.death, ours.death),
            pinned=ours.pinned or theirs.pinned,
        )
        for ours, theirs in zip(kept.storages, cloned.storages, strict=True)
    )
    slots = tuple(
        replace(ours, marks=ours.marks if ours.marks == theirs.marks else frozenset())
        for ours, theirs in zip(kept.slots, cloned.slots, strict=True)
    )
    sources = {
        value: source
        for value, source in kept.sources.items()
        if cloned.sources.get(value) == source
    }
    return replace(
        kept,
        operations=operations,
        storages=storages,
        slots=slots,
        sources=sources,
        open_slots=kept.open_slots | cloned.open_slots,
        seconds=min(kept.seconds, cloned.seconds),
    )


def cheaper(trace: Trace, other: Trace) -> Trace:
    """The trace with the smaller costs of one more recording, if that was the same step."""
    if not _same(trace, other):
        return trace
    pairs = zip(trace.operations, other.operations, strict=True)
    operations = tuple(
        ours if ours.apart else replace(ours, cost=min(ours.cost, theirs.cost))
        for ours, theirs in pairs
    )
    return replace(trace, operations=operations, seconds=min(trace.seconds, other.seconds))


def _same(left: Trace, right: Trace) -> bool:
    return (
        left.events == right.events
        and len(left.slots) == len(right.slots)
        and all(
            a == replace(b, marks=a.marks) for a, b in zip(left.slots, right.slots, strict=True)
        )
        and left.keeps_graph == right.keeps_graph
        and left.order == right.order
        and left.values == right.values
        and len(left.storages) == len(right.storages)
        and all(a.size == b.size for a, b in zip(left.storages, right.storages, strict=True))
        and all(map(lambda a, b: a.same(b), left.operations, right.operations))
    )
