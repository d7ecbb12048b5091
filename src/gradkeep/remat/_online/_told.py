"""What the online runtime did."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradkeep._budgets import format_bytes


@dataclass(frozen=True, slots=True)
class Told:
    """Bytes, counts and seconds of one step."""

    budget: float
    """Bytes."""
    peak: int
    """The most bytes alive at once."""
    over: int
    """By how much the peak was above the budget, because nothing was left to evict."""
    operators: int
    evictions: int
    rematerializations: int
    pinned: int
    """Storages that could not be made again, or that others need as they are."""
    base_seconds: float
    """Running every operator once."""
    remat_seconds: float
    """Running operators again."""
    search_seconds: float
    """Choosing what to evict."""
    copy_seconds: float
    """Putting values back where they belong."""
    gave_up: bool
    """More was recomputed than the limit allows: from there on nothing was evicted."""

    def __str__(self) -> str:
        limit = (
            "no budget" if math.isinf(self.budget) else f"budget {format_bytes(int(self.budget))}"
        )
        lines = (
            f"peak {format_bytes(self.peak)}, {limit}, {self.evictions} evictions, "
            f"{self.rematerializations} operators run again, recomputation "
            f"{self.remat_seconds / max(self.base_seconds, 1e-9):.1%} of the time of the rest"
        )
        if self.gave_up:
            return f"{lines}; gave up: more was recomputed than is worth it"
        if self.over:
            return f"{lines}; {format_bytes(self.over)} over, as nothing was left to evict"
        return lines
