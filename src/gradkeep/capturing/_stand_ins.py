"""Weights that are made when they are needed: 16-bit ones widened, offloaded ones fetched.

While a model is replayed, each such parameter has a stand-in of its shape that holds one number. What
is computed with it is computed with the weight, in full precision; the weight is let go as soon as the
operation is done, and made again where the backward pass needs it. No second model is held.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_any, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOW = (torch.bfloat16, torch.float16)
"""Types with too few digits for exact gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """Where a weight is kept, and as what it is computed with."""

    kept: Callable[[], torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def value(self) -> torch.Tensor:
        """The weight as it is computed with; made anew each time, if it is kept otherwise."""
        with torch.no_grad():
            return self.kept().detach().to(self.device, self.dtype)


class StandIn(nn.Parameter):
    """A parameter of which only the shape is held; every operation is given the weight itself."""

    source: WeightSource

    @staticmethod
    def of(source: WeightSource, shape: torch.Size, *, trained: bool) -> StandIn:
        """A leaf of autograd that stands for a weight."""
        # Not a number: what gets past the operations below must not look like a weight.
        nothing = torch.full((), torch.nan, dtype=source.dtype, device=source.device)
        made = torch.Tensor._make_subclass(StandIn, nothing.expand(shape), trained)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        if func is torch.autograd.grad:
            # By edges, since no stand-in may be without its weight while a backward pass runs:
            # checkpointed parts of the model run again in it.
            with torch._C.DisableTorchFunctionSubclass():
                given = tree_map_only(StandIn, get_gradient_edge, given)
            return torch.autograd.grad(*given[0], **given[1])
        if func in _SAID_BY_ITSELF or getattr(func, "__self__", None) in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*given[0], **given[1])
        with torch._C.DisableTorchFunctionSubclass(), contextlib.ExitStack() as stack:
            made = _Made()
            used = tree_map_only(StandIn, made.weight, given)
            if torch.is_grad_enabled():
                stack.enter_context(made.saved())
            return func(*used[0], **used[1])


_PROPERTIES = {
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if type(getattr(torch.Tensor, name)).__name__ in ("getset_descriptor", "property")
    and name not in ("T", "mT", "H", "mH", "data", "real", "imag")
}
"""Of which the stand-in itself can tell: its shape, type, place, gradient."""
_SAID_BY_ITSELF = {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    *(
        getattr(torch.Tensor, name)
        for name in (
            *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
            *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
            *("__hash__", "__len__", "requires_grad_", "register_hook", "data_ptr", "get_device"),
            *("untyped_storage", "_is_view", "is_shared", "is_pinned"),
        )
    ),
}


class _Fetched(torch.autograd.Function):
    """The weight as the stand-in's child: the gradient goes back to the stand-in as it is."""

    @staticmethod
    def forward(ctx: Any, standing: torch.Tensor, source: WeightSource) -> torch.Tensor:
        return source.value()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Made:
    """The weights of one operation."""

    def __init__(self) -> None:
        self._sources: dict[int, WeightSource] = {}

    def weight(self, standing: StandIn) -> torch.Tensor:
        source = standing.source
        tensor: torch.Tensor
        if standing.requires_grad and torch.is_grad_enabled():
            tensor = _Fetched.apply(standing, source)  # type: ignore[no-untyped-call]
        else:
            tensor = source.value()
        if tensor.numel():
            self._sources[tensor.untyped_storage().data_ptr()] = source
        return tensor

    def saved(self) -> contextlib.AbstractContextManager[Any]:
        """Autograd keeps where weights come from; all else as it would have."""
        around = _hooks_around()
        sources = self._sources

        def pack(tensor: torch.Tensor) -> Any:
            source = sources.get(tensor.untyped_storage().data_ptr())
            if source is None:
                return tensor if around is None else (around[0](tensor), None)
            place = (tensor.size(), tensor.stride(), tensor.storage_offset())
            return source, place

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            source, place = packed
            if isinstance(source, WeightSource) and place is not None:
                return source.value().as_strided(*place)
            assert around is not None
            found: torch.Tensor = around[1](source)
            return found

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _hooks_around() -> tuple[Any, Any] | None:
    """What a caller does with the tensors that autograd saves: checkpointing, measuring."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Any, Any] | None = None if top is None else top(False)
    return found


def kept_value(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the model's owner keeps it, where a stand-in stands for it."""
    return weight.source.kept() if isinstance(weight, StandIn) else weight


@contextlib.contextmanager
def standing_in(model: nn.Module, sources: Mapping[nn.Parameter, WeightSource]) -> Iterator[None]:
    """Stand-ins in place of these parameters until the block ends, and wide buffers for 16-bit ones.

    Parameters with one source get one stand-in: they are tied.
    """
    made: dict[WeightSource, StandIn] = {}
    with contextlib.ExitStack() as stack:
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is None or parameter not in sources:
                    continue
                source = sources[parameter]
                if source not in made:
                    made[source] = StandIn.of(
                        source, parameter.shape, trained=parameter.requires_grad
                    )
                stack.callback(setattr, module, name, parameter)
                setattr(module, name, made[source])
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.dtype in LOW and not buffer.is_meta:
                    stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.float()
        yield


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter is torch's own, not a quantised or distributed one that does more."""
    return type(parameter) in (nn.Parameter, torch.Tensor)


def on_device(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The same function with its inputs moved to a device first."""

    @functools.wraps(forward)
    def moved(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and leaf.device != device, given):
            given = tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), given)
        return forward(*given[0], **given[1])

    return moved
