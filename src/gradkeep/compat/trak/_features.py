"""Arguments as the released package takes them, and features of gradients."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak.modelout_functions import TASK_TO_MODELOUT
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
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from gradkeep.compat.trak.modelout_functions import AbstractModelOutput

    Ids = np.ndarray[Any, np.dtype[np.int64]]


def task_named(task: AbstractModelOutput | type[AbstractModelOutput] | str) -> AbstractModelOutput:
    """The task of that name or class, or the one that is given."""
    if isinstance(task, type):
        return task()
    if not isinstance(task, str):
        return task
    if task not in TASK_TO_MODELOUT:
        raise ValueError(f"no task {task!r}: choose one of {', '.join(TASK_TO_MODELOUT)}")
    return TASK_TO_MODELOUT[task]()


def chosen_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> list[str] | None:
    """The names of chosen parameters, in the model's order."""
    if grad_wrt is None:
        return None
    wanted, known = set(grad_wrt), [name for name, _ in model.named_parameters()]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known[:8]
            raise ValueError(f"the model has no parameter {name!r}: it has {', '.join(near)} ...")
    if not wanted:
        raise ValueError("grad_wrt names no parameter")
    return [name for name in known if name in wanted]


def described(task: AbstractModelOutput) -> str:
    """The task and its plain settings."""
    settings = {
        name: value
        for name, value in sorted(vars(task).items())
        if isinstance(value, bool | int | float | str | None.__class__)
    }
    return f"{type(task).__name__}({settings})"


def rows_of_batch(
    batch: list[Tensor],
    inds: Any,
    num_samples: int | None,
    cursor: int,
    count: int,
    what: str,
) -> Ids:
    """The rows `[B]` that the samples of a batch are."""
    if (inds is None) == (num_samples is None):
        raise AssertionError("Exactly one of num_samples and inds should be specified")
    if not batch or not isinstance(batch[0], torch.Tensor):
        raise TypeError("a batch is a sequence of tensors with one row per sample")
    size = len(batch[0])
    if any(len(field) != size for field in batch):
        raise ValueError(f"the parts of the batch have {[len(field) for field in batch]} rows")
    if inds is None:
        assert num_samples is not None
        if num_samples < size:
            raise ValueError(f"num_samples={num_samples}, but the batch has {size} samples")
        # A last batch may be shorter than the nominal size: what is there counts.
        ids = np.arange(cursor, cursor + size)
    else:
        given = inds.detach().cpu().numpy() if isinstance(inds, torch.Tensor) else np.asarray(inds)
        ids = given.reshape(-1)
        if ids.dtype.kind not in "iu" and len(ids):
            raise TypeError(f"inds must be whole numbers, not {ids.dtype}")
        ids = ids.astype(np.int64)
        if len(ids) != size:
            raise ValueError(f"{len(ids)} inds for a batch of {size} samples; nothing was kept")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{what} rows {int(ids.min())} to {int(ids.max())}, but there are {count}: 0 to "
            f"{count - 1}; nothing was kept"
        )
    if len(np.unique(ids)) != len(ids):
        raise ValueError("the same row twice in one batch; nothing was kept")
    return ids


def taken(batch: list[Tensor], left: Any) -> list[Tensor]:
    """The samples that are left to do."""
    if left.all():
        return batch
    which = torch.from_numpy(np.flatnonzero(left))
    return [field[which.to(field.device)] for field in batch]


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
        gram.diagonal().add_(relative_damping(RELATIVE, mean, name="ridge"))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    for ids in row_blocks(train.count):
        yield ids, (train.read(ids).double() @ inverse).float()


def add_features(out: Any, features: StreamedRows, targets: StreamedRows, *, share: float) -> None:
    """Add the scores of kept features to `out` `[n, m]`, times `share`."""
    add_products(out, features, targets, lambda g: g.T, share=share)
