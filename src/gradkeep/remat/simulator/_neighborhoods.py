"""Base class of heuristics, and costs of a storage together with its evicted neighborhood.

The neighborhood of `dtr` and `msps` is exact. The original maintains two sets for every storage in
memory, one upwards and one downwards: the evicted storages that it reaches through evicted ones only, and
the storages in memory where that search ends. It updates them at every eviction and rebuilds them at
every run, and its access count is the work of doing so. With a bit per storage that work is a few
operations on whole sets (`EvictedRegions`). The live runtime, which also removes edges, searches instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.remat._eviction_core import Storage, TensorNode

Pool = dict["Storage", None]
"""Storages that may be evicted, in the order in which they were unlocked."""


class Heuristic:
    """Base class of eviction heuristics: the storage with the smallest score is evicted.

    Among equal scores the last storage of the pool is chosen; a score of 0 ends the search. Subclasses
    override `score` or `choose`; `arrived` and `evicted` update their own bookkeeping. `score` is only
    called for storages that are in memory and not locked. Register a subclass to use it by name.

    Example:
        >>> class Oldest(Heuristic):
        ...     def score(self, storage, clock):
        ...         return storage.number
        >>> from gradkeep.remat import chain, register, simulate
        >>> register("oldest-first", Oldest)
        >>> simulate(chain(10), heuristic="oldest-first", budget=8).heuristic
        'oldest-first'
    """

    name = "keep"
    evaluations = 0
    """Number of computed scores."""
    accesses = 0
    """Number of storages accessed for scores and bookkeeping, counted as in the original."""

    trials = 1
    """Number of seeds whose mean and range a figure shows."""

    def score(self, storage: Storage, clock: int) -> float:
        """Compute the cost of evicting a storage.

        Args:
            storage: A storage in memory.
            clock: Current time.

        Returns:
            The score; the storage with the smallest one is evicted.
        """
        raise NotImplementedError

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        """Update the bookkeeping after a storage came into memory.

        Args:
            storage: The storage.
            recomputed: True if it was evicted before.
        """

    def evicted(self, storage: Storage) -> None:
        """Update the bookkeeping after an eviction.

        Args:
            storage: The evicted storage.
        """

    def declared(self, results: Sequence[TensorNode]) -> None:
        """Update the bookkeeping before an operator runs for the first time.

        Only called in simulations, and not under the policy `banish`.

        Args:
            results: Results of the operator.
        """

    def ran(self, storages: Sequence[Storage]) -> None:
        """Update the bookkeeping after one run brought storages into memory.

        Called after `arrived` of each storage, under the same conditions as `declared`.

        Args:
            storages: The storages.
        """

    def choose(self, pool: Pool, clock: int) -> Storage:
        """Choose the storage to evict.

        Args:
            pool: Evictable storages, in the order in which they were unlocked.
            clock: Current time.

        Returns:
            A storage of the pool.

        Raises:
            RematError: If no storage has a comparable score.
        """
        best, chosen, score = math.inf, None, self.score
        scanned = 0
        for storage in pool:
            scanned += 1
            cost = score(storage, clock)
            if cost <= best:
                best, chosen = cost, storage
                if cost == 0:
                    break
        self.evaluations += scanned
        self.accesses += scanned
        if chosen is None:
            raise RematError(
                f"the heuristic {self.name!r} scores no storage",
                code="remat.heuristic_score",
                found=repr(score(next(iter(pool)), clock)),
                expected="a number for at least one storage",
            )
        return chosen


class CostRatio(Heuristic):
    """Score a numerator divided by size, staleness, both or nothing."""

    uses_size = True
    uses_staleness = True
    recounts = False
    """Count the accesses of a cached numerator, because the original recomputes it each time."""

    def numerator(self, storage: Storage) -> float:
        """Compute the cost of recomputation."""
        raise NotImplementedError

    def choose(self, pool: Pool, clock: int) -> Storage:
        # The loop of the base class with `score` inlined: simulations spend their time here.
        best, chosen, numerator = math.inf, None, self.numerator
        size, stale, recounts = self.uses_size, self.uses_staleness, self.recounts
        scanned = looked = 0
        for storage in pool:
            scanned += 1
            under: float = storage.size if size else 1
            if stale:
                under *= clock - storage.last_access
            cost = math.inf
            if under > 0 or recounts:
                top = storage.cached
                if top is None:
                    top = numerator(storage)
                elif recounts:
                    looked += storage.edges_above + storage.edges_below + storage.extra_accesses
                if under > 0:
                    cost = top / under
            if cost <= best:
                best, chosen = cost, storage
                if cost == 0:
                    break
        self.evaluations += scanned
        self.accesses += scanned + looked
        assert chosen is not None
        return chosen


class _EvictedClass:
    """A node of a union-find forest over evicted storages."""

    __slots__ = ("compute", "parent", "watchers")

    def __init__(self, compute: int) -> None:
        self.parent: _EvictedClass | None = None
        self.compute = compute
        self.watchers: list[Storage] = []
        """Storages whose cached numerator includes this class's cost."""


def _root(group: _EvictedClass) -> tuple[_EvictedClass, int]:
    """Return the root of a class and the number of nodes visited, with path compression."""
    top, seen = group, 1
    while top.parent is not None:
        top = top.parent
        seen += 1
    if seen > 2:
        while group is not top and group.parent is not None:
            group.parent, group = top, group.parent
    return top, seen


class EquivalenceClasses(CostRatio):
    """Add the costs of adjacent evicted classes; classes merge on eviction and never split."""

    name = "dtr-eq"

    recounts = True

    def numerator(self, storage: Storage) -> float:
        total, seen, later = storage.compute, [], 0
        looked = storage.edges_above + storage.edges_below
        for neighbor in (*storage.above, *storage.below):
            if neighbor.material:
                continue
            group = neighbor.group
            if not isinstance(group, _EvictedClass):
                # Never in memory: its operator is waiting for this one.
                looked += 1
                continue
            root, nodes = _root(group)
            looked += nodes
            later += 1 if nodes == 1 else 2
            if root not in seen:
                seen.append(root)
                total += root.compute
                root.watchers.append(storage)
        self.accesses += looked
        storage.extra_accesses = later
        storage.cached = total
        return total

    def evicted(self, storage: Storage) -> None:
        group = _EvictedClass(storage.compute)
        storage.group = group
        looked = storage.edges_above + storage.edges_below
        for neighbor in (*storage.below, *storage.above):
            if neighbor.material:
                neighbor.cached = None
            elif isinstance(neighbor.group, _EvictedClass):
                root, nodes = _root(neighbor.group)
                looked += nodes + 1
                if root is not group:
                    _changed(root)
                    root.parent = group
                    group.compute += root.compute
            else:
                looked += 2
        self.accesses += looked

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        storage.cached = None
        group = storage.group
        looked = 2
        if isinstance(group, _EvictedClass):
            root, nodes = _root(group)
            looked = nodes + (1 if nodes == 1 else 2)
            root.compute -= storage.compute
            _changed(root)
            storage.group = None
        self.accesses += looked
        if recomputed:
            for neighbor in (*storage.above, *storage.below):
                neighbor.cached = None


def _changed(group: _EvictedClass) -> None:
    for storage in group.watchers:
        storage.cached = None
    group.watchers.clear()


class ExactNeighborhood(CostRatio):
    """Add the costs of all evicted ancestors and descendants that recomputation would involve."""

    name = "dtr"
    upwards = True
    downwards = True

    def __init__(self) -> None:
        self._changed: list[Storage] = []
        """Storages that arrived or were evicted since the last choice."""
        self._regions: EvictedRegions | None = None
        """Replaces searches if every operator is declared."""

    def numerator(self, storage: Storage) -> float:
        total = storage.compute
        for upwards in (True, False):
            if not (self.upwards if upwards else self.downwards):
                continue
            if self._regions is not None:
                total += self._regions.cost(storage, upwards=upwards)
            else:
                total += sum(
                    storage_reached.compute
                    for storage_reached in self.reachable(storage, upwards=upwards)
                )
        storage.cached = total
        return total

    def declared(self, results: Sequence[TensorNode]) -> None:
        if self._regions is None:
            self._regions = EvictedRegions()
        self._regions.declared(results)

    def ran(self, storages: Sequence[Storage]) -> None:
        if self._regions is not None:
            self.accesses += self._regions.arrived(storages)

    def reachable(self, storage: Storage, *, upwards: bool) -> set[Storage]:
        """Find the evicted storages reached through evicted ones only."""
        reached: set[Storage] = set()
        stack = [storage]
        while stack:
            place = stack.pop()
            neighbors = place.above if upwards else place.below
            self.accesses += place.edges_above if upwards else place.edges_below
            for other in neighbors:
                if not other.material and other not in reached:
                    reached.add(other)
                    stack.append(other)
        reached.discard(storage)
        return reached

    def evicted(self, storage: Storage) -> None:
        if self._regions is not None:
            self.accesses += self._regions.note_eviction(storage)
        else:
            self._changed.append(storage)

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        storage.cached = None
        if recomputed and self._regions is None:
            self._changed.append(storage)

    def choose(self, pool: Pool, clock: int) -> Storage:
        if self._regions is None:
            self._forget()
        return super().choose(pool, clock)

    def _forget(self) -> None:
        """Clear cached numerators that changes since the last choice have invalidated.

        A storage in memory is affected only if it reaches a changed one through evicted ones, so
        one search from all changed storages at once finds them, visiting each evicted storage once.
        """
        for upwards in (True, False):
            seen = set(self._changed)
            stack = list(seen)
            while stack:
                place = stack.pop()
                for other in place.above if upwards else place.below:
                    if other.material:
                        other.cached = None
                    elif other not in seen:
                        seen.add(other)
                        stack.append(other)
        self._changed.clear()


class EvictedAncestors(ExactNeighborhood):
    """Divide the cost of evicted ancestors by size: memory saved per second."""

    name = "msps"
    uses_staleness = False
    downwards = False


class UnionNeighborhood(ExactNeighborhood):
    """Count the neighborhood once, with the staleness of its freshest member."""

    name = "dtr-union"

    def declared(self, results: Sequence[TensorNode]) -> None:
        """Do nothing: the neighborhood is searched for every score, as in the original."""

    def evicted(self, storage: Storage) -> None:
        """Do nothing."""

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        """Do nothing."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        return Heuristic.choose(self, pool, clock)

    def score(self, storage: Storage, clock: int) -> float:
        around = self.reachable(storage, upwards=True) | self.reachable(storage, upwards=False)
        accessed = max([storage.last_access, *(member.last_access for member in around)])
        under = storage.size * (clock - accessed)
        top = storage.compute + sum(member.compute for member in around)
        return top / under if under > 0 else math.inf


_FEW = 24
"""Up to this number of set bits are extracted one by one."""


class _BitWeights:
    """An integer weight for every bit, and its sum over any set of bits."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._planes: list[int] = []
        """Plane k has the bits whose weight contains 2^k."""

    def put(self, number: int, value: int) -> None:
        """Set the weight of a bit."""
        while len(self._values) <= number:
            self._values.append(0)
        changed = self._values[number] ^ value
        self._values[number] = value
        while changed >> len(self._planes):
            self._planes.append(0)
        bit = 1 << number
        while changed:
            plane = changed.bit_length() - 1
            self._planes[plane] ^= bit
            changed ^= 1 << plane

    def total(self, bits: int) -> int:
        """Sum the weights of a set of bits."""
        if not bits:
            return 0
        if bits.bit_count() <= _FEW:
            return sum(self._values[number] for number in _numbers(bits))
        return sum((bits & plane).bit_count() << k for k, plane in enumerate(self._planes))


class _Direction:
    """One direction of edges: neighbors of each storage, and the reach through evicted ones."""

    def __init__(self) -> None:
        self.neighbors: list[list[int]] = []
        """Direct neighbors."""
        self.neighbor_bits: list[int] = []
        """Direct neighbors as bits."""
        self.reach: list[int] = []
        """Everything reached: evicted storages, and those in memory where the search ends."""
        self.known = 0
        """Storages whose `reach` is up to date; the others are updated on demand."""
        self.edges = _BitWeights()
        """Number of edges of each storage's tensors."""


class EvictedRegions:
    """Reachability through evicted storages during a run; edges may only be added."""

    def __init__(self) -> None:
        self.evicted = 0
        self.down, self.up = _Direction(), _Direction()
        self._storages: list[Storage] = []
        self._costs = _BitWeights()
        self._ordered = True
        """Every edge leads from a lower number to a higher one."""

    def _add(self, storage: Storage) -> None:
        bit = 1 << storage.number
        self._storages.append(storage)
        self.evicted |= bit
        for direction in (self.down, self.up):
            direction.neighbors.append([])
            direction.neighbor_bits.append(0)
            direction.reach.append(0)
            direction.known |= bit

    def _weigh(self, storage: Storage) -> None:
        self._costs.put(storage.number, storage.compute)
        self.up.edges.put(storage.number, storage.edges_above)
        self.down.edges.put(storage.number, storage.edges_below)

    def declared(self, results: Sequence[TensorNode]) -> None:
        """Add the results of an operator before its first run."""
        for tensor in results:
            if tensor.storage.number == len(self._storages):
                self._add(tensor.storage)
            self._weigh(tensor.storage)
        for parent in results[0].parents:
            origin = parent.storage
            self.down.edges.put(origin.number, origin.edges_below)
            for tensor in results:
                if tensor.storage is not origin:
                    self._add_edge(origin.number, tensor.storage.number)

    def _add_edge(self, above: int, below: int) -> None:
        if self.down.neighbor_bits[above] >> below & 1:
            return
        self._ordered = self._ordered and above < below
        for direction, back, start, end in (
            (self.down, self.up, above, below),
            (self.up, self.down, below, above),
        ):
            more = 1 << end
            if self.evicted >> end & 1:
                self._update_reach(direction, more)
                more |= direction.reach[end]
            direction.neighbors[start].append(end)
            direction.neighbor_bits[start] |= 1 << end
            direction.reach[start] |= more
            if self.evicted >> start & 1:
                self._update_reach(back, 1 << start)
                self._extend_reach(direction, back.reach[start], more)

    def _extend_reach(self, direction: _Direction, ends: int, more: int) -> None:
        """Extend the reach of storages; evicted ones are only marked as outdated."""
        for number in _numbers(ends & ~self.evicted):
            direction.reach[number] |= more
        direction.known &= ~(ends & self.evicted)

    def _update_reach(self, direction: _Direction, bits: int) -> None:
        """Bring `reach` of these storages up to date."""
        new = todo = bits & ~direction.known
        while new:
            neighbor_bits = 0
            for number in _numbers(new):
                neighbor_bits |= direction.neighbor_bits[number]
            new = neighbor_bits & self.evicted & ~direction.known & ~todo
            todo |= new
        if todo:
            self._rebuild(direction, _numbers(todo))
            direction.known |= todo

    def _rebuild(self, direction: _Direction, numbers: list[int]) -> None:
        """Recompute `reach` of these storages from their neighbors."""
        reach, neighbor_bits, neighbors, storages = (
            direction.reach,
            direction.neighbor_bits,
            direction.neighbors,
            self._storages,
        )
        if direction is self.down:
            numbers.reverse()
        if not self._ordered:
            for number in numbers:
                reach[number] = neighbor_bits[number]
        settled = False
        while not settled:
            settled = True
            for number in numbers:
                bits = neighbor_bits[number]
                for end in neighbors[number]:
                    if not storages[end].material:
                        bits |= reach[end]
                settled = settled and (self._ordered or bits == reach[number])
                reach[number] = bits

    def arrived(self, storages: Iterable[Storage]) -> int:
        """Mark storages that one run brought into memory; return the accesses of rebuilding sets."""
        numbers = [storage.number for storage in storages]
        these = sum(1 << number for number in numbers)
        for direction in (self.down, self.up):
            self._update_reach(direction, these)
        self.evicted &= ~these
        accesses = 0
        for direction, back in ((self.down, self.up), (self.up, self.down)):
            ends = 0
            for number in numbers:
                ends |= back.reach[number]
                if direction.reach[number]:
                    # Storages that reached it no longer reach anything through it.
                    direction.known &= ~back.reach[number]
            ends &= ~self.evicted & ~these
            self._update_reach(direction, ends | these)
            for number in _numbers(ends | these):
                # Edges of the storage and of all evicted ones that it reaches.
                accesses += direction.edges.total(
                    (direction.reach[number] & self.evicted) | 1 << number
                )
            for number in _numbers(ends):
                self._storages[number].cached = None
        return accesses

    def note_eviction(self, storage: Storage) -> int:
        """Mark an evicted storage; return the accesses of merging its sets into its neighbors'."""
        number, accesses = storage.number, 0
        bit = 1 << number
        for direction in (self.down, self.up):
            self._update_reach(direction, bit)
        for direction, back in ((self.down, self.up), (self.up, self.down)):
            added, ends = direction.reach[number], back.reach[number] & ~bit
            inner = added & self.evicted & ~bit
            self._update_reach(direction, ends & ~self.evicted)
            for end in _numbers(ends & ~self.evicted):
                accesses += (inner & ~direction.reach[end]).bit_count() + 1
                self._storages[end].cached = None
            self._extend_reach(direction, ends, added)
        self.evicted |= bit
        return accesses

    def cost(self, storage: Storage, *, upwards: bool) -> int:
        """Sum the costs of the evicted storages reached from a storage."""
        direction, bit = self.up if upwards else self.down, 1 << storage.number
        self._update_reach(direction, bit)
        return self._costs.total(direction.reach[storage.number] & self.evicted & ~bit)


def _numbers(bits: int) -> list[int]:
    """Return the positions of the set bits, lowest first.

    >>> _numbers(0b1011)
    [0, 1, 3]
    """
    if bits.bit_count() > _FEW:
        raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
        positions: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
        return positions
    few = []
    while bits:
        low = bits & -bits
        few.append(low.bit_length() - 1)
        bits ^= low
    return few
