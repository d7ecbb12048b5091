"""A model made ready for replay: its mode, precision, compiled and checkpointed parts, and weights.

Weights of 16 bits are widened and offloaded ones fetched when an operation needs them: each such
parameter is replaced by a stand-in of its shape that holds one number, and no second model is held.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_any, tree_map_only

from gradkeep.errors import CaptureError

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
        # Hooks of a caller, such as checkpointing, stay in place for all other tensors.
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        around = None if top is None else top(False)
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


def on_device(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The same function with its inputs moved to a device first."""

    @functools.wraps(forward)
    def moved(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and leaf.device != device, given):
            given = tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), given)
        return forward(*given[0], **given[1])

    return moved


@contextlib.contextmanager
def weights_at_hand(model: nn.Module) -> Iterator[list[str]]:
    """The model with all weights in full precision and where they are computed with, one at a time.

    Gives notes about what was done. 16-bit weights are widened, offloaded ones fetched, by the
    operation; a model that has neither is left alone. Afterwards everything is as it was.
    """
    sources = _offloaded(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StandIn):
            yield []  # it is at hand already
            return
        if parameter not in sources and parameter.is_meta:
            raise CaptureError(
                "the model's weights are not loaded",
                found=f"{name} on the meta device, and nothing that would fetch it",
                fix="load the weights first: from_pretrained(folder), or model.to_empty(device=...) "
                "and load_state_dict",
            )
        is_plain = type(parameter) in (nn.Parameter, torch.Tensor)  # not a quantised one
        if parameter not in sources and parameter.dtype in LOW and is_plain:
            kept = functools.partial(torch.Tensor.detach, parameter)
            sources[parameter] = WeightSource(kept, torch.float32, parameter.device)
    if not sources:
        yield []
        return
    low = sorted({str(p.dtype).removeprefix("torch.") for p in sources if p.dtype in LOW})
    note = (
        f"weights in {' and '.join(low)} were computed with as float32, layer by layer: these are "
        "the gradients of model.float()"
    )
    with _own_forward(model), standing_in(model, sources):
        hook = model.register_forward_pre_hook(_widened, with_kwargs=True)
        try:
            yield [note] if low else []
        finally:
            hook.remove()


def _widened(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Inputs of 16 bits as wide as the weights are computed with."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in LOW else tensor

    found: tuple[Any, Any] = tree_map_only(torch.Tensor, wide, (args, kwargs))
    return found


def check_recomputable(model: nn.Module) -> None:
    """Raise if activations cannot be dropped and made again, as a budget by fraction does it."""
    if any(isinstance(parameter, StandIn) for parameter in model.parameters()):
        raise CaptureError(
            "a memory budget by fraction needs weights as they are computed with",
            fix="give the budget in bytes, such as memory_budget='2GiB', or capture model.float()",
        )


def _hooks(module: nn.Module) -> list[Any]:
    """What accelerate runs around a module's forward."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def _offloading(module: nn.Module) -> Any:
    """The hook that fetches a module's weights before it runs, if there is one."""
    for hook in _hooks(module):
        if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
            return hook
    return None


def execution_device(model: nn.Module) -> torch.device | None:
    """Where a model computes whose weights are kept elsewhere."""
    for module in model.modules():
        for hook in _hooks(module):
            device = getattr(hook, "execution_device", None)
            if device is not None and str(device) != "meta":
                return torch.device(device)
    return None


def _offloaded(model: nn.Module) -> dict[nn.Parameter, WeightSource]:
    """The sources of all weights that hooks fetch; one source for weights that are tied."""
    found: dict[nn.Parameter, WeightSource] = {}
    places: dict[tuple[Any, ...], WeightSource] = {}
    for module in model.modules():
        hook = _offloading(module)
        if hook is None:
            continue
        device = torch.device("cpu" if hook.execution_device is None else hook.execution_device)
        for name, parameter in module.named_parameters(recurse=hook.place_submodules):
            if not parameter.is_meta or not parameter.is_floating_point():
                continue
            value = hook.weights_map[name]
            dtype = torch.float32 if parameter.dtype in LOW else parameter.dtype
            kept: Any = functools.partial(operator.getitem, hook.weights_map, name)
            source = WeightSource(kept, dtype, device)
            if value.device.type != "meta" and not _is_mapped(hook, value):
                place = (value.data_ptr(), value.shape, value.stride(), device)
                source = places.setdefault(place, source)
            found[parameter] = source
    _tie(model, found)
    return found


def _is_mapped(hook: Any, value: torch.Tensor) -> bool:
    """Whether a weight is read from a file, so that its place in memory is another each time."""
    kept = getattr(hook.weights_map, "dataset", hook.weights_map)
    held = getattr(kept, "state_dict", kept)
    return not (hasattr(held, "values") and any(one is value for one in held.values()))


def _tie(model: Any, found: dict[nn.Parameter, WeightSource]) -> None:
    """One source for an embedding and a head that are tied: files do not tell."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if not tied or not hasattr(model, "get_output_embeddings"):
        return
    low, high = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(low, "weight", None) in found and getattr(high, "weight", None) in found:
        found[high.weight] = found[low.weight]


@contextlib.contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Modules without the hooks that fetch their weights; inputs still go where they are computed."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            hook = _offloading(module)
            own = module.__dict__.get("_old_forward")
            if hook is None or own is None:
                continue
            device = torch.device("cpu" if hook.execution_device is None else hook.execution_device)
            stack.callback(module.__dict__.__setitem__, "forward", module.__dict__["forward"])
            module.__dict__["forward"] = on_device(own, device)
        yield


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
            fix="capture model.float(); what is kept may be 16 bits wide: encoding='bfloat16'",
        )


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
    with _making_locks:
        lock = _locks.setdefault(model, threading.RLock())
    with lock, contextlib.ExitStack() as stack:
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
