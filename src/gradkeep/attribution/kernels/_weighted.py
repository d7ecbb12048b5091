"""The damped, weighted kernel of all training rows, and how systems with it were solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep._budgets import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeWish

UNLESS_SAID = 2 << 30
"""Bytes that a kernel is solved in, unless a budget says otherwise."""
_LEAST = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class WeightedKernel:
    """M = s K s + damping I, with K `[N, N]` the products of all training rows and s = sqrt(weight)."""

    train: Gradients
    weight: Tensor
    """`[N]`, above zero"""
    damping: float
    compute: ComputeWish = None
    memory_budget: float | str | None = None
    report: Callable[[str], None] = lambda doing: None
    """Is told what is being done, from time to time."""

    @property
    def rows(self) -> int:
        """N"""
        return len(self.train)

    @property
    def room(self) -> int:
        """Bytes that solving may take."""
        return UNLESS_SAID if self.memory_budget is None else parse_bytes(self.memory_budget)

    @property
    def passing(self) -> int:
        """Bytes for rows that pass and their temporaries: a quarter, but what one segment needs."""
        segments = self.train.block.manifest.segments
        mapped = max((entry.bytes for entry in segments), default=0)
        return max(self.room // 4, 2 * mapped + _LEAST)


@dataclass(frozen=True, slots=True)
class Solution:
    """How linear systems were solved."""

    way: str
    steps: int = 0
    """Of conjugate gradients, the most for any query."""
    residual: float | None = None
    """The largest |A x - b| / |b| of any query; None: rounding only."""

    def __str__(self) -> str:
        if self.residual is None:
            return self.way
        return f"{self.way}, {self.steps} steps to a relative residual of {self.residual:.1e}"


def summed_up(found: Sequence[Solution | None]) -> str | None:
    """What is told of several checkpoints: each way once, with the most steps and the worst residual."""
    by_way: dict[str, Solution] = {}
    for one in found:
        if one is None:
            continue
        other = by_way.get(one.way, one)
        residuals = [part.residual for part in (one, other) if part.residual is not None]
        by_way[one.way] = Solution(
            one.way, max(one.steps, other.steps), max(residuals) if residuals else None
        )
    return "; ".join(map(str, by_way.values())) or None
