"""Validation of arguments of the released package, and features of gradients."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak.modelout_functions import TASK_TO_MODELOUT
from gradkeep.compat.trak.score_computers import scaled_inverse
from gradkeep.curvature._cholesky import (
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


def load_task(task: AbstractModelOutput | type[AbstractModelOutput] | str) -> AbstractModelOutput:
    """Return the task for a name, class or instance."""
    if isinstance(task, type):
        return task()
    if not isinstance(task, str):
        return task
    if task not in TASK_TO_MODELOUT:
        raise ValueError(f"no task {task!r}: choose one of {', '.join(TASK_TO_MODELOUT)}")
    return TASK_TO_MODELOUT[task]()


def select_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> list[str] | None:
    """Return the names of the selected parameters, in the model's order."""
    if grad_wrt is None:
        return None
    names, known = set(grad_wrt), [name for name, _ in model.named_parameters()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known[:8]
            raise ValueError(f"the model has no parameter {name!r}; it has {', '.join(near)} ...")
    if not names:
        raise ValueError("grad_wrt must name at least one parameter")
    return [name for name in known if name in names]


def describe_task(task: AbstractModelOutput) -> str:
    """Describe the task and its plain settings."""
    settings = {
        name: value
        for name, value in sorted(vars(task).items())
        if isinstance(value, bool | int | float | str | None.__class__)
    }
    return f"{type(task).__name__}({settings})"


def find_batch_rows(
    batch: list[Tensor],
    inds: Any,
    num_samples: int | None,
    cursor: int,
    count: int,
    what: str,
) -> Ids:
    """Return the rows `[B]` of the samples of a batch."""
    if (inds is None) == (num_samples is None):
        raise AssertionError("Exactly one of num_samples and inds should be specified")
    if not batch or not isinstance(batch[0], torch.Tensor):
        raise TypeError("batch must be a sequence of tensors with one row per sample")
    size = len(batch[0])
    if any(len(field) != size for field in batch):
        raise ValueError(f"the parts of the batch have {[len(field) for field in batch]} rows")
    if inds is None:
        assert num_samples is not None
        if num_samples < size:
            raise ValueError(f"num_samples={num_samples}, but the batch has {size} samples")
        # The last batch may be shorter than the nominal size.
        ids = np.arange(cursor, cursor + size)
    else:
        array = inds.detach().cpu().numpy() if isinstance(inds, torch.Tensor) else np.asarray(inds)
        ids = array.reshape(-1)
        if ids.dtype.kind not in "iu" and len(ids):
            raise TypeError(f"inds must be integers, got {ids.dtype}")
        ids = ids.astype(np.int64)
        if len(ids) != size:
            raise ValueError(f"{len(ids)} inds for a batch of {size} samples; nothing was stored")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{what} rows {int(ids.min())} to {int(ids.max())}, but there are {count}: 0 to "
            f"{count - 1}; nothing was stored"
        )
    if len(np.unique(ids)) != len(ids):
        raise ValueError("the same row twice in one batch; nothing was stored")
    return ids


def select_samples(batch: list[Tensor], mask: Any) -> list[Tensor]:
    """Return the samples where `mask` is True."""
    if mask.all():
        return batch
    which = torch.from_numpy(np.flatnonzero(mask))
    return [field[which.to(field.device)] for field in batch]


RELATIVE = 1.0
"""Default ridge, as a multiple of the mean diagonal of the inverted matrix."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """Addition to the diagonal: an absolute number, or relative to the mean diagonal."""

    absolute: float | None = None

    def check(self, rows: int, dim: int) -> None:
        """Raise if the matrix cannot be inverted."""
        if self.absolute is None:
            return
        if not (math.isfinite(self.absolute) and self.absolute >= 0):
            raise AttributionError(
                f"lambda_reg must be at least 0, got {self.absolute}", code="argument.invalid"
            )
        if self.absolute == 0 and dim >= rows:
            raise AttributionError(
                f"{rows} rows cannot span {dim} dimensions, so without a ridge every score would be "
                "noise",
                code="compat.too_few_rows",
                found=f"proj_dim={dim}, train_set_size={rows}, lambda_reg=0",
                fix="Remove lambda_reg to use the relative ridge, pass a positive one, or use "
                f"proj_dim={max(1, rows // 4)}.",
            )


def require_inverse(train: StreamedRows, ridge: Ridge) -> None:
    """Raise if there will be no inverse, before targets are scored."""
    ridge.check(train.count, train.dim)
    if ridge.absolute == 0:  # a positive ridge always gives an inverse
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


def iter_features(train: StreamedRows, ridge: Ridge) -> Iterator[tuple[Ids, Tensor]]:
    """Yield Phi = X A^-1 `[n, k]` by blocks of rows, to be stored instead of gradients."""
    ridge.check(train.count, train.dim)
    if ridge.absolute is not None:
        inverse = scaled_inverse(streamed_gram(train, torch.float64), ridge.absolute)
    else:
        gram = streamed_gram(train, torch.float64)
        # With fewer rows than dimensions, of X X^T, whose diagonal has the same sum.
        mean = float(gram.diagonal().sum()) / min(train.count, train.dim)
        gram.diagonal().add_(relative_damping(RELATIVE, mean, name="ridge"))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    for ids in row_blocks(train.count):
        yield ids, (train.read(ids).double() @ inverse).float()


def add_features(out: Any, features: StreamedRows, targets: StreamedRows, *, share: float) -> None:
    """Add the scores of stored features to `out` `[n, m]`, times `share`."""
    add_products(out, features, targets, lambda g: g.T, share=share)
