"""Whether a model can be captured as it stands: its mode and its precision."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from gradkeep.capturing._at_hand import execution_device
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode = Literal["eval", "train"]
"""How dropout and batch normalization behave while a model is replayed."""
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: Mode | None) -> Iterator[None]:
    """The model in the chosen mode until the block ends; then every module is as it was.

    Without a choice a model in train mode is taken only if that changes nothing.
    """
    _check_precision(model)
    if mode is not None and (not isinstance(mode, str) or mode not in ("eval", "train")):
        raise CaptureError(f"no mode {mode!r}", expected="'eval' or 'train'")
    flags = {module: module.training for module in model.modules()}
    try:
        if mode is not None:
            model.train(mode == "train")
        _check_training(model, chosen=mode is not None)
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def draws_at_random(model: nn.Module) -> bool:
    """Whether two passes over the same samples differ, as with dropout in train mode."""
    return any(module.training and _is_random(module) for module in model.modules())


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are, or where it computes if they are kept elsewhere."""
    for parameter in model.parameters():
        return (execution_device(model) if parameter.is_meta else None) or parameter.device
    raise CaptureError(
        "the model has no parameters, so there are no gradients to keep",
        found=type(model).__name__,
        fix="capture a model with trainable parameters",
    )


def _check_training(model: nn.Module, *, chosen: bool) -> None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BATCH_NORMS):
            raise CaptureError(
                f"layer {name} is a {type(module).__name__} in train mode: it normalises with the "
                f"statistics of the batch, so a sample has no gradient of its own",
                fix="call model.eval() first, or pass mode='eval'",
            )
        if not chosen and _is_random(module):
            raise CaptureError(
                f"layer {name} is a {type(module).__name__} in train mode: the gradients would "
                f"belong to a random model",
                fix="pass mode='eval', or mode='train' if that is what you want",
            )


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


def _check_precision(model: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not kinds:
        raise CaptureError(
            "the model has no trainable parameter",
            fix="set requires_grad=True on the parameters whose gradients are wanted",
        )
    low = kinds - {torch.float32, torch.float64}
    if low:
        raise CaptureError(
            "the model's weights have too few digits for exact gradients",
            found=", ".join(sorted(str(kind) for kind in low)),
            expected="float32 or float64",
            fix="capture model.float(); what is kept may be 16 bits wide: encoding='bfloat16'",
        )
