"""The largest eigenvalues of a symmetric matrix that is given by its products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
    order = [at for at in range(made - 1, -1, -1) if float(values[at]) > 0][:rank]
    if not order:
        raise AttributionError(
            "no eigenvalue of the curvature above zero was found",
            fix="use curvature='ggn' or 'fisher', more iterations, or another checkpoint",
        )
    return Eigenpairs(values[order], turned[:, order].T @ basis[:made])
