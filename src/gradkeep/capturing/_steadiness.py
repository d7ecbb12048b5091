"""Whether a row's loss is its own: the same in every pass, whichever rows are beside it.

What is kept of a row is kept under its id alone. A model that counts its calls, carries a state from batch to
batch or draws at random gives the same row another gradient each time, one that looks at the whole batch
another one beside other rows, and no row shows it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._mode import device_of, draws_at_random
from gradkeep.capturing.tasks._task import losses_alone
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing.tasks._task import Task

_TRIED, _ALONE = 4, 2
"""Rows of the first batch that are run together, and of these without the others."""
_AGAIN, _ROUNDED = 1e-3, 1e-2
"""Shares of the mean loss that a second pass may be off, and one with other rows beside it: products of other
sizes round otherwise, with 16 bits inside of a model by a hundredth."""
_MOST_BYTES = 256 << 20


def is_steady(model: nn.Module, task: Task, batch: Any, mode: Mode | None) -> bool:
    """Whether rows can be made again; an error where it was not said that they need not, and where rows mix.

    Cost: three forward passes of a few rows.
    """
    if draws_at_random(model):
        return False  # which has been asked for
    count = min(_TRIED, batch_size(batch))
    one = _losses(model, task, batch, count)
    if one.shape != (count,):
        return True  # which is refused where rows are made
    if not _near(one, _losses(model, task, batch, count), _AGAIN):
        if mode == "train":
            return False
        raise CaptureError(
            "the model gives the same samples other losses when it is run again",
            found="a state that it keeps between calls (a counter, a running mean, hidden states), or "
            "numbers drawn at random",
            expected="losses that depend on weights and sample alone, so that a row can be made again",
            fix="switch that off while you capture; or pass mode='train' to keep what a single pass gives",
        )
    few = min(_ALONE, count - 1)
    if few and not _near(one[:few], _losses(model, task, batch, few), _ROUNDED):
        raise CaptureError(
            "a sample's loss depends on the others of its batch",
            found="other losses of the same samples without the rest of the batch",
            expected="a loss per sample that depends on that sample alone",
            fix="capture in eval mode (mode='eval'), without statistics over the batch; a sample must stay "
            "at its place in the batch",
        )
    return True


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """The model's buffers, up to 256 MiB, are in the end what they were."""
    room, kept = _MOST_BYTES, []
    for buffer in model.buffers():
        room -= buffer.nbytes
        if room >= 0 and not buffer.is_meta and not buffer.is_inference():
            kept.append((buffer, buffer._version, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, before in kept:
                if buffer._version != version:
                    buffer.copy_(before)


def _losses(model: nn.Module, task: Task, batch: Any, count: int) -> Tensor:
    own = to_device(rows_of(batch, 0, count), device_of(model))
    return losses_alone(task, model, own).losses.detach().double()


def _near(one: Tensor, other: Tensor, by: float) -> bool:
    limit = by * float(one.abs().nan_to_num().mean()) + 1e-6
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=by, atol=limit, equal_nan=True)
    )
