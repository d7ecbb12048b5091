"""Costs of a storage with what was evicted around it: in classes that only grow, or exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradkeep.remat.simulator._cost_ratio import CostRatio, Heuristic
from gradkeep.remat.simulator._regions import EvictedRegions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.remat.simulator._core import Storage, TensorNode
    from gradkeep.remat.simulator._cost_ratio import Pool

_LONG = 3_000_000
"""So many storages passed in searches take longer than keeping sets of them does."""


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

    def __init__(self) -> None:
        self._looks: dict[Storage, int] = {}
        """Nodes of classes that are looked at when a numerator that is known is asked for again."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        # Of an evaluation the numerator is kept, but not its accesses: the original makes them anew.
        best, chosen, looks = math.inf, None, self._looks
        size, stale, scanned, looked = self.uses_size, self.uses_staleness, 0, 0
        for storage in pool:
            scanned += 1
            under: float = storage.size if size else 1
            if stale:
                under *= clock - storage.last_access
            top = storage.cached
            if top is None:
                top = self.numerator(storage)
            else:
                looked += storage.edges_above + storage.edges_below + looks[storage]
            cost = top / under if under > 0 else math.inf
            if cost <= best:
                best, chosen = cost, storage
                if cost == 0:
                    break
        self.evaluations += scanned
        self.accesses += scanned + looked
        assert chosen is not None
        return chosen

    def numerator(self, storage: Storage) -> float:
        total, seen, later = storage.compute, [], 0
        looked = storage.edges_above + storage.edges_below
        for neighbour in (*storage.above, *storage.below):
            if neighbour.material:
                continue
            group = neighbour.group
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
        self._looks[storage] = later
        storage.cached = total
        return total

    def evicted(self, storage: Storage) -> None:
        group = _EvictedClass(storage.compute)
        storage.group = group
        looked = storage.edges_above + storage.edges_below
        for neighbour in (*storage.below, *storage.above):
            if neighbour.material:
                neighbour.cached = None
            elif isinstance(neighbour.group, _EvictedClass):
                root, nodes = _root(neighbour.group)
                looked += nodes + 1
                if root is not group:
                    _changed(root)
                    root.parent = group
                    group.compute += root.compute
            else:
                looked += 2
        self.accesses += looked

    def arrived(self, storage: Storage, *, again: bool) -> None:
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
        if again:
            for neighbour in (*storage.above, *storage.below):
                neighbour.cached = None


def _changed(group: _EvictedClass) -> None:
    for storage in group.watchers:
        storage.cached = None
    group.watchers.clear()


class ExactNeighbourhood(CostRatio):
    """All evicted storages that would have to come back, and those that would then need this one."""

    name = "dtr"
    upwards = True
    downwards = True

    def __init__(self) -> None:
        self._changed: list[Storage] = []
        """Storages that came or went since the last choice."""
        self._told: list[Storage] = []
        """All storages by number, where every operator is told of."""
        self._searched = 0
        """Storages passed in searches."""
        self._regions: EvictedRegions | None = None
        """In place of searches, to count accesses or once these have become long."""

    def numerator(self, storage: Storage) -> float:
        total = storage.compute
        for upwards in (True, False):
            if not (self.upwards if upwards else self.downwards):
                continue
            if self._regions is not None:
                total += self._regions.cost(storage, upwards=upwards)
            else:
                total += sum(found.compute for found in self.reachable(storage, upwards=upwards))
        storage.cached = total
        return total

    def declared(self, results: Sequence[TensorNode]) -> None:
        if self.counting and self._regions is None:
            self._regions = EvictedRegions()
        if self._regions is not None:
            self._regions.declared(results)
        else:
            self._told += [tensor.storage for tensor in results if not tensor.is_alias]

    def ran(self, storages: Sequence[Storage]) -> None:
        if self._regions is not None:
            self.accesses += self._regions.arrived(storages, counted=self.counting)

    def reachable(self, storage: Storage, *, upwards: bool) -> set[Storage]:
        """Evicted storages reached through evicted ones only."""
        found: set[Storage] = set()
        stack = [storage]
        while stack:
            place = stack.pop()
            beside = place.above if upwards else place.below
            self.accesses += place.edges_above if upwards else place.edges_below
            for other in beside:
                if not other.material and other not in found:
                    found.add(other)
                    stack.append(other)
        self._searched += len(found)
        found.discard(storage)
        return found

    def evicted(self, storage: Storage) -> None:
        if self._regions is not None:
            self.accesses += self._regions.left(storage, counted=self.counting)
        else:
            self._changed.append(storage)

    def arrived(self, storage: Storage, *, again: bool) -> None:
        storage.cached = None
        if again and self._regions is None:
            self._changed.append(storage)

    def choose(self, pool: Pool, clock: int) -> Storage:
        if self._regions is None:
            self._forget()
            if self._searched > _LONG and self._told:
                self._regions = EvictedRegions.of(self._told)
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


class EvictedAncestors(ExactNeighbourhood):
    """What must come back first, by size: the memory that is saved per second."""

    name = "msps"
    uses_staleness = False
    downwards = False


class UnionNeighbourhood(ExactNeighbourhood):
    """The neighbourhood counted once, and as stale as its freshest member."""

    name = "dtr-union"

    def declared(self, results: Sequence[TensorNode]) -> None:
        """It looks anew each time, as the original does, and keeps no books."""

    def evicted(self, storage: Storage) -> None:
        """Likewise."""

    def arrived(self, storage: Storage, *, again: bool) -> None:
        """Likewise."""

    def choose(self, pool: Pool, clock: int) -> Storage:
        return Heuristic.choose(self, pool, clock)

    def score(self, storage: Storage, clock: int) -> float:
        around = self.reachable(storage, upwards=True) | self.reachable(storage, upwards=False)
        accessed = max([storage.last_access, *(found.last_access for found in around)])
        under = storage.size * (clock - accessed)
        top = storage.compute + sum(found.compute for found in around)
        return top / under if under > 0 else math.inf
