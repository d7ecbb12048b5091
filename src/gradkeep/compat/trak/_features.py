"""From kept gradients to features and scores, and the arrays of the current model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.compat.trak.score_computers import scaled_inverse
from gradkeep.curvature._feature_solvers import (
    StreamedRows,
    add_damped_scores,
    add_products,
    relative_damping,
    row_blocks,
    streamed_gram,
)
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from torch import Tensor

    Ids = np.ndarray[Any, np.dtype[np.int64]]

RELATIVE = 1.0
"""The ridge by default, times the mean diagonal of the matrix that is inverted."""


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


def require_inverse(train: StreamedRows, ridge: Ridge) -> None:
    """Raise now if there will be no inverse: before targets are scored, not after."""
    ridge.check(train.count, train.dim)
    if ridge.absolute == 0:  # any more than that, and there is one
        scaled_inverse(streamed_gram(train, torch.float64), 0.0)


def add_scores(
    out: Any, train: StreamedRows, targets: StreamedRows, ridge: Ridge, *, share: float
) -> None:
    """Add to `out` `[n, m]` the scores of all rows for all targets, times `share`.

    - relative: X (X^T X + l I)^-1 G^T with l = the mean diagonal of X^T X, or of X X^T where
      there are fewer rows than numbers; no other scale, so that checkpoints count alike;
    - a number: the released formula, X B G^T with B = A^-1 / mean|A^-1|, A = X^T X + number I.
    """
    ridge.check(train.count, train.dim)
    if ridge.absolute is not None:
        inverse = scaled_inverse(streamed_gram(train, torch.float64), ridge.absolute)
        add_products(out, train, targets, lambda g: inverse @ g.double().T, share=share)
    else:
        add_damped_scores(out, train, targets, damping=RELATIVE, share=share)


def features_of(train: StreamedRows, ridge: Ridge) -> Iterator[tuple[Ids, Tensor]]:
    """Phi = X A^-1 `[n, k]`, some rows at a time: what is kept where gradients are not."""
    ridge.check(train.count, train.dim)
    if ridge.absolute is not None:
        inverse = scaled_inverse(streamed_gram(train, torch.float64), ridge.absolute)
    else:
        gram = streamed_gram(train, torch.float64)
        # Of X X^T where there are fewer rows, whose diagonal has the same sum.
        mean = float(gram.diagonal().sum()) / min(train.count, train.dim)
        gram.diagonal().add_(relative_damping(RELATIVE, mean, what="ridge"))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    for ids in row_blocks(train.count):
        yield ids, (train.read(ids).double() @ inverse).float()


def add_features(out: Any, features: StreamedRows, targets: StreamedRows, *, share: float) -> None:
    """Add the scores of kept features to `out` `[n, m]`, times `share`."""
    add_products(out, features, targets, lambda g: g.T, share=share)
