"""What the online runtime did."""

from __future__ import annotations

from dataclasses import dataclass


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
