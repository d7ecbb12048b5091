"""Choosing among fewer storages: faster, a little worse."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from gradkeep.remat._heuristics import Heuristic

if TYPE_CHECKING:
    from gradkeep.remat._core import Storage
    from gradkeep.remat._heuristics import Pool

_SMALL = 0.01


class Candidates(Heuristic):
    """A heuristic that looks at a part of the pool only; the same part for the same seed.

    `skip_small` passes over storages below 1 % of the pool's mean size, `sample` walks the pool in
    random strides of 1 to sqrt(n), which leaves about 2 sqrt(n) candidates. If nothing is left, the
    whole pool counts.
    """

    def __init__(
        self, inner: Heuristic, *, skip_small: bool = False, sample: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        self.name = inner.name
        self._inner = inner
        self._skip_small = skip_small
        self._sample = sample
        self._random = random.Random(seed)

    def arrived(self, storage: Storage, *, again: bool) -> None:
        self._inner.arrived(storage, again=again)

    def evicted(self, storage: Storage) -> None:
        self._inner.evicted(storage)

    def choose(self, pool: Pool, clock: int) -> Storage:
        some = list(pool)
        if self._skip_small:
            least = _SMALL * sum(storage.size for storage in some) / len(some)
            some = [storage for storage in some if storage.size >= least] or some
        if self._sample:
            some = self._strides(some)
        chosen = self._inner.choose(dict.fromkeys(some), clock)
        self.evaluations, self.accesses = self._inner.evaluations, self._inner.accesses
        return chosen

    def _strides(self, some: list[Storage]) -> list[Storage]:
        longest = math.isqrt(len(some))
        picked = []
        at = self._random.randint(1, longest) - 1
        while at < len(some):
            picked.append(some[at])
            at += self._random.randint(1, longest)
        return picked
