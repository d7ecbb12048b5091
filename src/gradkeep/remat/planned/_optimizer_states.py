"""The tensors that optimizers hold from step to step: they take bytes in every step, seen or not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from gradkeep.remat.tracing._tensors import has_storage

if TYPE_CHECKING:
    from torch.optim import Optimizer


class OptimizerStates:
    """The states of all optimizers that stepped since this was made."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers, with the number of parameters that had a state when they were last looked at."""
        self._bytes = 0
        _listening.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, as of when one last got an entry for another parameter."""
        return self._bytes

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages of all states, by id."""
        found = {}
        for optimizer in list(self._sizes):
            for tensor in tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, torch.Tensor) and has_storage(tensor):
                    storage = tensor.untyped_storage()
                    found[id(storage)] = storage
        return found

    def _look(self, optimizer: Optimizer) -> None:
        if self._sizes.get(optimizer) != len(optimizer.state):
            self._sizes[optimizer] = len(optimizer.state)
            self._bytes = sum(storage.nbytes() for storage in self.storages().values())


_listening: weakref.WeakSet[OptimizerStates] = weakref.WeakSet()


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for states in list(_listening):
        states._look(optimizer)


# Once and for good: hooks that come and go disturb optimizers that step in other threads meanwhile.
register_optimizer_step_post_hook(_stepped)
