"""What a planner may decide about a trace: which saved values could be dropped, at what price.

A candidate is a saved value that can be made again from what will be there: parameters, inputs, other
saved values, or values that can be made again themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gradkeep.remat.tracing._rerun import TensorRef

if TYPE_CHECKING:
    from gradkeep.remat.planned._trace import StepTrace, TracedOperation

_REPLAY_SECONDS = 15e-6
"""What running one operator again costs beside the operator: its arguments are put together."""
_BYTE_SECONDS = 4e-11
"""What every byte that it reads or makes costs more than in the recorded step: there it was fresh in
the cache. The time of small element-wise operators doubles by that."""


@dataclass(frozen=True)
class DropCandidate:
    """A saved value that may be dropped."""

    value: int
    size: int
    first_pack: int
    """The event after which it may go, as far as autograd is concerned."""
    gone: int
    """The event from which on its bytes are free if it is dropped."""
    asks: tuple[int, ...]
    """Positions in the order of asking."""
    cost: float
    """Seconds to make it again if every other saved value is there."""
    recipe: frozenset[int]
    """The operators that do."""


@dataclass(frozen=True)
class PlanningProblem:
    """A trace with everything that evaluating a plan needs, looked up once."""

    trace: StepTrace
    candidates: tuple[DropCandidate, ...]
    saved: dict[int, int]
    """Values that autograd saves and that stay as they are, with the event of their first pack."""
    random_state: dict[int, int]
    """Random operators that can run again, with the slot before which the generator's state counts."""
    known: dict[int, int]
    """For each candidate's value: the event at which all its sources have been saved."""
    levels: list[int] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    """Bytes of the storage of each value."""
    costs: tuple[float, ...] = ()
    """Seconds to run each operator again."""

    @property
    def peak(self) -> int:
        """The most bytes alive at once if nothing is dropped."""
        return max(self.levels, default=0)


def problem_of(trace: StepTrace, *, min_size: int) -> PlanningProblem:
    """Find the candidates."""
    saved: dict[int, int] = {}
    slots_of: dict[int, list[int]] = {}
    versions: dict[int, set[int]] = {}
    for number, slot in enumerate(trace.slots):
        saved.setdefault(slot.value, slot.event)
        slots_of.setdefault(slot.value, []).append(number)
        versions.setdefault(trace.values[slot.value].storage, set()).add(slot.value)
    asks: dict[int, list[int]] = {}
    for at, number in enumerate(trace.order):
        asks.setdefault(trace.slots[number].value, []).append(at)
    random_state = _random_states(trace)
    # Of a saved tensor whose storage is written to later only its own part is what it was: what
    # else the storage held is gone, so nothing is made from it.
    written = {
        value
        for operation in trace.operations[: trace.lengths.operations]
        for value in operation.overwrites
    }
    # Nor is anything made from what has another size each time.
    written |= {slot.value for slot in trace.slots if slot.varies}
    whole = {value: event for value, event in saved.items() if value not in written}
    lasting = {value: source for value, source in trace.sources.items() if value not in written}
    trace = replace(trace, sources=lasting)
    makeable = _Makeable(trace, whole, random_state)
    sizes = tuple(trace.storages[value.storage].size for value in trace.values)
    costs = tuple(map(_again_seconds, trace.operations))
    found = []
    known = {}
    for value, pack in saved.items():
        stored = trace.storages[trace.values[value].storage]
        if stored.constant or stored.pinned or stored.size < min_size:
            continue
        if len(versions[trace.values[value].storage]) > 1 or not makeable.again(value):
            continue
        if trace.open_slots & set(slots_of[value]):
            continue
        if any(trace.slots[number].varies for number in slots_of[value]):
            continue
        known[value] = makeable.known_at(value, pack)
        gone = max(stored.natural, known[value] + 1)
        asked = asks.get(value, [])
        first = trace.asked[asked[0]] if asked else stored.death
        if gone >= min(first, stored.death):
            continue  # whoever holds it holds it until it is asked for: nothing to gain
        recipe = makeable.recipe(value)
        cost = sum(costs[number] for number in recipe)
        found.append(DropCandidate(value, stored.size, pack, gone, tuple(asked), cost, recipe))
    return PlanningProblem(
        trace, tuple(found), whole, random_state, known, trace.levels(), sizes, costs
    )


def _again_seconds(operation: TracedOperation) -> float:
    """What it costs to run an operator once more, long after it ran first."""
    shown = [arg.geometry for arg in operation.args if isinstance(arg, TensorRef)]
    shown += [made.geometry for made in operation.makes]
    touched = sum(math.prod(geometry.size) * geometry.dtype.itemsize for geometry in shown)
    return operation.cost + _REPLAY_SECONDS + _BYTE_SECONDS * touched


def _random_states(trace: StepTrace) -> dict[int, int]:
    """A state taken at a pack holds for the first random operator after it, and for no other."""
    found: dict[int, int] = {}
    slot: int | None = None
    fresh = False
    for event in trace.events:
        if event.kind == "pack":
            slot, fresh = event.number, True
        elif event.kind == "op" and trace.operations[event.number].random:
            if fresh and slot is not None:
                found[event.number] = slot
            fresh = False
    return found


class _Makeable:
    """Which values can be made again, from what, and at what price if all saved ones are there."""

    def __init__(
        self, trace: StepTrace, saved: dict[int, int], random_state: dict[int, int]
    ) -> None:
        self._trace, self._saved, self._random_state = trace, saved, random_state
        self._again: dict[int, bool] = {}

    def there(self, value: int) -> bool:
        """It is at hand, or can be made."""
        return value in self._saved or value in self._trace.sources or self.again(value)

    def again(self, value: int) -> bool:
        """Its operator can be run again."""
        known = self._again.get(value)
        if known is not None:
            return known
        # Makers come before their readers, so looking at them in order needs no recursion.
        order, stack = [], [value]
        while stack:
            current = stack.pop()
            maker = self._trace.values[current].maker
            if current in self._again or maker is None:
                continue
            order.append(current)
            stack += list(self._trace.operations[maker].reads)
        for current in sorted(set(order)):
            self._again[current] = self._makes(current)
        return self._again.setdefault(value, False)

    def _makes(self, value: int) -> bool:
        maker = self._trace.values[value].maker
        assert maker is not None
        operation = self._trace.operations[maker]
        if operation.run is None or (operation.random and maker not in self._random_state):
            return False
        # What is overwritten must be a value of our own, made for this.
        if not all(self._again.get(old, False) for old in operation.overwrites):
            return False
        return all(
            read in self._saved or read in self._trace.sources or self._again.get(read, False)
            for read in operation.reads
        )

    def _recipe(self, value: int) -> tuple[set[int], set[int]]:
        """The operators that make a value, and the saved values and constants that they start from."""
        operations: set[int] = set()
        starts: set[int] = set()
        stack = [(value, True)]
        while stack:
            current, forced = stack.pop()
            if not forced and (current in self._saved or current in self._trace.sources):
                starts.add(current)
                continue
            maker = self._trace.values[current].maker
            assert maker is not None
            if maker in operations:
                continue
            operations.add(maker)
            operation = self._trace.operations[maker]
            stack += [(read, read in operation.overwrites) for read in operation.reads]
        return operations, starts

    def recipe(self, value: int) -> frozenset[int]:
        """The operators that make a value if all saved ones are there."""
        return frozenset(self._recipe(value)[0])

    def known_at(self, value: int, pack: int) -> int:
        """The event at which all it is made from has been saved: before, it cannot be let go."""
        _, starts = self._recipe(value)
        return max([pack, *(self._saved.get(start, 0) for start in starts)])
