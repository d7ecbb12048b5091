"""Track running modules, and the modules that own persistent tensors."""

from __future__ import annotations

import sys
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

from gradkeep.remat._tensors import exclude_from_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Source:
    """How to find a constant in a later step: a position among the inputs, or the tensor itself.

    A buffer or a frozen parameter must still be in its module. For a trainable parameter the autograd
    graph shows whether it is still in use.
    """

    position: int = -1
    tensor: weakref.ref[Any] | None = None
    module: weakref.ref[Any] | None = None
    name: str = ""

    def find(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Find the tensor; None if it is gone or was replaced."""
        if self.tensor is None:
            return inputs[self.position] if self.position < len(inputs) else None
        tensor: Tensor | None = self.tensor()
        if self.module is None or tensor is None:
            return tensor
        module = self.module()
        owned = () if module is None else (module._buffers, module._parameters)
        return tensor if any(held.get(self.name) is tensor for held in owned) else None


@dataclass(frozen=True, slots=True)
class ModuleFlag:
    """A module that ran, and its training mode."""

    kind: type[nn.Module]
    module: weakref.ref[nn.Module]
    has_tensors: bool
    """It has parameters or buffers of its own. Modules without, such as losses or slices of a `Sequential`, are
    often created in each step, so their identity does not count.
    """
    training: bool

    def matches(self, other: ModuleFlag) -> bool:
        """Return True if two steps ran the same module in the same mode."""
        if (self.kind, self.has_tensors, self.training) != (
            other.kind,
            other.has_tensors,
            other.training,
        ):
            return False
        return not self.has_tensors or self.module == other.module

    def is_current(self) -> bool:
        """Return True if the module still exists in the same mode."""
        module = self.module()
        return not self.has_tensors if module is None else module.training == self.training


class ModuleTracker:
    """Track calls of modules by global hooks while a step is recorded."""

    def __init__(self, running: Sequence[nn.Module] = ()) -> None:
        self.seen: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._stack: list[nn.Module] = []
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies of buffers from the first call of their module."""
        # The hooks then run twice for a compiled module, which is harmless.
        warnings.filterwarnings(
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        before = register_module_forward_pre_hook(exclude_from_compiler(self._enter))
        after = register_module_forward_hook(exclude_from_compiler(self._leave), always_call=True)
        self._handles: list[Any] = [before, after]
        for module in running:
            self._enter(module, ())

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def running(self) -> tuple[nn.Module, ...]:
        """Modules that were called and have not returned, outermost first."""
        return tuple(self._stack)

    @property
    def current(self) -> str:
        """Name of the innermost running module, relative to the outermost one."""
        if not self._stack:
            return ""
        module = self._stack[-1]
        if id(module) not in self._names:
            for name, part in self._stack[0].named_modules():
                self._names[id(part)] = name
        return self._names.get(id(module), type(module).__name__)

    def flags(self) -> tuple[ModuleFlag, ...]:
        """Return the flags of all modules that ran."""
        return tuple(
            ModuleFlag(type(module), weakref.ref(module), _has_tensors(module), module.training)
            for module in self.seen.values()
        )

    def parameters(self) -> tuple[weakref.ref[Parameter], ...]:
        """Return the parameters of all modules called so far and of their submodules."""
        parameters = {id(p): p for module in self.seen.values() for p in module.parameters()}
        return tuple(weakref.ref(parameter) for parameter in parameters.values())

    def changed(self) -> tuple[weakref.ref[Tensor], ...]:
        """Return the buffers that the step changed."""
        with torch._C._DisableTorchDispatch():
            return tuple(
                weakref.ref(buffer)
                for buffer, before in self._buffers.values()
                if buffer.shape != before.shape or not torch.equal(buffer, before)
            )

    def find_source(self, tensor: Tensor, inputs: dict[int, int]) -> Source | None:
        """Return how to find this tensor in a later step, or None."""
        if id(tensor) in inputs:
            return Source(inputs[id(tensor)])
        if isinstance(tensor, Parameter) and tensor.requires_grad:
            return Source(tensor=weakref.ref(tensor))
        for module in self.seen.values():
            for held in (module._buffers, module._parameters):
                for name, owned in held.items():
                    if owned is tensor:
                        return Source(-1, weakref.ref(tensor), weakref.ref(module), name)
        return None

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.seen:
            self.seen[id(module)] = module
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in self._buffers:
                    with torch._C._DisableTorchDispatch(), torch.no_grad():
                        self._buffers[id(buffer)] = (buffer, buffer.detach().clone())
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass


def _has_tensors(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in held)


_current_task = torch._C._current_graph_task_id
Shapes = tuple[tuple[int, ...], ...]


def _named_arguments(module: torch.nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of the module whose global hooks run, which torch does not pass on.

    They are read from the frame that calls the hooks; empty if no such frame is found.
    """
    frame = sys._getframe(2)
    for _ in range(6):  # there may be frames of the compiler in between
        frame_locals = frame.f_locals
        if frame_locals.get("self") is module and isinstance(frame_locals.get("kwargs"), dict):
            named: dict[str, Any] = frame_locals["kwargs"]
            return named
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


class BatchShapes:
    """Shapes of the tensors passed to the first module of a forward pass."""

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
        """Install the hook."""
        self._handle = register_module_forward_pre_hook(exclude_from_compiler(self._called))

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin(self) -> None:
        """Record the shapes of the next call, because a step ended."""
        self.shapes, self._fresh = (), True
        self.outer.clear()

    def _called(self, module: Any, args: tuple[Any, ...]) -> None:
        # Without gradients nothing is saved; inside a backward pass a checkpoint recomputes.
        if not (self._fresh or self._backward_began()):
            return
        if _current_task() != -1 or not torch.is_grad_enabled():
            return
        leaves = tree_leaves((args, _named_arguments(module)))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if shapes:
            self.shapes, self._fresh = shapes, False
            running = (*self.outer, module)
            self.outer.clear()
            self._callback(running)
        else:
            self.outer.append(module)
