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
from gradkeep.remat.simulator._cost_ratio import CostRatio, Heuristic, LocalCost, NoCost
from gradkeep.remat.simulator._neighbourhoods import (
    EquivalenceClasses,
    EvictedAncestors,
    ExactNeighbourhood,
    UnionNeighbourhood,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.remat.simulator._core import Storage, TensorNode
    from gradkeep.remat.simulator._cost_ratio import Pool

_SMALL = 0.01
"""Of the mean size: what is below may be passed over."""


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


def _ablation(base: type[CostRatio], *, size: bool, stale: bool) -> Callable[[], Heuristic]:
    name = f"ab-{_NUMERATORS[base]}{'-size' if size else ''}{'-stale' if stale else ''}"
    return type(base.__name__, (base,), {"name": name, "uses_size": size, "uses_staleness": stale})


_NUMERATORS: dict[type[CostRatio], str] = {
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
