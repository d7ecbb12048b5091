"""Predict the cost and the memory of a plan, event by event, without running anything.

The same pass gives the rebuild programs: which operators run again at which request, what they retain for
later requests, and until when their sources are held. So a run does exactly what was predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradkeep.remat._rerun import TensorRef, count_temporary_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat.planned._trace import StepTrace, TracedOperation


@dataclass(frozen=True)
class DropCandidate:
    """A saved value that may be dropped."""

    value: int
    size: int
    first_pack: int
    """Event after which autograd allows dropping it."""
    free_from: int
    """First event at which its bytes are free if it is dropped."""
    requests: tuple[int, ...]
    """Positions in the order of requests."""
    cost: float
    """Seconds to recompute it if every other saved value is in memory."""
    recipe: frozenset[int]
    """Operators that recompute it."""


@dataclass(frozen=True)
class PlanningProblem:
    """A trace with everything needed to evaluate plans."""

    trace: StepTrace
    candidates: tuple[DropCandidate, ...]
    saved: dict[int, int]
    """Saved values that are never overwritten, with the event of their first pack."""
    random_state: dict[int, int]
    """Random operators that can run again, with the slot at which the generator's state is taken."""
    known: dict[int, int]
    """Per candidate value: the event at which all its sources have been saved."""
    levels: list[int] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    """Bytes of the storage of each value."""
    costs: tuple[float, ...] = ()
    """Seconds to run each operator again."""

    @property
    def peak(self) -> int:
        """Largest number of bytes alive at once if nothing is dropped."""
        return max(self.levels, default=0)


def build_problem(trace: StepTrace, *, min_size: int) -> PlanningProblem:
    """Find the candidates of a trace."""
    saved: dict[int, int] = {}
    slots_of: dict[int, list[int]] = {}
    versions: dict[int, set[int]] = {}
    for number, slot in enumerate(trace.slots):
        if slot.is_final:
            saved.setdefault(slot.value, slot.event)
        slots_of.setdefault(slot.value, []).append(number)
        versions.setdefault(trace.values[slot.value].storage, set()).add(slot.value)
    requests: dict[int, list[int]] = {}
    for at, number in enumerate(trace.order):
        requests.setdefault(trace.slots[number].value, []).append(at)
    random_state = _random_states(trace)
    # If a saved tensor's storage is written to later, the rest of the storage is lost, so nothing
    # is recomputed from it.
    written = {
        value
        for operation in trace.operations[: trace.lengths.operations]
        for value in operation.overwrites
    }
    # Nothing is recomputed from tensors whose size varies.
    written |= {slot.value for slot in trace.slots if slot.varies}
    intact = {value: event for value, event in saved.items() if value not in written}
    lasting = {value: source for value, source in trace.sources.items() if value not in written}
    trace = replace(trace, sources=lasting)
    makeable = _find_makeable(trace, intact, random_state)
    sizes = tuple(trace.storages[value.storage].size for value in trace.values)
    costs = tuple(map(_estimate_rerun_seconds, trace.operations))
    candidates = []
    known = {}
    for value, pack in saved.items():
        stored = trace.storages[trace.values[value].storage]
        if stored.constant or stored.pinned or stored.size < min_size:
            continue
        if len(versions[trace.values[value].storage]) > 1 or value not in makeable:
            continue
        if trace.open_slots & set(slots_of[value]):
            continue
        if any(trace.slots[number].varies for number in slots_of[value]):
            continue
        recipe, starts = _find_recipe(trace, intact, value)
        # It cannot be dropped before all its sources are saved.
        known[value] = max([pack, *(intact.get(start, 0) for start in starts)])
        free_from = max(stored.natural, known[value] + 1)
        own_requests = requests.get(value, [])
        first = trace.request_events[own_requests[0]] if own_requests else stored.death
        if free_from >= min(first, stored.death):
            continue  # something else holds it until it is requested: nothing to gain
        cost = sum(costs[number] for number in recipe)
        candidates.append(
            DropCandidate(value, stored.size, pack, free_from, tuple(own_requests), cost, recipe)
        )
    return PlanningProblem(
        trace, tuple(candidates), intact, random_state, known, trace.levels(), sizes, costs
    )


def _estimate_rerun_seconds(operation: TracedOperation) -> float:
    """Estimate the seconds of running an operator again, long after its first run."""
    shown = [arg.geometry for arg in operation.args if isinstance(arg, TensorRef)]
    shown += [result.geometry for result in operation.makes]
    touched = sum(math.prod(geometry.size) * geometry.dtype.itemsize for geometry in shown)
    # 15 us to build its arguments, and 0.04 ns for every byte that it reads or writes: in the
    # recorded step they were in the cache. This doubles the time of small element-wise operators.
    return operation.cost + 15e-6 + 4e-11 * touched


def _random_states(trace: StepTrace) -> dict[int, int]:
    """Map random operators to slots: a state taken at a pack is valid for the next random operator only."""
    slots: dict[int, int] = {}
    slot: int | None = None
    fresh = False
    for event in trace.events:
        if event.kind == "pack":
            slot, fresh = event.number, True
        elif event.kind == "op" and trace.operations[event.number].random:
            if fresh and slot is not None:
                slots[event.number] = slot
            fresh = False
    return slots


def _find_makeable(
    trace: StepTrace, saved: dict[int, int], random_state: dict[int, int]
) -> set[int]:
    """Find the values that can be recomputed; makers come before readers."""
    makeable: set[int] = set()
    for number, value in enumerate(trace.values):
        operation = None if value.maker is None else trace.operations[value.maker]
        if operation is None or operation.run is None:
            continue
        if operation.random and value.maker not in random_state:
            continue
        # An overwritten value must itself be recomputed.
        missing = operation.reads - saved.keys() - trace.sources.keys()
        if makeable.issuperset(operation.overwrites) and makeable.issuperset(missing):
            makeable.add(number)
    return makeable


def _find_recipe(
    trace: StepTrace, saved: dict[int, int], value: int
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the operators that recompute a value, and the saved values and constants that they start from."""
    operations: set[int] = set()
    starts: set[int] = set()
    stack = [(value, True)]
    while stack:
        current, forced = stack.pop()
        if not forced and (current in saved or current in trace.sources):
            starts.add(current)
            continue
        maker = trace.values[current].maker
        assert maker is not None
        if maker not in operations:
            operations.add(maker)
            operation = trace.operations[maker]
            stack += [(read, read in operation.overwrites) for read in operation.reads]
    return frozenset(operations), frozenset(starts)


class Treatment(IntEnum):
    """Treatment of a saved value."""

    KEEP = 0
    DROP = 1
    """Recompute it at the first request, and keep it until the last."""
    REPEAT = 2
    """Recompute it at every request; retain no intermediate values."""
    JOINT = 3
    """As DROP, but recomputed as soon as an operator that it needs runs for another value."""
    LATE = 4
    """As DROP near its last request, as REPEAT before: intermediate values of an early rebuild, such as
    the encoder of a U-Net for its decoder, do not stay until the end.
    """


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Operators to run at one request."""

    at: int
    """Position in the order of requests."""
    value: int
    operations: tuple[int, ...]
    sources: frozenset[int]
    """Values that must be in memory."""
    retained: frozenset[int]
    """Recomputed values that stay for later requests."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Predicted cost of a plan."""

    seconds: float
    peak: int
    peak_event: int
    """Event of the peak."""
    rebuilds: tuple[Rebuild, ...]
    last_use: dict[int, int]
    """Last position in the order of requests at which a rebuild needs each source."""
    levels: np.ndarray[Any, np.dtype[np.int64]]
    """Bytes alive at each event."""

    def excess(self, budget: int) -> float:
        """Bytes over the budget, summed over events."""
        return float(np.maximum(self.levels - budget, 0).sum())


class _CachedRebuild(NamedTuple):
    """A rebuild with the codes of the candidates that it depends on."""

    conditions: tuple[tuple[int, int], ...]
    rebuild: Rebuild
    seconds: float
    change: tuple[tuple[int, int], ...]
    burst: tuple[int, int]
    """Event, and bytes taken at it beyond what stays."""
    present: tuple[int, ...]
    """Candidates retained for later requests."""


class PlanEvaluator:
    """Evaluate many plans of one problem; a plan is a state per candidate."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        trace = problem.trace
        self._base = np.asarray(problem.levels, dtype=np.int64)
        self._index = {c.value: at for at, c in enumerate(problem.candidates)}
        self._maker = [value.maker for value in trace.values]
        self._storage = [value.storage for value in trace.values]
        self._reads = [tuple(sorted(operation.reads)) for operation in trace.operations]
        self._forced = [frozenset(operation.overwrites) for operation in trace.operations]
        self._makes = [tuple(m.value for m in operation.makes) for operation in trace.operations]
        self._takes = [
            sum(problem.sizes[m.value] for m in operation.makes if m.position >= 0)
            for operation in trace.operations
        ]
        self._temporary_bytes = [
            count_temporary_bytes(operation.args) if operation.first_result else 0
            for operation in trace.operations
        ]
        """Bytes that an operator allocates only while it runs again."""
        self._cost = problem.costs
        self._asks = sorted(
            (at, index) for index, c in enumerate(problem.candidates) for at in c.requests
        )
        self._freed_bytes = [
            (
                (c.free_from, -c.size),
                (trace.storages[self._storage[c.value]].death, c.size),
            )
            for c in problem.candidates
        ]
        """Bytes that dropping each candidate frees until it is recomputed."""
        needed: dict[int, list[int]] = {}
        for index, candidate in enumerate(problem.candidates):
            for number in candidate.recipe:
                needed.setdefault(number, []).append(index)
        self._sharing = {number: own for number, own in needed.items() if len(own) > 1}
        """Candidates that need each operator, if several do."""
        # The last request is near if it comes within an eighth of all requests.
        self._near_requests = len(trace.order) // 8
        self._cached: dict[int, list[_CachedRebuild]] = {}
        self.work = 0
        """Operators in all rebuilds computed so far."""
        self._ready = {**problem.saved, **dict.fromkeys(trace.sources, -1)}
        """Values available unless dropped, with the event from which they are."""

    def __call__(self, states: Sequence[int]) -> PlanEvaluation:
        """Evaluate a plan by walking through the requests in order."""
        problem, trace = self.problem, self.problem.trace
        candidates, request_events = problem.candidates, trace.request_events
        # Per candidate: twice its state, plus one while it is recomputed and retained.
        codes = [2 * state for state in states]
        change: list[tuple[int, int]] = []
        bursts: list[tuple[int, int]] = []
        rebuilds: list[Rebuild] = []
        last_use: dict[int, int] = {}
        seconds = 0.0
        for index, code in enumerate(codes):
            if code:
                change += self._freed_bytes[index]
        for at, index in self._asks:
            code = codes[index]
            if not code:
                continue
            candidate = candidates[index]
            if code & 1:
                if candidate.requests[-1] == at:
                    codes[index] = code - 1
                continue
            known = self._rebuild(candidate.value, at, codes)
            seconds += known.seconds
            change += known.change
            bursts.append(known.burst)
            rebuilds.append(known.rebuild)
            for other in known.present:
                codes[other] += 1
            for source in known.rebuild.sources:
                last_use[source] = at
        for source, at in last_use.items():
            stored = trace.storages[self._storage[source]]
            own = self._index.get(source)
            dropped = own is not None and states[own]
            if not dropped and not stored.constant and stored.death <= request_events[at]:
                change += [(stored.death, stored.size), (request_events[at] + 1, -stored.size)]
        levels = self._base
        if change:
            step = np.zeros(len(levels) + 1, dtype=np.int64)
            events, sizes = zip(*change, strict=True)
            np.add.at(step, np.minimum(events, len(levels)), sizes)
            levels = levels + np.cumsum(step)[:-1]
            for event, burst in bursts:
                if burst > 0:
                    levels[event] += burst
        peak_event = int(levels.argmax()) if len(levels) else 0
        peak = int(levels[peak_event]) if len(levels) else 0
        return PlanEvaluation(seconds, peak, peak_event, tuple(rebuilds), last_use, levels)

    def _rebuild(self, value: int, at: int, codes: Sequence[int]) -> _CachedRebuild:
        """Return the rebuild at a request, from the cache if possible: many plans share it."""
        entries = self._cached.setdefault(at, [])
        for entry in entries:
            for index, code in entry.conditions:
                if codes[index] != code:
                    break
            else:
                return entry
        entry = self._build(value, at, codes)
        entries.append(entry)
        if len(entries) > 20:  # more are seldom reused
            del entries[0]
        return entry

    def _build(self, value: int, at: int, codes: Sequence[int]) -> _CachedRebuild:
        """Find the operators that recompute a value, their cost and the bytes they take."""
        trace, candidates = self.problem.trace, self.problem.candidates
        event = trace.request_events[at]
        index, ready, maker = self._index, self._ready, self._maker
        operations: set[int] = set()
        sources: set[int] = set()
        forced: set[int] = set()
        conditions: dict[int, int] = {}
        stack = [(value, True)]
        roots = {value}
        news: list[int] = []
        while stack or news:
            if not stack:
                # Also recompute joint candidates that share the operator and are requested later.
                for other in self._sharing[news.pop()]:
                    conditions[other] = codes[other]
                    mate = candidates[other]
                    is_joint = codes[other] == 2 * Treatment.JOINT and mate.value not in roots
                    if is_joint and mate.requests and mate.requests[-1] > at:
                        roots.add(mate.value)
                        stack.append((mate.value, True))
                continue
            current, must = stack.pop()
            if not must:
                own = index.get(current)
                if own is not None:
                    conditions[own] = codes[own]
                if own is not None and codes[own]:
                    there = bool(codes[own] & 1)
                else:
                    there = ready.get(current, event) < event
                if there:
                    sources.add(current)
                    continue
            elif current not in roots:
                forced.add(current)
            number = maker[current]
            assert number is not None
            if number not in operations:
                operations.add(number)
                if number in self._sharing:
                    news.append(number)
                stack += [(read, read in self._forced[number]) for read in self._reads[number]]
        order = sorted(operations)
        self.work += len(order)
        retained: set[int] = set()
        for number in order:
            for result in self._makes[number]:
                own = index.get(result)
                if own is None:
                    continue
                conditions[own] = codes[own]
                requests = candidates[own].requests
                if result in forced or not requests or (result != value and requests[-1] <= at):
                    continue
                late = codes[own] == 2 * Treatment.LATE and requests[-1] - at <= self._near_requests
                if late or codes[own] in (2 * Treatment.DROP, 2 * Treatment.JOINT):
                    retained.add(result)
        change: list[tuple[int, int]] = []
        arrived = 0
        present = []
        for result in sorted(retained):
            own = index[result]
            size = candidates[own].size
            change += [(event, size), (trace.storages[self._storage[result]].death, -size)]
            arrived += size
            if candidates[own].requests[-1] > at:
                present.append(own)
        if value not in retained:
            candidate = candidates[index[value]]
            end = trace.freed[at]
            if at == candidate.requests[-1]:
                # The last reader may return it as a gradient.
                end = max(end, trace.storages[self._storage[value]].death)
            change += [(event, candidate.size), (end, -candidate.size)]
            arrived += candidate.size
        burst = self._burst(order, retained | {value}) - arrived
        return _CachedRebuild(
            conditions=tuple(conditions.items()),
            rebuild=Rebuild(at, value, tuple(order), frozenset(sources), frozenset(retained)),
            seconds=sum(self._cost[number] for number in order),
            change=tuple(change),
            burst=(event, burst),
            present=tuple(present),
        )

    def _burst(self, order: Sequence[int], stay: set[int]) -> int:
        """Return the largest number of bytes that these operators take at once, retained values included."""
        last: dict[int, int] = {}
        for number in order:
            for read in self._reads[number]:
                last[self._storage[read]] = number
            for result in self._makes[number]:
                last[self._storage[result]] = number
        staying = {self._storage[value] for value in stay}
        ends: dict[int, list[int]] = {}
        sizes = self.problem.sizes
        mine: set[int] = set()
        for number in order:
            for result in self._makes[number]:
                storage = self._storage[result]
                if storage not in mine:
                    mine.add(storage)
                    if storage not in staying:
                        ends.setdefault(last[storage], []).append(sizes[result])
        level = most = 0
        for number in order:
            level += self._takes[number]
            most = max(most, level + self._temporary_bytes[number])
            level -= sum(ends.get(number, ()))
        return most
