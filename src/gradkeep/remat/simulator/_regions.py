"""What every storage reaches through evicted ones, kept as bits of large integers.

The original keeps two sets for every storage in memory, one upwards and one downwards: the evicted
storages that it reaches through evicted ones only, and those in memory where that ends. It changes
them at every eviction and builds them again at every run, and its count of accesses is the work of
doing so. With a bit per storage that work is a few operations on whole sets, and its amount can be
told without doing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradkeep.remat.simulator._core import Storage, TensorNode

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


class _Way:
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
        self.down, self.up = _Way(), _Way()
        self._storages: list[Storage] = []
        self._costs = _BitWeights()
        self._ordered = True
        """Every edge leads from a lower number to a higher one."""

    @classmethod
    def of(cls, storages: Sequence[Storage]) -> EvictedRegions:
        """The regions in the middle of a run, of all its storages by number."""
        regions = cls()
        for storage in storages:
            number = storage.number
            regions._add(storage)
            if storage.material:
                regions.evicted &= ~(1 << number)
            regions._weigh(storage)
            for way, beside in ((regions.down, storage.below), (regions.up, storage.above)):
                way.beside[number] = [other.number for other in beside]
                way.near[number] = sum(1 << end for end in way.beside[number])
            regions._ordered &= all(end > number for end in regions.down.beside[number])
        regions.down.known = regions.up.known = 0
        return regions

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
                self._learn(way, more)
                more |= way.far[end]
            way.beside[start].append(end)
            way.near[start] |= 1 << end
            way.far[start] |= more
            if self.evicted >> start & 1:
                self._learn(back, 1 << start)
                self._widen(way, back.far[start], more)

    def _widen(self, way: _Way, ends: int, more: int) -> None:
        """These reach more from now on; the evicted ones among them are many, and seldom asked."""
        for number in _numbers(ends & ~self.evicted):
            way.far[number] |= more
        way.known &= ~(ends & self.evicted)

    def _learn(self, way: _Way, wanted: int) -> None:
        """See to it that what is reached from these is known."""
        new = todo = wanted & ~way.known
        while new:
            near = 0
            for number in _numbers(new):
                near |= way.near[number]
            new = near & self.evicted & ~way.known & ~todo
            todo |= new
        if todo:
            self._rebuild(way, _numbers(todo))
            way.known |= todo

    def _rebuild(self, way: _Way, numbers: list[int]) -> None:
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
                found = near[number]
                for end in beside[number]:
                    if not storages[end].material:
                        found |= far[end]
                settled = settled and (self._ordered or found == far[number])
                far[number] = found

    def arrived(self, storages: Iterable[Storage], *, counted: bool) -> int:
        """These came into memory by one run; returns the accesses of building sets anew."""
        numbers = [storage.number for storage in storages]
        these = sum(1 << number for number in numbers)
        for way in (self.down, self.up):
            self._learn(way, these)
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
            if counted:
                self._learn(way, ends | these)
                accesses += sum(self._walked(way, number) for number in _numbers(ends | these))
            for number in _numbers(ends):
                self._storages[number].cached = None
        return accesses

    def _walked(self, way: _Way, number: int) -> int:
        """The edges seen on the way from a storage through all evicted ones that it reaches."""
        return way.edges.total((way.far[number] & self.evicted) | 1 << number)

    def left(self, storage: Storage, *, counted: bool) -> int:
        """A storage was evicted; returns the accesses of taking its sets into its neighbours'."""
        number, accesses = storage.number, 0
        bit = 1 << number
        for way in (self.down, self.up):
            self._learn(way, bit)
        for way, back in ((self.down, self.up), (self.up, self.down)):
            added, ends = way.far[number], back.far[number] & ~bit
            inner = added & self.evicted & ~bit
            if counted:
                self._learn(way, ends & ~self.evicted)
            for end in _numbers(ends & ~self.evicted):
                accesses += (inner & ~way.far[end]).bit_count() + 1
                self._storages[end].cached = None
            self._widen(way, ends, added)
        self.evicted |= bit
        return accesses if counted else 0

    def cost(self, storage: Storage, *, upwards: bool) -> int:
        """What the evicted storages that are reached from one cost together."""
        way, bit = self.up if upwards else self.down, 1 << storage.number
        self._learn(way, bit)
        return self._costs.total(way.far[storage.number] & self.evicted & ~bit)


def _numbers(bits: int) -> list[int]:
    """The positions of the bits that are set, from the lowest.

    >>> _numbers(0b1011)
    [0, 1, 3]
    """
    if bits.bit_count() > _FEW:
        raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
        found: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
        return found
    few = []
    while bits:
        low = bits & -bits
        few.append(low.bit_length() - 1)
        bits ^= low
    return few
