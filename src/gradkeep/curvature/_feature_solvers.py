"""Damped inverses of Gram matrices of features that are read some rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gradkeep.curvature._cholesky import (
    cholesky,
    relative_damping,
)
from gradkeep.curvature._sketches import require_room
from gradkeep.factors._arithmetic import squared, squared_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Ids = np.ndarray[Any, np.dtype[np.int64]]

ROWS_AT_ONCE = 4096
"""Rows, and targets, that are read at a time."""


def dual(
    kernel: Tensor, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Return a function from products of queries with rows to scores `[..., N]`, by the kernel `[N, N]`.

    With s = sqrt(weight), M = s K s + damping I and k the products of a query with all rows, the scores are
    pull / s * (M^-1 (s k)). Takes N^3 / 3 operations once, N^2 per query; `kernel` is overwritten.
    """
    s = weight.sqrt()
    kernel *= s
    kernel *= s.unsqueeze(1)
    kernel.diagonal().add_(damping)
    factor = cholesky(kernel)
    after = pull / s

    def scores(products: Tensor) -> Tensor:
        flat = (products * s).reshape(-1, len(s))
        return (torch.cholesky_solve(flat.T, factor).T * after).reshape(products.shape)

    return scores


def primal(
    features: StreamedRows, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Return a function from features `[B, k]` of queries to scores `[B, N]`, by those `[N, k]` of the rows.

    With A = X^T diag(weight) X + damping I, the scores are pull * (X A^-1 g). The same as `dual` with K = X X^T,
    in k^3 / 3 + N k^2 operations once, N k per query.
    """
    gram = torch.zeros(features.dim, features.dim)
    for ids in row_blocks(features.count):
        gram += squared(features.read(ids) * weight[ids].sqrt().unsqueeze(1))
    gram.diagonal().add_(damping)
    factor = cholesky(gram)

    def scores(queries: Tensor) -> Tensor:
        moved = torch.cholesky_solve(queries.T, factor).T
        out = torch.empty(len(queries), features.count)
        for ids in row_blocks(features.count):
            torch.mm(moved, features.read(ids).T, out=out[:, ids[0] : ids[-1] + 1])
        return out.mul_(pull)

    return scores


def by_features(
    features: StreamedRows, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """Choose `primal`, or `dual` if there are fewer rows than features."""
    if features.dim <= features.count:
        return primal(features, weight=weight, pull=pull, damping=damping)
    x = features.read(np.arange(features.count))
    solve = dual(squared(x.T), weight=weight, pull=pull, damping=damping)
    return lambda queries: solve(queries @ x.T)


def mean_square(features: StreamedRows, weight: Tensor) -> float:
    """Return the mean diagonal of the weighted kernel of features `[N, k]`: mean of weight x |x|^2."""
    squares = [
        squared_lengths(features.read(ids)).double() * weight[ids]
        for ids in row_blocks(features.count)
    ]
    return float(torch.cat(squares).mean())


class StreamedRows(Protocol):
    """Projected gradients, or features, that are read some rows at a time."""

    @property
    def count(self) -> int:
        """Number of rows."""

    @property
    def dim(self) -> int:
        """Number of features k."""

    def read(self, ids: Ids) -> Tensor:
        """Return rows `[len(ids), k]`."""


def add_damped_scores(
    out: Any, train: StreamedRows, targets: StreamedRows, *, damping: float, share: float
) -> None:
    """Add X (X^T X + l I)^-1 G^T `[n, m]`, times `share`, to an array that may be on disk.

    l is the damping times the mean diagonal of X^T X, or of X X^T if there are fewer rows than features.
    """
    if train.count < train.dim:
        _add_by_rows(out, train, targets, damping, share)
        return
    gram = streamed_gram(train, torch.float32)
    diagonal = float(gram.diagonal().double().mean())
    gram.diagonal().add_(relative_damping(damping, diagonal, name="ridge"))
    factor = torch.linalg.cholesky(gram)
    add_products(out, train, targets, lambda g: torch.cholesky_solve(g.T, factor), share=share)


def add_products(
    out: Any,
    train: StreamedRows,
    targets: StreamedRows,
    solve: Callable[[Tensor], Tensor],
    *,
    share: float,
) -> None:
    """Add X solve(G) `[n, m]`, times `share`, to an array that may be on disk."""
    for block in row_blocks(targets.count, ROWS_AT_ONCE):
        solved = solve(targets.read(block)).float() * share
        for ids in row_blocks(train.count):
            part = train.read(ids) @ solved
            out[ids[0] : ids[-1] + 1, block[0] : block[-1] + 1] += part.numpy()


def streamed_gram(train: StreamedRows, dtype: torch.dtype) -> Tensor:
    """Compute X^T X `[k, k]` of rows that are read some at a time."""
    require_room(
        2 * train.dim**2 * dtype.itemsize,
        f"the {train.dim} x {train.dim} matrix to invert",
        fix="Choose a smaller proj_dim=, or with fewer rows than that leave out lambda_reg=.",
    )
    out = torch.zeros(train.dim, train.dim, dtype=dtype)
    for ids in row_blocks(train.count):
        rows = train.read(ids).to(dtype)
        out.addmm_(rows.T, rows)
    return out


def row_blocks(count: int, size: int = ROWS_AT_ONCE) -> Iterator[Ids]:
    """Yield rows in fixed blocks, so that sums are the same in every run."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def _add_by_rows(
    out: Any, train: StreamedRows, targets: StreamedRows, damping: float, share: float
) -> None:
    """Add (X X^T + l I)^-1 X G^T, for fewer rows than features."""
    x = train.read(np.arange(train.count))
    kernel = torch.zeros(train.count, train.count)
    # The factorization reads only the lower half.
    for ids in row_blocks(train.count, max(256, train.count // 4)):
        stop = int(ids[-1]) + 1
        torch.mm(x[ids[0] : stop], x[:stop].T, out=kernel[ids[0] : stop, :stop])
    mean = float(kernel.diagonal().double().mean())
    kernel.diagonal().add_(relative_damping(damping, mean, name="ridge"))
    factor = torch.linalg.cholesky(kernel)
    for block in row_blocks(targets.count, ROWS_AT_ONCE):
        products = x @ targets.read(block).T
        solved = torch.cholesky_solve(products, factor) * share
        out[:, block[0] : block[-1] + 1] += solved.numpy()
