"""Many linear systems with one matrix at once, by conjugate gradients that share their directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_NEGLIGIBLE = 1e-6
"""Eigenvalues below this share of the largest are rounding."""
_RESTARTS = 4
"""How often what rounding left is solved for again."""


@dataclass(frozen=True, slots=True, eq=False)
class LeadingDirections:
    """A stand-in U diag(values) U^T + damping I for a matrix, whose roots are easily multiplied with."""

    vectors: Tensor
    """U `[N, m]`, orthonormal"""
    values: Tensor
    """`[m]`, float64"""
    damping: float

    def root(self, right: Tensor, power: float) -> Tensor:
        """The stand-in to some power, times `[N, b]`; 4 N m b operations."""
        rest = self.damping**power
        share = ((self.values + self.damping) ** power - rest).float().unsqueeze(1)
        return torch.addmm(rest * right, self.vectors, share * (self.vectors.t() @ right))


def leading_directions(columns: Tensor, chosen: Tensor, damping: float) -> LeadingDirections:
    """Nystrom's approximation of a kernel `[N, N]` from some of its columns `[N, m]`.

    `chosen` `[m]` says which; 2 N m^2 operations.

    >>> kernel = torch.diag(torch.tensor([4.0, 1.0, 0.0]))
    >>> leading_directions(kernel[:, :2], torch.tensor([0, 1]), 1.0).values
    tensor([1., 4.], dtype=torch.float64)
    """
    core = columns[chosen].double()
    core = (core + core.t()) / 2
    values, turned = torch.linalg.eigh(core)
    there = values > _NEGLIGIBLE * values[-1].clamp(min=1e-300)
    # C core^-1 C^T = B B^T, and U are the left singular vectors of B.
    half = columns @ (turned[:, there] / values[there].sqrt()).float()
    values, turned = torch.linalg.eigh((half.t() @ half).double())
    there = values > _NEGLIGIBLE * values[-1:].clamp(min=1e-300)
    vectors = half @ (turned[:, there] / values[there].sqrt()).float()
    return LeadingDirections(vectors, values[there], damping)


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Solutions `[N, b]`, how they were found, and the largest |A x - b| / |b|."""

    values: Tensor
    steps: int
    residual: float


def block_conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    near: LeadingDirections,
    *,
    tolerance: float,
    max_steps: int,
    report: Callable[[int, float], None] = lambda steps, residual: None,
) -> Solved:
    """A^-1 b of right sides `[N, b]`, each to |A x - b| <= tolerance |b|, or an error.

    A is positive definite and given by its products with `[N, b]`; `near` stands in for it. All
    right sides are solved in the space that their residuals span together, so that many of them
    need few steps; residuals are kept orthonormal (Dubrulle's block method), so that equal right
    sides do no harm. The last product is that of the residual itself, which is what is told.

    >>> near = LeadingDirections(torch.zeros(3, 0), torch.zeros(0), 1.0)
    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> block_conjugate_gradients(
    ...     lambda v: a @ v, torch.ones(3, 1), near, tolerance=1e-6, max_steps=9
    ... ).values.flatten()
    tensor([1.0000, 0.5000, 0.2500])
    """
    sizes = right.norm(dim=0).clamp(min=1e-30)
    found, left = torch.zeros_like(right), right
    steps, worst = 0, float("inf")
    for _ in range(_RESTARTS):
        # What rounding left over is solved for relative to the right sides themselves.
        made, taken = _one_run(
            product, left, near, goal=tolerance * sizes, most=max_steps - steps, report=report
        )
        found += made
        steps += taken
        left = right - product(found)
        worst = float((left.norm(dim=0) / sizes).max())
        report(steps, worst)
        if worst <= tolerance:
            return Solved(found, steps, worst)
        if steps >= max_steps:
            break
    raise AttributionError(
        f"conjugate gradients did not converge in {steps} steps",
        found=f"a relative residual of {worst:.2g}",
        expected=f"{tolerance:g}",
        fix="use a larger damping or tolerance, or solver='cholesky'",
    )


def _one_run(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    near: LeadingDirections,
    *,
    goal: Tensor,
    most: int,
    report: Callable[[int, float], None],
) -> tuple[Tensor, int]:
    """Solutions from nothing, until the residuals that are updated step by step are small."""
    # Half of the tolerance: what is updated is not quite the residual.
    goal = goal / 2
    basis, sizes = torch.linalg.qr(near.root(right, -0.5))
    along, found = basis.clone(), torch.zeros_like(right)
    for step in range(1, most + 1):
        moved = near.root(product(near.root(along, -0.5)), -0.5)
        if not bool(moved.isfinite().all()):
            raise AttributionError("a product with the kernel is no number")
        bend = _factor(along, moved)
        found.addmm_(along, torch.cholesky_solve(sizes.double(), bend).float())
        basis, turned = torch.linalg.qr(basis - moved @ torch.cholesky_inverse(bend).float())
        sizes = turned @ sizes
        left = near.root(basis @ sizes, 0.5).norm(dim=0)
        report(step, float((left / goal).max()))
        if bool((left <= goal).all()):
            break
        along = torch.addmm(basis, along, turned.t())
    return near.root(found, -0.5), step if most else 0


def _factor(along: Tensor, moved: Tensor) -> Tensor:
    """Cholesky's factor of along^T A along, in float64; directions that are spent are propped up."""
    bend = (along.t() @ moved).double()
    bend = (bend + bend.t()) / 2
    size = bend.diagonal().abs().mean()
    for share in (0.0, 1e-10, 1e-7, 1e-4):
        propped = bend + share * size * torch.eye(len(bend), dtype=bend.dtype)
        found = torch.linalg.cholesky_ex(propped)
        if int(found.info) == 0:
            factor: Tensor = found.L
            return factor
    raise AttributionError("the damped kernel is not positive definite", fix="use a larger damping")
