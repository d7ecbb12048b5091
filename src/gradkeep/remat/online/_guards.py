"""Guards for accesses to a tensor's bytes that do not pass the dispatcher of the runtime's thread.

Methods such as `.numpy()` bring a tensor back first. A thread started inside a runtime runs inside it
too. A backward pass in any other thread, through leaves that a runtime has seen, ends its evictions.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from gradkeep.remat._tensors import has_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradkeep.remat.online._runtime import OnlineRuntime

GUARDED = (
    "numpy",
    "tolist",
    "data_ptr",
    "storage",
    "_typed_storage",
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "share_memory_",
)
_active: list[OnlineRuntime] = []
_plain: list[tuple[Any, str, Any]] = []


def install_guards(online: OnlineRuntime) -> None:
    """Patch the guarded functions so that they notify the runtime first."""
    if not _active:
        for name in GUARDED:
            _replace(torch.Tensor, name, _guarded_method)
        for name in ("backward", "grad"):
            _replace(torch.autograd, name, _guarded_backward)
        _replace(threading.Thread, "start", _guarded_start)
    _active.append(online)


def remove_guards(online: OnlineRuntime) -> None:
    """Restore the original functions when no runtime is active."""
    _active.remove(online)
    while not _active and _plain:
        owner, name, plain = _plain.pop()
        setattr(owner, name, plain)


def _replace(owner: Any, name: str, guard: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name)
    _plain.append((owner, name, plain))
    setattr(owner, name, functools.wraps(plain)(guard(plain)))


def _guarded_method(plain: Any) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.nn.parameter.is_lazy(self) and has_storage(self):
            for online in _active:
                online.bring_back(self)
        return plain(self, *args, **kwargs)

    return method


def _guarded_start(plain: Any) -> Any:
    def start(self: threading.Thread) -> Any:
        inside = [mode for mode in _get_current_dispatch_mode_stack() if mode in _active]
        if inside:
            run = self.run
            self.run = functools.partial(_run_inside, inside, run)  # type: ignore[method-assign]
        return plain(self)

    return start


def _run_inside(runtimes: list[OnlineRuntime], run: Callable[[], None]) -> None:
    for online in runtimes:
        _push_mode(online)
    try:
        run()
    finally:
        for _ in runtimes:
            _pop_mode()


def _guarded_backward(plain: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        inside = _get_current_dispatch_mode_stack()
        outside = [online for online in _active if online not in inside]
        if outside:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            leaves = _leaves(root for root in roots if isinstance(root, torch.Tensor))
            for online in outside:
                if online.has_seen(leaves):
                    online.stop_evicting("a backward pass runs in a thread outside the budget")
        return plain(tensors, *args, **kwargs)

    return backward


def _leaves(roots: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the leaves below some tensors."""
    leaves: set[int] = set()
    stack: list[Any] = []
    for root in roots:
        if root.grad_fn is None:
            leaves.add(id(root))
        else:
            stack.append(root.grad_fn)
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        fresh = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= fresh
        stack += fresh
    return leaves
