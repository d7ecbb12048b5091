"""The shapes of a batch, seen where the first module of a step is called.

Many models save a weight first, of the same shape whatever the batch is: the shapes of what the modules
are called with tell batches apart before anything is dropped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from gradkeep.remat.tracing._tensors import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

_task = torch._C._current_graph_task_id
Shapes = tuple[tuple[int, ...], ...]


def _named_arguments(module: torch.nn.Module) -> dict[str, Any]:
    """The keyword arguments of the call of a module whose global hooks run, which torch does not pass on.

    They are read from the frame that calls the hooks; empty if torch has none that looks like it.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        found = frame.f_locals
        if found.get("self") is module and isinstance(found.get("kwargs"), dict):
            named: dict[str, Any] = found["kwargs"]
            return named
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


_FRAMES = 6
"""How far away that frame may be: the compiler's wrapper lies between."""


class BatchShapes:
    """Shapes of the tensors that the first module of a forward pass is called with."""

    def __init__(
        self,
        backward_began: Callable[[], bool],
        callback: Callable[[tuple[torch.nn.Module, ...]], None],
    ) -> None:
        self.shapes: Shapes = ()
        self.outer: list[torch.nn.Module] = []
        """Modules that were called before, without tensors."""
        self._backward_began = backward_began
        self._callback = callback
        self._fresh = True
        self._handle: Any = None

    def open(self) -> None:
        """Watch calls of modules."""
        self._handle = register_module_forward_pre_hook(not_compiled(self._called))

    def close(self) -> None:
        """Watch no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin(self) -> None:
        """Take the shapes of the next call: a step is over."""
        self.shapes, self._fresh = (), True
        self.outer.clear()

    def _called(self, module: Any, args: tuple[Any, ...]) -> None:
        # Without gradients nothing is saved; inside a backward pass a checkpoint runs again.
        if not (self._fresh or self._backward_began()):
            return
        if _task() != -1 or not torch.is_grad_enabled():
            return
        leaves = tree_leaves((args, _named_arguments(module)))
        found = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if found:
            self.shapes, self._fresh = found, False
            running = (*self.outer, module)
            self.outer.clear()
            self._callback(running)
        else:
            self.outer.append(module)
