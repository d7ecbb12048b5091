"""What every heuristic is, and costs of a storage with what was evicted around it.

The neighbourhood of `dtr` and `msps` is exact. The original keeps two sets for every storage in memory,
one upwards and one downwards: the evicted storages that it reaches through evicted ones only, and those
in memory where that ends. It changes them at every eviction and builds them again at every run, and its
count of accesses is the work of doing so. With a bit per storage that work is a few operations on whole
sets (`EvictedRegions`). The live runtime, where edges also go, searches instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.remat.simulator._core import Storage, TensorNode

Pool = dict["Storage", None]
"""The storages that may go, in the order in which they came to be free."""


class Heuristic:
    """Base: scores every storage of the pool; the last of the lowest goes, the first that is free.

    `arrived` and `evicted` keep a heuristic's own books; `score` may be called for storages that are
    in memory and not locked. One of your own is known by name once it is registered:

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
    """How many scores were asked for."""
    accesses = 0
    """How many storages were looked at to answer, and to keep the books, as the original counts."""

    trials = 1
    """How many seeds a picture takes the mean and the range of."""

    def score(self, storage: Storage, clock: int) -> float:
        """What evicting the storage would cost."""
        raise NotImplementedError

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        """The storage came into memory, for the first time or again."""

    def evicted(self, storage: Storage) -> None:
        """The storage left memory."""

    def declared(self, results: Sequence[TensorNode]) -> None:
        """An operator is about to run for the first time; simulations tell, except of `banish`."""

    def ran(self, storages: Sequence[Storage]) -> None:
        """One run brought these into memory, after `arrived` of each; told likewise."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        """The storage of the pool to evict, in the pool's order."""
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
                f"the heuristic {self.name!r} gave no storage a score",
                found=repr(score(next(iter(pool)), clock)),
                expected="a number for at least one; the storage with the smallest goes",
            )
        return chosen


class CostRatio(Heuristic):
    """A numerator over size, staleness, both or nothing."""

    uses_size = True
    uses_staleness = True
    recounts = False
    """The original works a numerator out anew each time: its accesses count though it is kept."""

    def numerator(self, storage: Storage) -> float:
        """What would have to be recomputed."""
        raise NotImplementedError

    def choose(self, pool: Pool, clock: int) -> Storage:
        # The same as the base's loop, written out: this is where a simulation spends its time.
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
        """Storages whose numerator was worked out with this group's cost."""


def _root(group: _EvictedClass) -> tuple[_EvictedClass, int]:
    """The root of a class, and how many nodes were looked at to find it; all then point to it."""
    top, seen = group, 1
    while top.parent is not None:
        top = top.parent
        seen += 1
    if seen > 2:
        while group is not top and group.parent is not None:
            group.parent, group = top, group.parent
    return top, seen


class EquivalenceClasses(CostRatio):
    """The evicted classes beside the storage; merged as storages go, never split as they return."""

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
                # It was never in memory: its operator is waiting for this one.
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
    """All evicted storages that would have to come back, and those that would then need this one."""

    name = "dtr"
    upwards = True
    downwards = True

    def __init__(self) -> None:
        self._changed: list[Storage] = []
        """Storages that came or went since the last choice."""
        self._regions: EvictedRegions | None = None
        """In place of searches, where every operator is announced."""

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
        """Evicted storages reached through evicted ones only."""
        reached: set[Storage] = set()
        stack = [storage]
        while stack:
            place = stack.pop()
            beside = place.above if upwards else place.below
            self.accesses += place.edges_above if upwards else place.edges_below
            for other in beside:
                if not other.material and other not in reached:
                    reached.add(other)
                    stack.append(other)
        reached.discard(storage)
        return reached

    def evicted(self, storage: Storage) -> None:
        if self._regions is not None:
            self.accesses += self._regions.left(storage)
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
        """Forget the numerators that changes since the last choice have made wrong.

        A storage in memory is affected only if it reaches a changed one through evicted ones, so
        one search from all changed storages at once finds them, each evicted storage once.
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
    """What must come back first, by size: the memory that is saved per second."""

    name = "msps"
    uses_staleness = False
    downwards = False


class UnionNeighborhood(ExactNeighborhood):
    """The neighbourhood counted once, and as stale as its freshest member."""

    name = "dtr-union"

    def declared(self, results: Sequence[TensorNode]) -> None:
        """It looks anew each time, as the original does, and keeps no books."""

    def evicted(self, storage: Storage) -> None:
        """Likewise."""

    def arrived(self, storage: Storage, *, recomputed: bool) -> None:
        """Likewise."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        return Heuristic.choose(self, pool, clock)

    def score(self, storage: Storage, clock: int) -> float:
        around = self.reachable(storage, upwards=True) | self.reachable(storage, upwards=False)
        accessed = max([storage.last_access, *(member.last_access for member in around)])
        under = storage.size * (clock - accessed)
        top = storage.compute + sum(member.compute for member in around)
        return top / under if under > 0 else math.inf


_FEW = 24
"""Up to so many bits are found one by one."""


class _BitWeights:
    """A whole number for every bit, and their sum over any set of bits."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._planes: list[int] = []
        """Plane k has the bits of those whose number has 2^k in it."""

    def put(self, number: int, value: int) -> None:
        """The number of a bit from now on."""
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
        """The sum over a set."""
        if not bits:
            return 0
        if bits.bit_count() <= _FEW:
            return sum(self._values[number] for number in _numbers(bits))
        return sum((bits & plane).bit_count() << k for k, plane in enumerate(self._planes))


class _Direction:
    """One direction: from each storage to its neighbours, and on through evicted ones."""

    def __init__(self) -> None:
        self.beside: list[list[int]] = []
        """Direct neighbours."""
        self.near: list[int] = []
        """The same as bits."""
        self.far: list[int] = []
        """All that is reached: evicted ones, and those in memory where it ends."""
        self.known = 0
        """The storages for which that is right; of the others it is found when it is asked for."""
        self.edges = _BitWeights()
        """Of each storage, the edges of its tensors."""


class EvictedRegions:
    """Follows a run of the eviction core; edges may only be added."""

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
        for way in (self.down, self.up):
            way.beside.append([])
            way.near.append(0)
            way.far.append(0)
            way.known |= bit

    def _weigh(self, storage: Storage) -> None:
        self._costs.put(storage.number, storage.compute)
        self.up.edges.put(storage.number, storage.edges_above)
        self.down.edges.put(storage.number, storage.edges_below)

    def declared(self, results: Sequence[TensorNode]) -> None:
        """An operator is about to run for the first time."""
        for tensor in results:
            if tensor.storage.number == len(self._storages):
                self._add(tensor.storage)
            self._weigh(tensor.storage)
        for parent in results[0].parents:
            origin = parent.storage
            self.down.edges.put(origin.number, origin.edges_below)
            for tensor in results:
                if tensor.storage is not origin:
                    self._join(origin.number, tensor.storage.number)

    def _join(self, above: int, below: int) -> None:
        if self.down.near[above] >> below & 1:
            return
        self._ordered = self._ordered and above < below
        for way, back, start, end in (
            (self.down, self.up, above, below),
            (self.up, self.down, below, above),
        ):
            more = 1 << end
            if self.evicted >> end & 1:
                self._update_reach(way, more)
                more |= way.far[end]
            way.beside[start].append(end)
            way.near[start] |= 1 << end
            way.far[start] |= more
            if self.evicted >> start & 1:
                self._update_reach(back, 1 << start)
                self._extend_reach(way, back.far[start], more)

    def _extend_reach(self, way: _Direction, ends: int, more: int) -> None:
        """These reach more from now on; the evicted ones among them are many, and seldom asked."""
        for number in _numbers(ends & ~self.evicted):
            way.far[number] |= more
        way.known &= ~(ends & self.evicted)

    def _update_reach(self, way: _Direction, bits: int) -> None:
        """See to it that what is reached from these is known."""
        new = todo = bits & ~way.known
        while new:
            near = 0
            for number in _numbers(new):
                near |= way.near[number]
            new = near & self.evicted & ~way.known & ~todo
            todo |= new
        if todo:
            self._rebuild(way, _numbers(todo))
            way.known |= todo

    def _rebuild(self, way: _Direction, numbers: list[int]) -> None:
        """Find what these reach, from what those that they are beside of reach."""
        far, near, beside, storages = way.far, way.near, way.beside, self._storages
        if way is self.down:
            numbers.reverse()
        if not self._ordered:
            for number in numbers:
                far[number] = near[number]
        settled = False
        while not settled:
            settled = True
            for number in numbers:
                reach = near[number]
                for end in beside[number]:
                    if not storages[end].material:
                        reach |= far[end]
                settled = settled and (self._ordered or reach == far[number])
                far[number] = reach

    def arrived(self, storages: Iterable[Storage]) -> int:
        """These came into memory by one run; returns the accesses of building sets anew."""
        numbers = [storage.number for storage in storages]
        these = sum(1 << number for number in numbers)
        for way in (self.down, self.up):
            self._update_reach(way, these)
        self.evicted &= ~these
        accesses = 0
        for way, back in ((self.down, self.up), (self.up, self.down)):
            ends = 0
            for number in numbers:
                ends |= back.far[number]
                if way.far[number]:
                    # What came back is passed through no longer by those that reached it.
                    way.known &= ~back.far[number]
            ends &= ~self.evicted & ~these
            self._update_reach(way, ends | these)
            for number in _numbers(ends | these):
                # The edges seen on the way from a storage through all evicted ones that it reaches.
                accesses += way.edges.total((way.far[number] & self.evicted) | 1 << number)
            for number in _numbers(ends):
                self._storages[number].cached = None
        return accesses

    def left(self, storage: Storage) -> int:
        """A storage was evicted; returns the accesses of taking its sets into its neighbours'."""
        number, accesses = storage.number, 0
        bit = 1 << number
        for way in (self.down, self.up):
            self._update_reach(way, bit)
        for way, back in ((self.down, self.up), (self.up, self.down)):
            added, ends = way.far[number], back.far[number] & ~bit
            inner = added & self.evicted & ~bit
            self._update_reach(way, ends & ~self.evicted)
            for end in _numbers(ends & ~self.evicted):
                accesses += (inner & ~way.far[end]).bit_count() + 1
                self._storages[end].cached = None
            self._extend_reach(way, ends, added)
        self.evicted |= bit
        return accesses

    def cost(self, storage: Storage, *, upwards: bool) -> int:
        """What the evicted storages that are reached from one cost together."""
        way, bit = self.up if upwards else self.down, 1 << storage.number
        self._update_reach(way, bit)
        return self._costs.total(way.far[storage.number] & self.evicted & ~bit)


def _numbers(bits: int) -> list[int]:
    """The positions of the bits that are set, from the lowest.

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
