"""What a user gives: tasks, parameters, batches and their rows, checked before anything is done."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.compat.trak.modelout_functions import TASK_TO_MODELOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

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
