"""Damped inverses of Gram matrices of features that are read some rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gradkeep.curvature._cholesky import cholesky
from gradkeep.curvature._sketches import require_room
from gradkeep.errors import AttributionError
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
    """Scores `[..., N]` from products of queries with rows, by the kernel `[N, N]` of the rows.

    With s = sqrt(weight), M = s K s + damping I and k the products of a query with all rows, the
    scores are pull / s * (M^-1 (s k)). Takes N^3 / 3 operations once, N^2 a query; `kernel` is
    overwritten.
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
    """Scores `[B, N]` from features `[B, k]` of queries, by those `[N, k]` of the rows.

    With A = X^T diag(weight) X + damping I, the scores are pull * (X A^-1 g). The same as `dual`
    with K = X X^T, in k^3 / 3 + N k^2 operations once, N k a query.
    """
    gram = torch.zeros(features.dim, features.dim)
    for ids in row_blocks(features.count):
        gram += squared(features.read(ids) * weight[ids].sqrt().unsqueeze(1))
    gram.diagonal().add_(damping)
    factor = cholesky(gram)

    def scores(asked: Tensor) -> Tensor:
        moved = torch.cholesky_solve(asked.T, factor).T
        out = torch.empty(len(asked), features.count)
        for ids in row_blocks(features.count):
            torch.mm(moved, features.read(ids).T, out=out[:, ids[0] : ids[-1] + 1])
        return out.mul_(pull)

    return scores


def by_features(
    features: StreamedRows, *, weight: Tensor, pull: Tensor, damping: float
) -> Callable[[Tensor], Tensor]:
    """`primal`, or for fewer rows than numbers `dual`: the smaller of the two matrices."""
    if features.dim <= features.count:
        return primal(features, weight=weight, pull=pull, damping=damping)
    x = features.read(np.arange(features.count))
    solve = dual(squared(x.T), weight=weight, pull=pull, damping=damping)
    return lambda asked: solve(asked @ x.T)


def mean_square(features: StreamedRows, weight: Tensor) -> float:
    """The mean diagonal of the weighted kernel of features `[N, k]`: mean of weight x |x|^2."""
    found = [
        squared_lengths(features.read(ids)).double() * weight[ids]
        for ids in row_blocks(features.count)
    ]
    return float(torch.cat(found).mean())


def relative_damping(damping: float | str, diagonal: float, *, what: str) -> float:
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
    return float(damping * diagonal)


class StreamedRows(Protocol):
    """Projected gradients, or features, that are read some rows at a time."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def dim(self) -> int:
        """K."""

    def read(self, ids: Ids) -> Tensor:
        """The gradients `[len(ids), k]`."""


def add_damped_scores(
    out: Any, train: StreamedRows, targets: StreamedRows, *, damping: float, share: float
) -> None:
    """Add X (X^T X + l I)^-1 G^T `[n, m]`, times `share`, to an array that may be on disk.

    l is the damping times the mean diagonal of X^T X, or of X X^T where there are fewer rows than
    numbers.
    """
    if train.count < train.dim:
        _add_by_rows(out, train, targets, damping, share)
        return
    gram = streamed_gram(train, torch.float32)
    diagonal = float(gram.diagonal().double().mean())
    gram.diagonal().add_(relative_damping(damping, diagonal, what="ridge"))
    factor = torch.linalg.cholesky(gram)
    add_products(out, train, targets, lambda g: torch.cholesky_solve(g.T, factor), share=share)


def add_products(
    out: Any,
    train: StreamedRows,
    targets: StreamedRows,
    turn: Callable[[Tensor], Tensor],
    *,
    share: float,
) -> None:
    """Add X turn(G) `[n, m]`, times `share`, to an array that may be on disk."""
    for asked in row_blocks(targets.count, ROWS_AT_ONCE):
        turned = turn(targets.read(asked)).float() * share
        for ids in row_blocks(train.count):
            part = train.read(ids) @ turned
            out[ids[0] : ids[-1] + 1, asked[0] : asked[-1] + 1] += part.numpy()


def streamed_gram(train: StreamedRows, dtype: torch.dtype) -> Tensor:
    """X^T X `[k, k]` of rows that are read some at a time."""
    require_room(
        2 * train.dim**2 * dtype.itemsize,
        f"the {train.dim} x {train.dim} matrix that is to be inverted",
        fix="choose a smaller proj_dim, or with fewer rows than that leave lambda_reg out",
    )
    out = torch.zeros(train.dim, train.dim, dtype=dtype)
    for ids in row_blocks(train.count):
        rows = train.read(ids).to(dtype)
        out.addmm_(rows.T, rows)
    return out


def row_blocks(count: int, size: int = ROWS_AT_ONCE) -> Iterator[Ids]:
    """Rows in blocks that depend on nothing else, so that sums are the same in every run."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def _add_by_rows(
    out: Any, train: StreamedRows, targets: StreamedRows, damping: float, share: float
) -> None:
    """(X X^T + l I)^-1 X G^T, for fewer rows than numbers."""
    x = train.read(np.arange(train.count))
    kernel = torch.zeros(train.count, train.count)
    # The lower half is all that the factorisation reads.
    for ids in row_blocks(train.count, max(256, train.count // 4)):
        stop = int(ids[-1]) + 1
        torch.mm(x[ids[0] : stop], x[:stop].T, out=kernel[ids[0] : stop, :stop])
    mean = float(kernel.diagonal().double().mean())
    kernel.diagonal().add_(relative_damping(damping, mean, what="ridge"))
    factor = torch.linalg.cholesky(kernel)
    for asked in row_blocks(targets.count, ROWS_AT_ONCE):
        products = x @ targets.read(asked).T
        solved = torch.cholesky_solve(products, factor) * share
        out[:, asked[0] : asked[-1] + 1] += solved.numpy()
