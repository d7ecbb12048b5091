"""Damped inverses of kernels: exact for few rows, through projected gradients for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._symmetric import squared
from gradkeep.errors import AttributionError
from gradkeep.factors import squared_lengths

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def dual(
    kernel: Tensor, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Scores `[..., N]` from products of queries with rows, by the kernel `[N, N]` of the rows.

    With s = sqrt(weight), M = s K s + damping I and k the products of a query with all rows, the
    scores are pull / s * (M^-1 (s k)). Takes N^3 / 3 operations once, N^2 a query; `kernel` is
    overwritten.
    """
    s = weight.sqrt()
    kernel *= s
    kernel *= s.unsqueeze(1)
    kernel.diagonal().add_(damping)
    factor = _cholesky(kernel, damping)
    after = pull / s

    def scores(products: Tensor) -> Tensor:
        flat = (products * s).reshape(-1, len(s))
        return (torch.cholesky_solve(flat.T, factor).T * after).reshape(products.shape)

    return scores


def primal(
    features: Tensor, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Scores `[B, N]` from features `[B, k]` of queries, by those `[N, k]` of the rows.

    With A = X^T diag(weight) X + damping I, the scores are pull * (X A^-1 g). The same as `dual`
    with K = X X^T, in k^3 / 3 + N k^2 operations once, N k a query.
    """
    gram = torch.zeros(features.shape[1], features.shape[1])
    for rows, some in zip(torch.split(features, _ROWS), torch.split(weight, _ROWS), strict=True):
        gram += squared(rows * some.sqrt().unsqueeze(1))
    gram.diagonal().add_(damping)
    factor = _cholesky(gram, damping)

    def scores(asked: Tensor) -> Tensor:
        moved = torch.cholesky_solve(asked.T, factor).T
        return (moved @ features.T) * pull

    return scores


def by_features(
    features: Tensor, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """`primal`, or for fewer rows than numbers `dual`: the smaller of the two matrices."""
    if features.shape[1] <= len(features):
        return primal(features, weight=weight, pull=pull, damping=damping)
    solve = dual(squared(features.T), weight=weight, pull=pull, damping=damping)
    return lambda asked: solve(asked @ features.T)


def mean_square(features: Tensor, weight: Tensor) -> float:
    """The mean diagonal of the weighted kernel of features `[N, k]`: mean of weight x |x|^2."""
    return float((squared_lengths(features).double() * weight).mean())


def relative(damping: float | str, diagonal: float, *, what: str) -> float:
    """A damping relative to a mean diagonal, once both make sense."""
    if isinstance(damping, str) or not damping > 0:
        raise AttributionError(
            f"{what} must be positive: without it a singular matrix would be inverted",
            found=damping,
            fix=f"leave {what} out for 1 x the mean diagonal",
        )
    if not diagonal > 0:
        raise AttributionError(
            "all gradients of the training rows are zero, or none is a number",
            found=f"a mean squared length of {diagonal}",
            fix="capture a model that has something to learn, or other layers",
        )
    return damping * diagonal


def _cholesky(matrix: Tensor, damping: float) -> Tensor:
    # Rounding of float32 can outweigh a tiny damping: then in double precision.
    for kind in (torch.float32, torch.float64):
        found = torch.linalg.cholesky_ex(matrix.to(kind))
        if int(found.info) == 0:
            factor: Tensor = found.L
            return factor.float()
    raise AttributionError(
        "the damped kernel is not positive definite",
        found=f"an absolute damping of {damping:.3g}",
        fix="use a larger damping",
    )


_ROWS = 4096
