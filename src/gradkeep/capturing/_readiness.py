"""A model made ready to be replayed: compiled parts run as written, checkpointed ones so that they can be seen."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

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
    hand in full precision. Another thread that wants the same model waits: what watches a layer would
    see the passes of both.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock_of(model))
        stack.enter_context(_openly())
        yield stack.enter_context(weights_at_hand(model))


class _Openly:
    """In place of the function that hides what it runs from autograd, and so from a capture."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@dataclass(slots=True)
class _Opened:
    """What is switched in torch itself, for how many threads: the last one puts it back."""

    users: int = 0
    switched: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    eager: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_opened = _Opened()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making_locks = threading.Lock()


def _lock_of(model: nn.Module) -> threading.RLock:
    with _making_locks:
        return _locks.setdefault(model, threading.RLock())


@contextlib.contextmanager
def _openly() -> Iterator[None]:
    """Compiled code runs as it is written, and checkpoints without re-entering, while any thread wants it."""
    with _opened.lock:
        if not _opened.users:
            hidden = checkpointing.CheckpointFunction
            checkpointing.CheckpointFunction = _Openly  # type: ignore[assignment, misc]
            _opened.switched.callback(setattr, checkpointing, "CheckpointFunction", hidden)
        if "torch._dynamo" in sys.modules and not _opened.eager:  # else nothing was compiled
            _opened.switched.enter_context(torch.compiler.set_stance("force_eager"))
            _opened.eager = True
        _opened.users += 1
    try:
        yield
    finally:
        with _opened.lock:
            _opened.users -= 1
            if not _opened.users:
                _opened.switched.close()
                _opened.eager = False
