"""Conjugate gradients and Lanczos' method, which need only products with a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, *, tolerance: float, max_steps: int
) -> Tensor:
    """Solve A x = right for x `[K, P]`, of a positive definite A given by its products.

    Each to |A x - right| <= tolerance |right|, or raise. Cost: one product per step.

    >>> conjugate_gradients(lambda x: 2 * x, torch.ones(1, 3), tolerance=1e-6, max_steps=3)
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    solution, residual = torch.zeros_like(right), right.clone()
    along, size = residual.clone(), residual.square().sum(1)
    goal = tolerance**2 * size
    for _ in range(max_steps):
        if bool((size <= goal).all()):
            return solution
        curved = product(along)
        bend = (along * curved).sum(1)
        if not bool(curved.isfinite().all()):
            raise AttributionError(
                "a product with the curvature is not finite",
                code="attribute.not_finite",
                fix="Check the gradients: gk.gradients(store, split=...).norms().",
            )
        unsolved = size > goal
        if bool((bend[unsolved] <= 0).any()):
            raise AttributionError(
                "the damped curvature is not positive definite",
                code="attribute.negative_curvature",
                found=f"v^T (A + damping) v = {float(bend[unsolved].min()):.3g}",
                fix="Use curvature='ggn' or 'fisher', or a larger damping=.",
            )
        step = torch.where(unsolved, size / bend, torch.zeros_like(bend)).unsqueeze(1)
        solution, residual = solution + step * along, residual - step * curved
        before, size = size, residual.square().sum(1)
        grown = torch.where(before > 0, size / before, torch.zeros_like(size))
        along = residual + grown.unsqueeze(1) * along
    if bool((size <= goal).all()):
        return solution
    worst = float((size / right.square().sum(1).clamp(min=1e-300)).sqrt().max())
    raise AttributionError(
        f"conjugate gradients did not converge in {max_steps} steps",
        code="attribute.not_converged",
        found=f"a relative residual of {worst:.2g}",
        expected=f"{tolerance:g}",
        fix="Use a larger damping=, max_steps= or tolerance=.",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues `[r]`, descending, and eigenvectors `[r, P]` of norm one."""

    values: Tensor
    vectors: Tensor


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, rank: int
) -> Eigenpairs:
    """Compute the `rank` largest positive eigenpairs in the Krylov space of `start` `[P]`.

    Arnoldi's iteration: every new vector is made orthogonal, twice, to all earlier ones. Cost: one product per
    iteration, iterations x P values.

    >>> pairs = lanczos(lambda v: v * torch.tensor([3.0, 2.0, 1.0]), torch.ones(3), iterations=3, rank=2)
    >>> pairs.values
    tensor([3.0000, 2.0000])
    """
    steps = min(iterations, len(start))
    basis = start.new_zeros(steps, len(start))
    small = start.new_zeros(steps, steps)
    vector, count = start / start.norm(), 0
    for count in range(1, steps + 1):
        basis[count - 1] = vector
        moved = product(vector)
        if not bool(moved.isfinite().all()):
            raise AttributionError(
                "a product with the curvature is not finite",
                code="attribute.not_finite",
                fix="Check the gradients: gk.gradients(store, split=...).norms().",
            )
        known = basis[:count]
        shares = known @ moved
        small[:count, count - 1] = shares
        rest = moved - shares @ known
        rest = rest - (known @ rest) @ known
        # The rest is rounding: the space is closed under the product.
        if float(rest.norm()) <= 1e-6 * float(moved.norm()):
            break
        vector = rest / rest.norm()
    # The matrix is symmetric; only its upper half is filled.
    values, rotation = torch.linalg.eigh(small[:count, :count], UPLO="U")
    above = values > 1e-10 * values.abs().amax()  # below it, zero up to rounding
    order = [at for at in range(count - 1, -1, -1) if bool(above[at])][:rank]
    if not order:
        raise AttributionError(
            "the curvature has no positive eigenvalue",
            code="attribute.no_positive_eigenvalue",
            fix="Use curvature='ggn' or 'fisher', more iterations=, or another checkpoint.",
        )
    return Eigenpairs(values[order], rotation[:, order].T @ basis[:count])
