"""Models whose weights are not as a capture needs them: in 16 bits, or offloaded and fetched by hooks."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gradkeep.capturing._stand_ins import (
    LOW,
    StandIn,
    WeightSource,
    is_plain,
    on_device,
    standing_in,
)
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def weights_at_hand(model: nn.Module) -> Iterator[list[str]]:
    """The model with all weights in full precision and where they are computed with, one at a time.

    Gives notes about what was done. 16-bit weights are widened, offloaded ones fetched, by the
    operation; a model that has neither is left alone. Afterwards everything is as it was.
    """
    hooked = _offloaded(model)
    sources: dict[nn.Parameter, WeightSource] = {}
    for parameter in model.parameters():
        if isinstance(parameter, StandIn):
            yield []  # it is at hand already
            return
        if parameter in hooked:
            sources[parameter] = hooked[parameter]
        elif parameter.is_meta:
            raise _nowhere(model, parameter)
        elif parameter.dtype in LOW and is_plain(parameter):
            sources[parameter] = WeightSource(
                functools.partial(_itself, parameter), torch.float32, parameter.device
            )
    if not sources:
        yield []
        return
    with _own_forward(model), standing_in(model, sources):
        hook = model.register_forward_pre_hook(_widened, with_kwargs=True)
        try:
            yield _notes(model, sources)
        finally:
            hook.remove()


def _widened(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Inputs of 16 bits as wide as the weights are computed with."""
    del module

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in LOW else tensor

    found: tuple[Any, Any] = tree_map_only(torch.Tensor, wide, (args, kwargs))
    return found


def _itself(parameter: nn.Parameter) -> torch.Tensor:
    return parameter


def _looked_up(kept: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return kept[name]


def _notes(model: nn.Module, sources: dict[nn.Parameter, WeightSource]) -> list[str]:
    low = sorted({str(p.dtype).removeprefix("torch.") for p in sources if p.dtype in LOW})
    notes = []
    if low:
        notes.append(
            f"weights in {' and '.join(low)} were computed with as float32, layer by layer: these "
            "are the gradients of model.float()"
        )
    return notes


def check_recomputable(model: nn.Module) -> None:
    """Raise if activations cannot be dropped and made again, as a budget by fraction does it."""
    if any(isinstance(parameter, StandIn) for parameter in model.parameters()):
        raise CaptureError(
            "a memory budget by fraction needs weights as they are computed with",
            found="weights in 16 bits, or offloaded ones",
            expected="float32 or float64 weights in the model",
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
            source = WeightSource(
                functools.partial(_looked_up, hook.weights_map, name), dtype, device
            )
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


def _nowhere(model: nn.Module, parameter: nn.Parameter) -> CaptureError:
    name = next(name for name, own in model.named_parameters() if own is parameter)
    return CaptureError(
        "the model's weights are not loaded",
        found=f"{name} on the meta device, and nothing that would fetch it",
        expected="weights, or accelerate's hooks that fetch them",
        fix="load the weights first: from_pretrained(folder), or model.to_empty(device=...) and "
        "load_state_dict",
    )
