"""From kept gradients to scores, some rows at a time: relative ridge, or the released formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gradkeep.attribution import _solve
from gradkeep.attribution._projections._room import require_room
from gradkeep.compat.trak.score_computers import scaled_inverse
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Ids = np.ndarray[Any, np.dtype[np.int64]]

RELATIVE = 1.0
"""The ridge by default, times the mean diagonal of the matrix that is inverted."""
_ROWS = 4096
_TARGETS = 4096


class Source(Protocol):
    """Gradients to read by their rows."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def dim(self) -> int:
        """k"""

    def read(self, ids: Ids) -> Tensor:
        """The gradients `[len(ids), k]`."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """What is added to the diagonal: a number as it is, or relative to the mean diagonal."""

    absolute: float | None = None

    def check(self, rows: int, dim: int) -> None:
        """Raise if no inverse can come of it."""
        if self.absolute is None:
            return
        if not (math.isfinite(self.absolute) and self.absolute >= 0):
            raise AttributionError("lambda_reg must be at least 0", found=self.absolute)
        if self.absolute == 0 and dim >= rows:
            raise AttributionError(
                f"{rows} rows cannot fill a matrix of {dim} x {dim}: without a ridge its inverse, "
                "and so every score, would be noise",
                found=f"proj_dim={dim}, train_set_size={rows}, lambda_reg=0",
                fix="leave lambda_reg out for the relative ridge, pass a positive one, or choose "
                f"proj_dim={max(1, rows // 4)}",
            )


def add_scores(out: Any, train: Source, targets: Source, ridge: Ridge, *, share: float) -> None:
    """Add to `out` `[n, m]` the scores of all rows for all targets, times `share`.

    - relative: X (X^T X + l I)^-1 G^T with l = the mean diagonal of X^T X, or of X X^T where
      there are fewer rows than numbers; no other scale, so that checkpoints count alike;
    - a number: the released formula, X B G^T with B = A^-1 / mean|A^-1|, A = X^T X + number I.
    """
    ridge.check(train.count, train.dim)
    if ridge.absolute is not None:
        inverse = scaled_inverse(_gram(train, torch.float64), ridge.absolute)
        _multiply(out, train, targets, lambda g: inverse @ g.double().T, share)
    elif train.count < train.dim:
        _by_rows(out, train, targets, share)
    else:
        gram = _gram(train, torch.float32)
        ridge_ = _solve.relative(RELATIVE, float(gram.diagonal().double().mean()), what="ridge")
        gram.diagonal().add_(ridge_)
        factor = torch.linalg.cholesky(gram)
        _multiply(out, train, targets, lambda g: torch.cholesky_solve(g.T, factor), share)


def features_of(train: Source, ridge: Ridge) -> Iterator[tuple[Ids, Tensor]]:
    """Phi = X A^-1 `[n, k]`, some rows at a time: what is kept where gradients are not."""
    ridge.check(train.count, train.dim)
    if ridge.absolute is not None:
        inverse = scaled_inverse(_gram(train, torch.float64), ridge.absolute)
    else:
        gram = _gram(train, torch.float64)
        # Of X X^T where there are fewer rows, whose diagonal has the same sum.
        mean = float(gram.diagonal().sum()) / min(train.count, train.dim)
        gram.diagonal().add_(_solve.relative(RELATIVE, mean, what="ridge"))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    for ids in _blocks(train.count):
        yield ids, (train.read(ids).double() @ inverse).float()


def add_features(out: Any, features: Source, targets: Source, *, share: float) -> None:
    """Add the scores of kept features to `out` `[n, m]`, times `share`."""
    _multiply(out, features, targets, lambda g: g.T, share)


def _multiply(
    out: Any, train: Source, targets: Source, turn: Callable[[Tensor], Tensor], share: float
) -> None:
    for asked in _blocks(targets.count, _TARGETS):
        turned = turn(targets.read(asked)).float() * share
        for ids in _blocks(train.count):
            part = train.read(ids) @ turned
            out[ids[0] : ids[-1] + 1, asked[0] : asked[-1] + 1] += part.numpy()


def _by_rows(out: Any, train: Source, targets: Source, share: float) -> None:
    """(X X^T + l I)^-1 X G^T, for fewer rows than numbers."""
    x = train.read(np.arange(train.count))
    kernel = torch.zeros(train.count, train.count)
    # The lower half is all that the factorisation reads.
    for ids in _blocks(train.count, max(256, train.count // 4)):
        stop = int(ids[-1]) + 1
        torch.mm(x[ids[0] : stop], x[:stop].T, out=kernel[ids[0] : stop, :stop])
    mean = float(kernel.diagonal().double().mean())
    kernel.diagonal().add_(_solve.relative(RELATIVE, mean, what="ridge"))
    factor = torch.linalg.cholesky(kernel)
    for asked in _blocks(targets.count, _TARGETS):
        products = x @ targets.read(asked).T
        solved = torch.cholesky_solve(products, factor) * share
        out[:, asked[0] : asked[-1] + 1] += solved.numpy()


def _gram(train: Source, dtype: torch.dtype) -> Tensor:
    require_room(
        2 * train.dim**2 * dtype.itemsize,
        f"the {train.dim} x {train.dim} matrix that is to be inverted",
        fix="choose a smaller proj_dim, or with fewer rows than that leave lambda_reg out",
    )
    out = torch.zeros(train.dim, train.dim, dtype=dtype)
    for ids in _blocks(train.count):
        rows = train.read(ids).to(dtype)
        out.addmm_(rows.T, rows)
    return out


def _blocks(count: int, size: int = _ROWS) -> Iterator[Ids]:
    """Rows in blocks that depend on nothing else, so that sums are the same in every run."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))
