"""Eviction heuristics: the storage with the smallest score is evicted.

m = size, s = time since the last access, c = cost of the storage's own operators. Every heuristic is
numerator / (denominator factors); a denominator of 0 scores infinity.

| name | score |
| --- | --- |
| dtr | (c + evicted descendants + evicted ancestors) / (m s), with the exact neighborhood |
| dtr-eq | (c + the distinct adjacent evicted classes) / (m s), classes by union-find |
| dtr-local | c / (m s) |
| dtr-union | as dtr, the neighborhood counted once and as stale as its freshest member |
| msps | (c + evicted ancestors) / m |
| lru, largest, random | last access; 1 / m; uniform |

The ablation grid `ab-{exact,eq,local,none}[-size][-stale]` combines any numerator with any denominator.
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

    from gradkeep.remat._eviction_core import Storage
    from gradkeep.remat.simulator._neighborhoods import Pool


class LocalCost(CostRatio):
    """Use only the storage's own cost."""

    name = "dtr-local"

    def numerator(self, storage: Storage) -> float:
        storage.cached = storage.compute
        return storage.compute


class NoCost(CostRatio):
    """Use a constant numerator."""

    name = "ab-none-size-stale"

    def numerator(self, storage: Storage) -> float:
        storage.cached = 1
        return 1


class LeastRecentlyUsed(Heuristic):
    """Evict the least recently used storage."""

    name = "lru"

    def score(self, storage: Storage, clock: int) -> float:
        return storage.last_access


class LargestFirst(Heuristic):
    """Evict the largest storage."""

    name = "largest"

    def score(self, storage: Storage, clock: int) -> float:
        return 1 / storage.size if storage.size > 0 else math.inf


class RandomChoice(Heuristic):
    """Evict a random storage; the same seed gives the same choices."""

    name = "random"
    trials = 10

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def reseed(self, seed: int) -> None:
        """Restart the random choices with this seed."""
        self._random.seed(seed)

    def choose(self, pool: Pool, clock: int) -> Storage:
        self.evaluations += 1
        self.accesses += 1
        return list(pool)[self._random.randrange(len(pool))]


class PoolSample:
    """A reproducible sample of the pool for the heuristic to score.

    `skip_small` skips storages below 1 % of the pool's mean size, `sample` walks the pool in
    random strides of 1 to sqrt(n), which leaves about 2 sqrt(n) candidates. If no storage remains, the
    whole pool is used.
    """

    def __init__(self, *, skip_small: bool = False, sample: bool = False, seed: int = 0) -> None:
        self.skip_small, self.sample = skip_small, sample
        self._random = random.Random(seed)

    def of(self, pool: Pool) -> Pool:
        """Return the sampled storages in the order of the pool."""
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
"""Names of the same scores in the original simulator."""
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
"""Names registered with `register`."""


def register(name: str, make: Callable[[], Heuristic]) -> None:
    """Register a heuristic under a new name in this process.

    The name is then accepted by `simulate`, by sweeps and by `memory_budget(heuristic=...)`.

    Args:
        name: The new name.
        make: Function or class that returns a new `Heuristic` for every run.

    Raises:
        RematError: If the name is taken or empty, or `make` does not return a usable heuristic.
    """
    if not isinstance(name, str) or not name.strip():
        raise RematError(f"name must be non-empty text, got {name!r}", code="remat.heuristic_name")
    if name in _registry or name in ORIGINAL_NAMES:
        alias = (
            f" as the original's name of {ORIGINAL_NAMES[name]}" if name in ORIGINAL_NAMES else ""
        )
        raise RematError(
            f"the heuristic {name!r} already exists{alias}",
            code="remat.heuristic_exists",
            fix="Register it under another name.",
        )
    instance = make() if callable(make) else None
    if not isinstance(instance, Heuristic):
        raise RematError(
            f"make does not build the heuristic {name!r}",
            code="remat.heuristic_factory",
            found=type(instance if callable(make) else make).__name__,
            expected="a subclass of gradkeep.remat.Heuristic, or a function that returns one",
        )
    kind = type(instance)
    if kind.score is Heuristic.score and kind.choose is Heuristic.choose:
        raise RematError(
            f"the heuristic {name!r} defines neither score nor choose",
            code="remat.heuristic_incomplete",
            found=kind.__name__,
            expected="a method score(storage, clock) or choose(pool, clock)",
        )
    _registry[name] = make
    _own.add(name)


def registered_heuristics() -> dict[str, Callable[[], Heuristic]]:
    """Return the heuristics added with `register`; other processes do not have them."""
    return {name: _registry[name] for name in _registry if name in _own}


def heuristics() -> list[str]:
    """List the names of all heuristics.

    Returns:
        Built-in and registered names, in the order of their registration.
    """
    return list(_registry)


@_arguments.checked(RematError)
def heuristic(name: str) -> Heuristic:
    """Build a heuristic by its name.

    Args:
        name: A name from `heuristics()`, or the name in the original simulator, such as `"DTREqClass"`.

    Returns:
        A new heuristic.

    Raises:
        RematError: If the name is unknown.
    """
    known = ORIGINAL_NAMES.get(name, name)
    if known not in _registry:
        near = difflib.get_close_matches(name, [*_registry, *ORIGINAL_NAMES], n=3, cutoff=0.4)
        raise RematError(
            "unknown heuristic",
            code="remat.unknown_heuristic",
            found=repr(name),
            expected=f"one of {', '.join(_registry)}",
            fix=f"Did you mean {' or '.join(near)}?" if near else None,
        )
    instance = _registry[known]()
    if known in _own and instance.name == Heuristic.name:
        instance.name = known
    return instance
