"""Solving and decomposing with products only: conjugate gradients, and Lanczos' method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], wanted: Tensor, *, tolerance: float, max_steps: int
) -> Tensor:
    """The solutions x `[K, P]` of A x = wanted, of a positive definite A given by its products.

    Each to |A x - wanted| <= tolerance |wanted|, or an error. Cost: a product a step.

    >>> conjugate_gradients(lambda x: 2 * x, torch.ones(1, 3), tolerance=1e-6, max_steps=3)
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    found, left = torch.zeros_like(wanted), wanted.clone()
    along, size = left.clone(), left.square().sum(1)
    goal = tolerance**2 * size
    for _ in range(max_steps):
        if bool((size <= goal).all()):
            return found
        curved = product(along)
        bend = (along * curved).sum(1)
        if not bool(curved.isfinite().all()):
            raise AttributionError("a product with the curvature is no number")
        unsolved = size > goal
        if bool((bend[unsolved] <= 0).any()):
            raise AttributionError(
                "the damped curvature has a negative direction, so it has no minimum to solve for",
                found=f"v^T (A + damping) v = {float(bend[unsolved].min()):.3g}",
                fix="use curvature='ggn' or 'fisher', or a larger damping",
            )
        step = torch.where(unsolved, size / bend, torch.zeros_like(bend)).unsqueeze(1)
        found, left = found + step * along, left - step * curved
        before, size = size, left.square().sum(1)
        grown = torch.where(before > 0, size / before, torch.zeros_like(size))
        along = left + grown.unsqueeze(1) * along
    if bool((size <= goal).all()):
        return found
    worst = float((size / wanted.square().sum(1).clamp(min=1e-300)).sqrt().max())
    raise AttributionError(
        f"conjugate gradients did not converge in {max_steps} steps",
        found=f"a relative residual of {worst:.2g}",
        expected=f"{tolerance:g}",
        fix="use a larger damping, more max_steps or a larger tolerance",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues `[r]`, falling, and eigenvectors `[r, P]` of length one."""

    values: Tensor
    vectors: Tensor


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, rank: int
) -> Eigenpairs:
    """The `rank` largest eigenpairs above zero in the Krylov space of `start` `[P]`.

    Arnoldi's iteration: every new vector is made orthogonal, twice, to all before. Cost: a product
    an iteration, iterations x P values.

    >>> found = lanczos(lambda v: v * torch.tensor([3.0, 2.0, 1.0]), torch.ones(3), iterations=3, rank=2)
    >>> found.values
    tensor([3.0000, 2.0000])
    """
    steps = min(iterations, len(start))
    basis = start.new_zeros(steps, len(start))
    small = start.new_zeros(steps, steps)
    vector, made = start / start.norm(), 0
    for made in range(1, steps + 1):
        basis[made - 1] = vector
        moved = product(vector)
        if not bool(moved.isfinite().all()):
            raise AttributionError("a product with the curvature is no number")
        known = basis[:made]
        shares = known @ moved
        small[:made, made - 1] = shares
        rest = moved - shares @ known
        rest = rest - (known @ rest) @ known
        # What is left is rounding: the space is closed under the product.
        if float(rest.norm()) <= 1e-6 * float(moved.norm()):
            break
        vector = rest / rest.norm()
    # The matrix is symmetric, and only its upper half was written.
    values, turned = torch.linalg.eigh(small[:made, :made], UPLO="U")
    above = values > 1e-10 * values.abs().amax()  # below it, zero up to rounding
    order = [at for at in range(made - 1, -1, -1) if bool(above[at])][:rank]
    if not order:
        raise AttributionError(
            "no eigenvalue of the curvature above zero was found",
            fix="use curvature='ggn' or 'fisher', more iterations, or another checkpoint",
        )
    return Eigenpairs(values[order], turned[:, order].T @ basis[:made])
