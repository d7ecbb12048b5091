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
import itertools
import math
import random
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep.errors import RematError
from gradkeep.remat.simulator._neighborhoods import (
    CostRatio,
    EquivalenceClasses,
    EvictedAncestors,
    ExactNeighborhood,
    Heuristic,
    UnionNeighborhood,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradkeep.remat.simulator._core import Storage
    from gradkeep.remat.simulator._neighborhoods import Pool


class LocalCost(CostRatio):
    """Only the storage's own cost."""

    name = "dtr-local"

    def numerator(self, storage: Storage) -> float:
        storage.cached = storage.compute
        return storage.compute


class NoCost(CostRatio):
    """No cost at all."""

    name = "ab-none-size-stale"

    def numerator(self, storage: Storage) -> float:
        storage.cached = 1
        return 1


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


class PoolSample:
    """The part of the pool that a heuristic looks at; the same part for the same seed.

    `skip_small` passes over storages below 1 % of the pool's mean size, `sample` walks the pool in
    random strides of 1 to sqrt(n), which leaves about 2 sqrt(n) candidates. If nothing is left, the
    whole pool counts.
    """

    def __init__(self, *, skip_small: bool = False, sample: bool = False, seed: int = 0) -> None:
        self.skip_small, self.sample = skip_small, sample
        self._random = random.Random(seed)

    def of(self, pool: Pool) -> Pool:
        """Those of the pool that are looked at, in its order."""
        if not self.skip_small and not self.sample:
            return pool
        some = list(pool)
        if self.skip_small:
            least = sum(storage.size for storage in some) / len(some) / 100
            some = [storage for storage in some if storage.size >= least] or some
        if self.sample:
            longest = math.isqrt(len(some))
            places = []
            at = self._random.randint(1, longest) - 1
            while at < len(some):
                places.append(at)
                at += self._random.randint(1, longest)
            some = [some[at] for at in places]
        return dict.fromkeys(some)


_registry: dict[str, Callable[[], Heuristic]] = {
    kind.name: kind
    for kind in (
        *(ExactNeighborhood, EquivalenceClasses, LocalCost, EvictedAncestors),
        *(LeastRecentlyUsed, LargestFirst, RandomChoice, UnionNeighborhood),
    )
}
ORIGINAL_NAMES = {
    "DTR": "dtr",
    "DTREqClass": "dtr-eq",
    "DTRLocal": "dtr-local",
    "DTRUnopt": "dtr-union",
    "MSPS": "msps",
    "LRU": "lru",
    "LargestStorage": "largest",
    "RandomStorage": "random",
    "AbRandom": "ab-none",
}
"""The names that the original simulator uses for the same scores."""
_NUMERATORS: tuple[tuple[type[CostRatio], str, str], ...] = (
    (ExactNeighborhood, "exact", "E"),
    (EquivalenceClasses, "eq", "Eq"),
    (LocalCost, "local", "Local"),
    (NoCost, "none", ""),
)
for (_base, _ours, _theirs), _size, _stale in itertools.product(
    _NUMERATORS, (True, False), (True, False)
):
    _name = f"ab-{_ours}{'-size' if _size else ''}{'-stale' if _stale else ''}"
    _fields = {"name": _name, "uses_size": _size, "uses_staleness": _stale}
    _kind: type[Heuristic] = RandomChoice if _name == "ab-none" else _base
    _registry[_name] = type(_kind.__name__, (_kind,), _fields)
    ORIGINAL_NAMES[f"Ab{_theirs}{'Size' if _size else ''}{'Stale' if _stale else ''}"] = _name

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
    instance = make() if callable(make) else None
    if not isinstance(instance, Heuristic):
        raise RematError(
            f"nothing makes the heuristic {name!r}",
            found=type(instance if callable(make) else make).__name__,
            expected="a class derived from gradkeep.remat.Heuristic, or a function that gives one",
        )
    kind = type(instance)
    if kind.score is Heuristic.score and kind.choose is Heuristic.choose:
        raise RematError(
            f"the heuristic {name!r} cannot choose",
            found=f"{kind.__name__} defines neither score nor choose",
            expected="score(storage, clock), whose smallest goes, or choose(pool, clock)",
        )
    _registry[name] = make
    _own.add(name)


def registered_heuristics() -> dict[str, Callable[[], Heuristic]]:
    """What was registered from outside: other processes do not know it."""
    return {name: _registry[name] for name in _registry if name in _own}


def heuristics() -> list[str]:
    """The names of all heuristics."""
    return list(_registry)


@_arguments.checked(RematError)
def heuristic(name: str) -> Heuristic:
    """A fresh heuristic by its name, ours or the original's."""
    known = ORIGINAL_NAMES.get(name, name)
    if known not in _registry:
        near = difflib.get_close_matches(name, [*_registry, *ORIGINAL_NAMES], n=3, cutoff=0.4)
        raise RematError(
            f"there is no heuristic {name!r}; expected one of {', '.join(_registry)}",
            fix=f"did you mean {' or '.join(near)}?" if near else None,
        )
    instance = _registry[known]()
    if known in _own and instance.name == Heuristic.name:
        instance.name = known
    return instance
