"""Which storage to evict: the one with the smallest score goes.

m = size, s = time since the last access, c = cost of the storage's own operators. Every heuristic is
numerator / (denominator factors); a denominator of 0 scores infinity.

| name | score |
| --- | --- |
| dtr | (c + evicted descendants + evicted ancestors) / (m s), the neighbourhood exact |
| dtr-eq | (c + the distinct evicted classes beside it) / (m s), classes by union-find |
| dtr-local | c / (m s) |
| dtr-union | as dtr, the neighbourhood counted once and as stale as its freshest member |
| msps | (c + evicted ancestors) / m |
| lru, largest, random | last access; 1 / m; any |

The ablation grid `ab-{exact,eq,local,none}[-size][-stale]` takes any numerator with any denominator.
"""

from __future__ import annotations

import difflib
import math
import random
from typing import TYPE_CHECKING

from gradkeep import _annotations
from gradkeep.errors import RematError
from gradkeep.remat.simulator._regions import EvictedRegions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.remat.simulator._core import Storage, TensorNode

_LONG = 3_000_000
"""So many storages passed in searches take longer than keeping sets of them does."""
_SMALL = 0.01
"""Of the mean size: what is below may be passed over."""
Pool = dict["Storage", None]
"""The storages that may go, in the order in which they came to be free."""


class Heuristic:
    """Base: scores every storage of the pool; the last of the lowest goes, the first that is free.

    `arrived` and `evicted` keep a heuristic's own books; `score` may be called for storages that are
    in memory and not locked. One of your own is known by name once it is registered:

    >>> class Oldest(Heuristic):
    ...     def score(self, storage, clock):
    ...         return storage.number
    >>> register("oldest-first", Oldest)
    >>> from gradkeep.remat import chain, simulate
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
    counting = True
    """Count accesses even where that takes longer than choosing does."""

    def score(self, storage: Storage, clock: int) -> float:
        """What evicting the storage would cost."""
        raise NotImplementedError

    def arrived(self, storage: Storage, *, again: bool) -> None:
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


class _CostRatio(Heuristic):
    """A numerator over size, staleness, both or nothing."""

    uses_size = True
    uses_staleness = True

    def numerator(self, storage: Storage) -> float:
        """What would have to be recomputed."""
        raise NotImplementedError

    def choose(self, pool: Pool, clock: int) -> Storage:
        # The same as the base's loop, written out: this is where a simulation spends its time.
        best, chosen, numerator = math.inf, None, self.numerator
        size, stale, scanned = self.uses_size, self.uses_staleness, 0
        for storage in pool:
            scanned += 1
            under: float = storage.size if size else 1
            if stale:
                under *= clock - storage.last_access
            if under > 0:
                top = storage.cached
                if top is None:
                    top = numerator(storage)
                cost = top / under
            else:
                cost = math.inf
            if cost <= best:
                best, chosen = cost, storage
                if cost == 0:
                    break
        self.evaluations += scanned
        self.accesses += scanned
        assert chosen is not None
        return chosen


class LocalCost(_CostRatio):
    """Only the storage's own cost."""

    name = "dtr-local"

    def numerator(self, storage: Storage) -> float:
        storage.cached = storage.compute
        return storage.compute


class NoCost(_CostRatio):
    """No cost at all."""

    name = "ab-none-size-stale"

    def numerator(self, storage: Storage) -> float:
        storage.cached = 1
        return 1


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


class EquivalenceClasses(_CostRatio):
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


class ExactNeighbourhood(_CostRatio):
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


class LeastRecentlyUsed(Heuristic):
    """The one that was used longest ago."""

    name = "lru"

    def score(self, storage: Storage, clock: int) -> float:
        return storage.last_access


class LargestFirst(Heuristic):
    """The largest one."""

    name = "largest"

    def score(self, storage: Storage, clock: int) -> float:
        return 1 / storage.size if storage.size > 0 else math.inf


class RandomChoice(Heuristic):
    """Any one; the same for the same seed."""

    name = "random"
    trials = 10

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def reseed(self, seed: int) -> None:
        """Choose as if made with this seed."""
        self._random.seed(seed)

    def choose(self, pool: Pool, clock: int) -> Storage:
        self.evaluations += 1
        self.accesses += 1
        return list(pool)[self._random.randrange(len(pool))]


class SampledHeuristic(Heuristic):
    """A heuristic that looks at a part of the pool only; the same part for the same seed.

    `skip_small` passes over storages below 1 % of the pool's mean size, `sample` walks the pool in
    random strides of 1 to sqrt(n), which leaves about 2 sqrt(n) candidates. If nothing is left, the
    whole pool counts.
    """

    def __init__(
        self, inner: Heuristic, *, skip_small: bool = False, sample: bool = False, seed: int = 0
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._skip_small = skip_small
        self._sample = sample
        self._random = random.Random(seed)

    def look(self, *, skip_small: bool, sample: bool) -> None:
        """How it looks from the next choice on."""
        self._skip_small, self._sample = skip_small, sample

    def arrived(self, storage: Storage, *, again: bool) -> None:
        self._inner.arrived(storage, again=again)

    def evicted(self, storage: Storage) -> None:
        self._inner.evicted(storage)

    def declared(self, results: Sequence[TensorNode]) -> None:
        self._inner.declared(results)

    def ran(self, storages: Sequence[Storage]) -> None:
        self._inner.ran(storages)

    def choose(self, pool: Pool, clock: int) -> Storage:
        chosen = self._inner.choose(self._part(pool), clock)
        self.evaluations, self.accesses = self._inner.evaluations, self._inner.accesses
        return chosen

    def _part(self, pool: Pool) -> Pool:
        if not self._skip_small and not self._sample:
            return pool
        some = list(pool)
        if self._skip_small:
            least = _SMALL * sum(storage.size for storage in some) / len(some)
            some = [storage for storage in some if storage.size >= least] or some
        if self._sample:
            some = self._strides(some)
        return dict.fromkeys(some)

    def _strides(self, some: list[Storage]) -> list[Storage]:
        longest = math.isqrt(len(some))
        picked = []
        at = self._random.randint(1, longest) - 1
        while at < len(some):
            picked.append(some[at])
            at += self._random.randint(1, longest)
        return picked


def _ablation(base: type[_CostRatio], *, size: bool, stale: bool) -> Callable[[], Heuristic]:
    name = f"ab-{_NUMERATORS[base]}{'-size' if size else ''}{'-stale' if stale else ''}"
    return type(base.__name__, (base,), {"name": name, "uses_size": size, "uses_staleness": stale})


_NUMERATORS: dict[type[_CostRatio], str] = {
    ExactNeighbourhood: "exact",
    EquivalenceClasses: "eq",
    LocalCost: "local",
    NoCost: "none",
}
_PLAIN: tuple[type[Heuristic], ...] = (
    ExactNeighbourhood,
    EquivalenceClasses,
    LocalCost,
    EvictedAncestors,
    LeastRecentlyUsed,
    LargestFirst,
    RandomChoice,
    UnionNeighbourhood,
)
_registry: dict[str, Callable[[], Heuristic]] = {kind.name: kind for kind in _PLAIN}
for _base in _NUMERATORS:
    for _size in (True, False):
        for _stale in (True, False):
            if _base is NoCost and not (_size or _stale):
                _registry["ab-none"] = type("Random", (RandomChoice,), {"name": "ab-none"})
                continue
            _made = _ablation(_base, size=_size, stale=_stale)
            _registry[_made.name] = _made  # type: ignore[attr-defined]

ORIGINAL_NAMES = {
    "DTR": "dtr",
    "DTREqClass": "dtr-eq",
    "DTRLocal": "dtr-local",
    "DTRUnopt": "dtr-union",
    "MSPS": "msps",
    "LRU": "lru",
    "LargestStorage": "largest",
    "RandomStorage": "random",
    **{
        f"Ab{old}{'Size' if size else ''}{'Stale' if stale else ''}": (
            f"ab-{new}{'-size' if size else ''}{'-stale' if stale else ''}"
        )
        for old, new in (("E", "exact"), ("Eq", "eq"), ("Local", "local"), ("", "none"))
        for size in (True, False)
        for stale in (True, False)
    },
    "AbRandom": "ab-none",
}
"""The names that the original simulator uses for the same scores."""


_own: set[str] = set()
"""Names that were registered from outside."""


def register(name: str, make: Callable[[], Heuristic]) -> None:
    """Add a heuristic under a new name; `make()` gives a fresh one for every run.

    From then on the name means it in this process, wherever a heuristic is named: `simulate`, sweeps,
    `memory_budget(heuristic=...)`.
    """
    if not isinstance(name, str) or not name.strip():
        raise RematError("a heuristic needs a name", found=repr(name), expected="text")
    if name in _registry or name in ORIGINAL_NAMES:
        means = f", the original's name of {ORIGINAL_NAMES[name]}" if name in ORIGINAL_NAMES else ""
        raise RematError(
            f"there is a heuristic {name!r} already{means}", fix="register it under another name"
        )
    made = make() if callable(make) else None
    if not isinstance(made, Heuristic):
        raise RematError(
            f"nothing makes the heuristic {name!r}",
            found=f"it gave {type(made).__name__}" if callable(make) else type(make).__name__,
            expected="a class derived from gradkeep.remat.Heuristic, or a function that gives one",
        )
    kind = type(made)
    if kind.score is Heuristic.score and kind.choose is Heuristic.choose:
        raise RematError(
            f"the heuristic {name!r} cannot choose",
            found=f"{kind.__name__} defines neither score nor choose",
            expected="score(storage, clock), whose smallest goes, or choose(pool, clock)",
        )
    _registry[name] = make
    _own.add(name)


def own_heuristics() -> dict[str, Callable[[], Heuristic]]:
    """What was registered from outside: other processes do not know it."""
    return {name: _registry[name] for name in _registry if name in _own}


def heuristics() -> list[str]:
    """The names of all heuristics."""
    return list(_registry)


@_annotations.checked(RematError)
def heuristic(name: str) -> Heuristic:
    """A fresh heuristic by its name, ours or the original's."""
    known = ORIGINAL_NAMES.get(name, name)
    if known not in _registry:
        near = difflib.get_close_matches(name, [*_registry, *ORIGINAL_NAMES], n=3, cutoff=0.4)
        raise RematError(
            f"there is no heuristic {name!r}",
            found=name,
            expected=f"one of {', '.join(_registry)}",
            fix=f"did you mean {' or '.join(near)}?" if near else None,
        )
    made = _registry[known]()
    if known in _own and made.name == Heuristic.name:
        made.name = known
    return made
