"""Prepare a model for replay: its mode, precision, compiled and checkpointed parts, and weights.

16-bit weights are widened, and offloaded ones loaded, when an operation needs them: each such parameter is
replaced by a `LazyParameter` of its shape that holds one number, so no second model is held in memory.
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
"""Dtypes with too few digits for exact gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """Loads a weight in the dtype and on the device that it is computed with."""

    load: Callable[[], torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def value(self) -> torch.Tensor:
        """Return the weight as it is computed with."""
        with torch.no_grad():
            return self.load().detach().to(self.device, self.dtype)


class LazyParameter(nn.Parameter):
    """A parameter that holds only a shape; every operation gets the weight from its source."""

    source: WeightSource

    @staticmethod
    def of(source: WeightSource, shape: torch.Size, *, trained: bool) -> LazyParameter:
        """Create an autograd leaf for a weight."""
        # NaN: operations that are not intercepted must not see a plausible weight.
        nothing = torch.full((), torch.nan, dtype=source.dtype, device=source.device)
        parameter = torch.Tensor._make_subclass(LazyParameter, nothing.expand(shape), trained)
        parameter.source = source
        return parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = (args, dict(kwargs or {}))
        if func is torch.autograd.grad:
            # By edges: checkpointed parts of the model run again in the backward pass, and need
            # lazy parameters then.
            with torch._C.DisableTorchFunctionSubclass():
                inputs = tree_map_only(LazyParameter, get_gradient_edge, inputs)
            return torch.autograd.grad(*inputs[0], **inputs[1])
        if func in _SHAPE_FUNCTIONS or getattr(func, "__self__", None) in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*inputs[0], **inputs[1])
        with torch._C.DisableTorchFunctionSubclass(), contextlib.ExitStack() as stack:
            weights = _OperationWeights()
            used = tree_map_only(LazyParameter, weights.weight, inputs)
            if torch.is_grad_enabled():
                stack.enter_context(weights.saved())
            return func(*used[0], **used[1])


_PROPERTIES = {
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if type(getattr(torch.Tensor, name)).__name__ in ("getset_descriptor", "property")
    and name not in ("T", "mT", "H", "mH", "data", "real", "imag")
}
"""Properties that need no weight: shape, dtype, device, gradient."""
_SHAPE_FUNCTIONS = {
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


class _FetchWeight(torch.autograd.Function):
    """Return the weight as a function of the lazy parameter, which gets its gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, source: WeightSource) -> torch.Tensor:
        return source.value()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _OperationWeights:
    """The weights of one operation."""

    def __init__(self) -> None:
        self._sources: dict[int, WeightSource] = {}

    def weight(self, parameter: LazyParameter) -> torch.Tensor:
        source = parameter.source
        tensor: torch.Tensor
        if parameter.requires_grad and torch.is_grad_enabled():
            tensor = _FetchWeight.apply(parameter, source)  # type: ignore[no-untyped-call]
        else:
            tensor = source.value()
        if tensor.numel():
            self._sources[tensor.untyped_storage().data_ptr()] = source
        return tensor

    def saved(self) -> contextlib.AbstractContextManager[Any]:
        """Make autograd save the sources of weights instead of weights."""
        # Hooks of a caller, such as checkpointing, still apply to all other tensors.
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
            tensor: torch.Tensor = around[1](source)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def stored_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as the model's owner stores it."""
    return weight.source.load() if isinstance(weight, LazyParameter) else weight


@contextlib.contextmanager
def lazy_parameters(
    model: nn.Module, sources: Mapping[nn.Parameter, WeightSource]
) -> Iterator[None]:
    """Replace these parameters by lazy ones until the block ends, and widen 16-bit buffers.

    Parameters with one source get one lazy parameter: they are tied.
    """
    lazy: dict[WeightSource, LazyParameter] = {}
    with contextlib.ExitStack() as stack:
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is None or parameter not in sources:
                    continue
                source = sources[parameter]
                if source not in lazy:
                    lazy[source] = LazyParameter.of(
                        source, parameter.shape, trained=parameter.requires_grad
                    )
                stack.callback(setattr, module, name, parameter)
                setattr(module, name, lazy[source])
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.dtype in LOW and not buffer.is_meta:
                    stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.float()
        yield


def on_device(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap a function so that its inputs are moved to a device first."""

    @functools.wraps(forward)
    def moved(*args: Any, **kwargs: Any) -> Any:
        inputs = (args, kwargs)
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and leaf.device != device, inputs):
            inputs = tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), inputs)
        return forward(*inputs[0], **inputs[1])

    return moved


@contextlib.contextmanager
def full_precision_weights(model: nn.Module) -> Iterator[list[str]]:
    """Give the model all weights in full precision and on their device, one at a time, within the block.

    Yields notes for the user. Operations widen 16-bit weights and load offloaded ones; other models stay
    unchanged. Everything is restored afterwards.
    """
    sources = _offloaded(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, LazyParameter):
            yield []  # an outer block did this
            return
        if parameter not in sources and parameter.is_meta:
            raise CaptureError(
                f"the model's weights are not loaded: {name} is on the meta device",
                code="capture.weights_not_loaded",
                fix="Load them first: from_pretrained(folder), or to_empty(device=) and load_state_dict.",
            )
        is_plain = type(parameter) in (nn.Parameter, torch.Tensor)  # not a quantized one
        if parameter not in sources and parameter.dtype in LOW and is_plain:
            load = functools.partial(torch.Tensor.detach, parameter)
            sources[parameter] = WeightSource(load, torch.float32, parameter.device)
    if not sources:
        yield []
        return
    low = sorted({str(p.dtype).removeprefix("torch.") for p in sources if p.dtype in LOW})
    note = (
        f"weights in {' and '.join(low)} were computed with as float32, layer by layer: these are "
        "the gradients of model.float()"
    )
    with _own_forward(model), lazy_parameters(model, sources):
        hook = model.register_forward_pre_hook(_widened, with_kwargs=True)
        try:
            yield [note] if low else []
        finally:
            hook.remove()


def _widened(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Widen 16-bit inputs to float32."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in LOW else tensor

    inputs: tuple[Any, Any] = tree_map_only(torch.Tensor, wide, (args, kwargs))
    return inputs


def check_recomputable(model: nn.Module) -> None:
    """Raise if activations cannot be evicted and recomputed, as a budget by fraction does."""
    if any(isinstance(parameter, LazyParameter) for parameter in model.parameters()):
        raise CaptureError(
            "a memory budget by fraction does not work with 16-bit or offloaded weights",
            code="capture.fraction_needs_float32",
            fix="Give the budget in bytes, such as memory_budget='2GiB', or capture model.float().",
        )


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks around a module's forward."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def _offloading(module: nn.Module) -> Any:
    """Return the hook that loads a module's weights before it runs, if any."""
    for hook in _hooks(module):
        if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
            return hook
    return None


def execution_device(model: nn.Module) -> torch.device | None:
    """Return the device that a model with offloaded weights computes on."""
    for module in model.modules():
        for hook in _hooks(module):
            device = getattr(hook, "execution_device", None)
            if device is not None and str(device) != "meta":
                return torch.device(device)
    return None


def _offloaded(model: nn.Module) -> dict[nn.Parameter, WeightSource]:
    """Return the sources of all weights that hooks load; tied weights share a source."""
    sources: dict[nn.Parameter, WeightSource] = {}
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
            load: Any = functools.partial(operator.getitem, hook.weights_map, name)
            source = WeightSource(load, dtype, device)
            if value.device.type != "meta" and not _is_mapped(hook, value):
                place = (value.data_ptr(), value.shape, value.stride(), device)
                source = places.setdefault(place, source)
            sources[parameter] = source
    _tie(model, sources)
    return sources


def _is_mapped(hook: Any, value: torch.Tensor) -> bool:
    """Return True if a weight is read from a file, so that its address changes each time."""
    dataset = getattr(hook.weights_map, "dataset", hook.weights_map)
    held = getattr(dataset, "state_dict", dataset)
    return not (hasattr(held, "values") and any(one is value for one in held.values()))


def _tie(model: Any, sources: dict[nn.Parameter, WeightSource]) -> None:
    """Share the source of a tied embedding and head, which files do not mark."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if not tied or not hasattr(model, "get_output_embeddings"):
        return
    low, high = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(low, "weight", None) in sources and getattr(high, "weight", None) in sources:
        sources[high.weight] = sources[low.weight]


@contextlib.contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Remove the hooks that load weights; inputs are still moved to the module's device."""
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
"""Behavior of dropout and batch normalization during replay."""
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: Mode | None) -> Iterator[None]:
    """Put the model in a mode until the block ends; then restore every module.

    Without a mode, a model in train mode is accepted only if that changes nothing.
    """
    _check_precision(model)
    if mode is not None and (not isinstance(mode, str) or mode not in ("eval", "train")):
        raise CaptureError(
            "mode must be 'eval' or 'train'", code="argument.invalid", found=repr(mode)
        )
    flags = {module: module.training for module in model.modules()}
    try:
        if mode is not None:
            model.train(mode == "train")
        _check_training(model, chosen=mode is not None)
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def has_active_dropout(model: nn.Module) -> bool:
    """Return True if two passes over the same samples differ, as with dropout in train mode."""
    return any(module.training and _uses_dropout(module) for module in model.modules())


def has_modes(model: nn.Module) -> bool:
    """Return True if train and eval mode differ: the model has dropout or batch normalization."""
    return any(isinstance(m, _BATCH_NORMS) or _uses_dropout(m) for m in model.modules())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters, or its execution device if they are offloaded."""
    for parameter in model.parameters():
        return (execution_device(model) if parameter.is_meta else None) or parameter.device
    raise CaptureError("the model has no parameters", code="capture.no_parameters")


def _check_training(model: nn.Module, *, chosen: bool) -> None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BATCH_NORMS):
            raise CaptureError(
                f"layer {name} is in train mode and normalizes with the statistics of the batch",
                code="capture.batch_statistics",
                fix="Call model.eval() first, or pass mode='eval'.",
            )
        if not chosen and _uses_dropout(module):
            raise CaptureError(
                f"layer {name} is in train mode, so the gradients would be random",
                code="capture.random_model",
                fix="Pass mode='eval', or mode='train' to store the gradients of random passes.",
            )


def _uses_dropout(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


def _check_precision(model: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not kinds:
        raise CaptureError(
            "the model has no trainable parameter",
            code="capture.no_trainable_parameter",
            fix="Set requires_grad=True.",
        )
    low = kinds - {torch.float32, torch.float64}
    if low:
        raise CaptureError(
            f"{', '.join(sorted(str(kind) for kind in low))} has too few digits for exact gradients",
            code="capture.low_precision",
            fix="Capture model.float(); stored gradients may have 16 bits: encoding='bfloat16'.",
        )


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that was passed to `torch.compile`, whose layers have their original names."""
    own = getattr(model, "_orig_mod", None)
    return own if isinstance(own, torch.nn.Module) else model


@contextlib.contextmanager
def ready(model: nn.Module) -> Iterator[list[str]]:
    """Prepare the model for replay until the block ends; yields notes for the user.

    Compiled parts run eagerly, since hooks need their layers. Parts under `torch.utils.checkpoint` run
    without re-entering autograd, with the same numbers. Weights have full precision. Other threads that
    use the same model wait, since hooks would see the passes of both.
    """
    with _locks_guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock, contextlib.ExitStack() as stack:
        stack.enter_context(_eager_mode())
        yield stack.enter_context(full_precision_weights(model))


class _NonReentrantCheckpoint:
    """Replaces torch's re-entrant checkpoint, which hides its layers from autograd."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@dataclass(slots=True)
class _EagerState:
    """Changes to torch itself, and the number of threads that use them; the last one restores torch."""

    users: int = 0
    switched: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    eager: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_eager_state = _EagerState()
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextlib.contextmanager
def _eager_mode() -> Iterator[None]:
    """Run compiled code eagerly, and checkpoints without re-entering, while any thread needs it."""
    with _eager_state.lock:
        if not _eager_state.users:
            hidden = checkpointing.CheckpointFunction
            checkpointing.CheckpointFunction = _NonReentrantCheckpoint  # type: ignore[assignment, misc]
            _eager_state.switched.callback(setattr, checkpointing, "CheckpointFunction", hidden)
        if "torch._dynamo" in sys.modules and not _eager_state.eager:  # else nothing was compiled
            _eager_state.switched.enter_context(torch.compiler.set_stance("force_eager"))
            _eager_state.eager = True
        _eager_state.users += 1
    try:
        yield
    finally:
        with _eager_state.lock:
            _eager_state.users -= 1
            if not _eager_state.users:
                _eager_state.switched.close()
                _eager_state.eager = False


@contextlib.contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, up to 256 MiB of them, at the end of the block."""
    free_bytes, copies = 256 << 20, []
    for buffer in model.buffers():
        free_bytes -= buffer.nbytes
        if free_bytes >= 0 and not buffer.is_meta and not buffer.is_inference():
            copies.append((buffer, buffer._version, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, before in copies:
                if buffer._version != version:
                    buffer.copy_(before)


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in double precision; restore parameters and buffers afterwards."""
    parameters = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype == torch.float32
    ]
    try:
        for parameter, data in parameters:
            parameter.data = data.double()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextlib.contextmanager
def moved_to(model: nn.Module, device: str | torch.device | None) -> Iterator[None]:
    """Move the model to a device within the block, and back afterwards; None leaves it."""
    if device is None:
        yield
        return
    before = device_of(model)
    try:
        model.to(torch.device(device))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise CaptureError(
            f"device {device} cannot be used: {str(error).splitlines()[0]}", code="capture.device"
        ) from error
    try:
        yield
    finally:
        model.to(before)
