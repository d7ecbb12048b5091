"""The kernel solved by conjugate gradients, with products from factors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kernels._block_cg import (
    LeadingDirections,
    block_conjugate_gradients,
    leading_directions,
)
from gradkeep.attribution.kernels._weighted import Solution
from gradkeep.query import dot

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution.kernels._products import KernelProducts
    from gradkeep.attribution.kernels._weighted import WeightedKernel

PIVOTS = 512
"""Rows whose columns of the kernel stand in for all of it: that is a small part of one product with
it, and saves most of the steps of few right sides."""
ARRAYS = 10
"""Arrays of one number for each row that a right side has while it is solved."""
STEPS = 200
"""More are a sign of a damping that is far too small."""


@dataclass(slots=True, eq=False)
class ConjugateSolver:
    """M^-1 b by block conjugate gradients, so many right sides at a time."""

    kernel: WeightedKernel
    products: KernelProducts
    near: LeadingDirections
    columns: int
    tolerance: float
    worst: list[Solution] = field(default_factory=list)

    def solved(self, right: Tensor) -> Tensor:
        """M^-1 b `[N, b]` of right sides `[N, b]`, which are overwritten."""
        for start in range(0, right.shape[1], self.columns):
            here = right[:, start : start + self.columns]
            here.copy_(self._some(here.contiguous()))
        return right

    def solution(self) -> Solution:
        """The most steps and the largest residual so far."""
        residuals = [one.residual for one in self.worst if one.residual is not None]
        steps = max((one.steps for one in self.worst), default=0)
        return Solution("block conjugate gradients", steps, max(residuals, default=0.0))

    def _some(self, right: Tensor) -> Tensor:
        kernel, s = self.kernel, self.kernel.weight.sqrt().unsqueeze(1)

        def product(vectors: Tensor) -> Tensor:
            moved = self.products.times(vectors * s, kernel.passing).mul_(s)
            return moved.add_(vectors, alpha=kernel.damping)

        def report(steps: int, left: float) -> None:
            kernel.report(f"step {steps}, residual {left:.1e} for {right.shape[1]} queries")

        found = block_conjugate_gradients(
            product,
            right,
            self.near,
            tolerance=self.tolerance,
            max_steps=STEPS,
            report=report,
        )
        self.worst.append(Solution("", found.steps, found.residual))
        return found.values


def pivots_for(rows: int, room: int) -> int:
    """How many columns are held, in an eighth of the room."""
    return max(1, min(PIVOTS, math.ceil(rows / 4), room // 8 // (4 * rows)))


def stand_in(kernel: WeightedKernel, pivots: int) -> LeadingDirections:
    """The leading directions of M, from the columns of rows drawn by what they add to its trace."""
    share = kernel.weight.double() * kernel.train.norms().double().square()
    draws = torch.Generator().manual_seed(0)
    there = int((share > 0).sum())
    chosen = torch.multinomial(share, max(1, min(pivots, there)), generator=draws).sort().values
    s = kernel.weight.sqrt()
    columns = dot(
        kernel.train,
        kernel.train,
        ids=kernel.train.ids[chosen.numpy()],
        compute=kernel.compute,
        memory_budget=kernel.passing + 4 * len(chosen) * kernel.rows,
    ).values
    columns *= s
    columns *= s[chosen].unsqueeze(1)
    return leading_directions(columns.t(), chosen, kernel.damping)
