"""From kept gradients to features and scores, and the arrays of the current model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.attribution import (
    StreamedRows,
    add_damped_scores,
    add_products,
    relative_damping,
    row_blocks,
    streamed_gram,
)
from gradkeep.compat.trak.score_computers import scaled_inverse
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    Ids = np.ndarray[Any, np.dtype[np.int64]]

    from gradkeep.compat.trak._kept_rows import KeptGradients
    from gradkeep.compat.trak._store_saver import MmapSaver

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


class CurrentArrays(Mapping[str, Any]):
    """The arrays of the current model id and experiment, read when they are asked for.

    Rows that are not there are NaN, never a number. To write, use `put` and `put_targets`.
    """

    def __init__(self, saver: MmapSaver) -> None:
        self._saver = saver

    def __getitem__(self, name: str) -> Any:
        saver, model_id = self._saver, self._saver.current_model_id
        if model_id is None:
            return None
        found = saver.finalized(model_id)
        if name == "is_featurized":
            return saver.done().astype(np.int32).reshape(-1, 1)
        if name == "out_to_loss":
            return saver.train_weights(model_id).reshape(-1, 1)
        if name == "grads":
            return _with_gaps(saver._train(model_id))
        if name == "features":
            if isinstance(found, Ridge):
                parts = features_of(saver.train(model_id), found)
                return np.concatenate([part.numpy() for _, part in parts])
            return None if found is None else _with_gaps(found)
        exp_name = saver.current_experiment_name
        if exp_name is not None and name == f"{exp_name}_grads":
            return _with_gaps(saver._targets(exp_name, model_id))
        if exp_name is not None and name == f"{exp_name}_scores":
            return saver.scores(exp_name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from ("grads", "out_to_loss", "features", "is_featurized")
        if self._saver.current_experiment_name is not None:
            yield f"{self._saver.current_experiment_name}_grads"
            yield f"{self._saver.current_experiment_name}_scores"

    def __len__(self) -> int:
        return len(list(iter(self)))


def _with_gaps(kept: KeptGradients) -> Any:
    out = np.full((kept.count, kept.dim), np.nan, np.float32)
    there = np.flatnonzero(kept.done)
    out[there] = kept.read(there).numpy()
    return out
