"""A model made ready to be replayed: compiled parts run as written, checkpointed ones so that they can be seen."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as checkpointing

from gradkeep.capturing._at_hand import weights_at_hand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given: its layers have the names they had."""
    own = getattr(model, "_orig_mod", None)
    return own if isinstance(own, torch.nn.Module) else model


@contextlib.contextmanager
def ready(model: nn.Module) -> Iterator[list[str]]:
    """The model as it can be replayed, until the block ends; gives notes about what that changed.

    Compiled parts run as they are written: their layers could not be watched else. Parts under
    `torch.utils.checkpoint` run without re-entering autograd, with the same numbers. Weights are at
    hand in full precision.
    """
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_reentering())
        yield stack.enter_context(weights_at_hand(model))


class _Openly:
    """In place of the function that hides what it runs from autograd, and so from a capture."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@contextlib.contextmanager
def _without_reentering() -> Iterator[None]:
    hidden = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _Openly  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = hidden  # type: ignore[misc]
