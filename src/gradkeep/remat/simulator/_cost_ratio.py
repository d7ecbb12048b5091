"""What every heuristic is: a score for each storage that may go, mostly a cost over size and staleness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class CostRatio(Heuristic):
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
