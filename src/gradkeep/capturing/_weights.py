"""Checkpoints: loading and fingerprints of weights, adapters and optimizer states."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep._arguments import file_path, instance, texts
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

Source = Mapping[str, torch.Tensor] | str | os.PathLike[str]
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPER = "base_model.model."
_PARTS = r"(?:lora_[A-Za-z_]+|ia3_l|vera_lambda_[bd]|modules_to_save)"
_NAMED = re.compile(rf"(?:^|\.)({_PARTS})\.([^.]+)(?:\.|$)")
_BARE = re.compile(rf"(?:^|\.){_PARTS}(?:\.(?:weight|bias))?$")
_SETTINGS = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
    *("rank_pattern", "alpha_pattern"),
)
"""Settings that change the function of a model whose adapter has the same weights."""
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "net", "weights")
_IN_FOLDERS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_COUNTER = "num_batches_tracked"
_PREFIXES = ("module.", "_orig_mod.", "model.")
_OPTIMIZER = "optimizer.pt"
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of one checkpoint, and when in training they were saved.

    Attributes:
        source: State dict, file or folder.
        step: Training step.
        lr: Learning rate at that step.
    """

    source: Source
    step: int | None = None
    lr: float | None = None


class AdapterWeights(dict[str, torch.Tensor]):
    """Weights of an adapter under their names in its file, with the settings of its folder."""

    def __init__(self, values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.settings = settings
        """Contents of `adapter_config.json`; empty without one."""


def load_weights(source: Source) -> Mapping[str, torch.Tensor]:
    """Read the state dict in a file (.pt, .bin, .safetensors) or in a folder as Hugging Face writes it.

    A folder may hold a model, in one file or in several, or a PEFT adapter. Files are read without running
    code from them.
    """
    if isinstance(source, Mapping):
        return _unwrapped(source)
    path = Path(source)
    if not path.exists():
        raise CaptureError("the checkpoint does not exist", code="capture.no_checkpoint", path=path)
    if path.is_dir():
        return _from_folder(path)
    state = _from_file(path)
    return AdapterWeights(state, _settings(path)) if path.name in _ADAPTER_FILES else state


def _from_folder(path: Path) -> Mapping[str, torch.Tensor]:
    for file in (path / name for name in (*_ADAPTER_FILES, *_IN_FOLDERS)):
        if file.exists() and file.suffix != ".json":
            return load_weights(file)
        if file.exists():
            merged: dict[str, torch.Tensor] = {}
            for part in sorted(set(json.loads(file.read_text())["weight_map"].values())):
                merged.update(load_weights(path / part))
            return merged
    raise CaptureError(
        f"the folder holds no weights: none of {', '.join((*_IN_FOLDERS, *_ADAPTER_FILES))}",
        code="capture.no_weights_in_folder",
        path=path,
    )


def _from_file(path: Path) -> Mapping[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded = _torch_load(path, "checkpoint", "torch.save(model.state_dict(), path)")
    if not isinstance(loaded, Mapping):
        raise CaptureError(
            "the checkpoint holds no state dict", code="capture.no_state_dict", path=path
        )
    return _unwrapped(loaded)


def _torch_load(path: Path, name: str, saved: str, **options: Any) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, **options)
    except Exception as error:
        raise CaptureError(
            f"the {name} cannot be read: {str(error).splitlines()[0][:200]}",
            code="capture.unreadable_checkpoint",
            path=path,
            fix=f"Save it with {saved}.",
        ) from error


def _settings(file: Path) -> dict[str, Any]:
    """Read `adapter_config.json` beside a file of weights; empty if there is none."""
    path = file.parent / "adapter_config.json"
    try:
        settings = json.loads(path.read_text()) if path.exists() else {}
        return dict(settings.items())
    except (ValueError, AttributeError) as error:
        raise CaptureError(
            f"the file is not a JSON object: {error}", code="capture.adapter_not_json", path=path
        ) from error


def _unwrapped(loaded: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    for name in _STATE_KEYS:
        inner = loaded.get(name)
        if isinstance(inner, Mapping) and any(isinstance(v, torch.Tensor) for v in inner.values()):
            return inner
    return loaded


def put_weights(model: nn.Module, state: Mapping[str, torch.Tensor], *, name: str) -> None:
    """Load a state dict whose keys must match the model's, except for a wrapper's prefix.

    Weights of an adapter alone replace those of the model's adapter; all others stay.
    """
    own = model.state_dict()
    offloaded = [key for key, value in own.items() if getattr(value, "is_meta", False)]
    if offloaded:
        raise CaptureError(
            f"checkpoint {name} cannot be loaded into offloaded weights",
            code="capture.offloaded_model",
            found=f"{len(offloaded)} offloaded weights, such as {offloaded[0]}",
            fix="Load the checkpoint before the model is offloaded, and capture one at a time.",
        )
    bare = any(_BARE.search(key) for key in state) and not any(key in own for key in state)
    if bare or isinstance(state, AdapterWeights):
        model.load_state_dict(_with_adapter(model, own, state, checkpoint=name))
        return
    known = [key for key in own if not key.endswith(_COUNTER)]
    for prefix in ("", *_PREFIXES):
        stripped = {key.removeprefix(prefix): value for key, value in state.items()}
        if len(stripped) == len(state) and any(key in stripped for key in known):
            # Old files have no batch counters, which nothing is computed from.
            state = {**{key: own[key] for key in own if key.endswith(_COUNTER)}, **stripped}
            break
    state = {**_tied_weights(own, state, checkpoint=name), **state}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = _other_shapes(own, {key: key for key in own}, state)
    if missing or unknown or shapes:
        near = difflib.get_close_matches(missing[0], unknown, n=1) if missing and unknown else []
        raise CaptureError(
            f"the weights of checkpoint {name} do not fit the model; nothing was loaded",
            code="capture.weights_do_not_fit",
            found=f"missing {missing[:4]}, unknown {unknown[:4]}, other shapes {shapes[:4]}",
            expected=f"the {len(own)} keys of model.state_dict()",
            fix=f"{near[0]} may be {missing[0]}: rename the keys." if near else None,
        )
    model.load_state_dict(dict(state))


def _other_shapes(
    own: Mapping[str, torch.Tensor], places: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> list[str]:
    return [
        f"{key} {tuple(state[key].shape)} for {tuple(own[place].shape)}"
        for key, place in places.items()
        if key in state and state[key].shape != own[place].shape
    ]


def _tied_weights(
    own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], *, checkpoint: str
) -> dict[str, torch.Tensor]:
    """Return weights that files leave out because the model has them under another name too.

    Under both names they must be equal: the model holds only one of them.
    """
    tied: dict[tuple[object, ...], list[str]] = {}
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and value.numel():
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            tied.setdefault(place, []).append(key)
    weights: dict[str, torch.Tensor] = {}
    for keys in tied.values():
        present = [key for key in keys if key in state]
        for key in present[1:]:
            if not torch.equal(state[present[0]], state[key]):
                raise CaptureError(
                    f"checkpoint {checkpoint} does not fit the model; nothing was loaded",
                    code="capture.tied_weights_differ",
                    found=f"other values for {present[0]} than for {key}, one parameter in the model",
                    fix="Untie them in the model, or load the checkpoint that belongs to it.",
                )
        if present:
            weights |= dict.fromkeys(keys, state[present[0]])
    return weights


def _with_adapter(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    *,
    checkpoint: str,
) -> dict[str, torch.Tensor]:
    """Return the model's own weights with those of its adapter replaced.

    Raises if the adapter's modules, ranks, settings or base model differ from the model's.
    """
    adapter = _adapter_name(model, own, checkpoint=checkpoint)
    if isinstance(state, AdapterWeights):
        _check_settings(model, adapter, state.settings, checkpoint)
    weights = {key.removeprefix(_WRAPPER): value for key, value in state.items()}
    places = {
        _name_in_file(key, adapter): key
        for key in own
        if any(match[2] == adapter for match in _NAMED.finditer(key))
    }
    missing = sorted(places.keys() - weights.keys())
    # Embeddings that were saved along, and biases that were trained, have the model's own names.
    plain = {key.removeprefix(_WRAPPER): key for key in own}
    places |= {key: plain[key] for key in weights.keys() - places.keys() if key in plain}
    unknown = sorted(weights.keys() - places.keys())
    shapes = _other_shapes(own, places, weights)
    if missing or unknown:
        raise CaptureError(
            f"checkpoint {checkpoint} is another adapter than the model's; nothing was loaded",
            code="capture.other_adapter",
            found=f"missing {missing[:4]}, unknown {unknown[:4]}",
            fix="Give the model an adapter with the same target_modules= and modules_to_save=.",
        )
    if shapes:
        raise CaptureError(
            f"checkpoint {checkpoint} is an adapter of another rank, or for another size; nothing was loaded",
            code="capture.adapter_shapes",
            found=f"other shapes {shapes[:4]}",
            fix="Give the model an adapter with r= as in the folder, on its base model.",
        )
    return {**own, **{place: weights[key] for key, place in places.items() if key in weights}}


def _adapter_name(model: Any, own: Mapping[str, Any], *, checkpoint: str) -> str:
    names = list(dict.fromkeys(match[2] for key in own for match in _NAMED.finditer(key)))
    if not names:
        raise CaptureError(
            f"checkpoint {checkpoint} is an adapter, but the model has none; nothing was loaded",
            code="capture.model_without_adapter",
            fix="Wrap the model first: PeftModel.from_pretrained(model, folder, is_trainable=True).",
        )
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    active = active() if callable(active) else active
    active = [active] if isinstance(active, str) else active
    if isinstance(active, list) and len(active) == 1 and active[0] in names:
        names = [str(active[0])]
    if len(names) > 1:
        raise CaptureError(
            f"checkpoint {checkpoint}: the model has several adapters; nothing was loaded",
            code="capture.several_adapters",
            found=", ".join(names),
            fix="Call model.set_adapter(name) first.",
        )
    return names[0]


def _name_in_file(key: str, adapter: str) -> str:
    """Return the name of a weight in files, which do not contain the adapter's name."""
    bare = key.removeprefix(_WRAPPER).replace(f".modules_to_save.{adapter}.", ".")
    bare = re.sub(rf"\.({_PARTS})\.{re.escape(adapter)}(?=\.|$)", r".\1", f".{bare}")[1:]
    return bare.removesuffix(".weight") if "lora_magnitude_vector" in bare else bare


def _check_settings(model: Any, adapter: str, settings: Mapping[str, Any], checkpoint: str) -> None:
    """Raise if a folder's settings contradict those of the model's adapter."""
    known = getattr(model, "peft_config", None)
    own = known.get(adapter) if isinstance(known, Mapping) else None
    if own is None or not settings:
        return
    base, own_base = settings.get("base_model_name_or_path"), own.base_model_name_or_path
    kind = (settings.get("auto_mapping") or {}).get("base_model_class")
    base_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = {parent.__name__ for parent in type(base_model).__mro__}
    names = [Path(str(name)).name for name in (base, own_base)]
    if (base and own_base and names[0] != names[1]) or (kind and kind not in kinds):
        raise CaptureError(
            f"checkpoint {checkpoint} is an adapter of another base model; nothing was loaded",
            code="capture.adapter_base",
            found=f"an adapter for {base or kind}",
            expected=f"one for {own_base or type(base_model).__name__}",
            fix="Load its base model, or correct base_model_name_or_path in adapter_config.json.",
        )
    values = {name: getattr(own, name) for name in _SETTINGS if hasattr(own, name)}
    other = [
        f"{name}={settings[name]!r} for {value!r}"
        for name, value in values.items()
        if name in settings and settings[name] != getattr(value, "value", value)
    ]
    if other:
        raise CaptureError(
            f"checkpoint {checkpoint} is an adapter with other settings; nothing was loaded",
            code="capture.adapter_options",
            found="; ".join(other),
            fix="Build the adapter with the settings in adapter_config.json.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class AdamState:
    """State of Adam at a checkpoint, by the names of the parameters that it trained.

    Attributes:
        first: `exp_avg` by parameter, in the parameter's shape.
        second: `exp_avg_sq` by parameter, in the parameter's shape, without bias correction.
        step: Number of steps taken.
        beta2: Decay rate of the second moments.
        eps: Epsilon of the optimizer.
    """

    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]
    step: int
    beta2: float
    eps: float

    def corrected(self, name: str) -> torch.Tensor:
        """Return `exp_avg_sq` over 1 - beta2^step, the square of what Adam divides by.

        Args:
            name: Name of the parameter.

        Returns:
            A tensor in the parameter's shape.
        """
        return self.second[name] / (1 - self.beta2**self.step)


def read_adam(
    source: Mapping[str, Any] | str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
) -> AdamState:
    """Read the moments of Adam by parameter.

    An optimizer numbers its parameters: by group, in the model's order. The groups may be those of
    `torch.optim.AdamW(model.parameters())`, those of transformers' Trainer (with and without weight decay), or
    those of `param_names`, if they were saved. All shapes must fit. Cost: reading the file, without running
    code from it.

    Args:
        source: `optimizer.state_dict()`, a file of it, or a Trainer's folder.
        model: Model that was trained.
        names: All parameters in the optimizer's order, for other groups.

    Returns:
        The moments by parameter name, and the step.

    Raises:
        CaptureError: The state cannot be read, has no second moments, or does not fit the model.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> adam = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> adam.step()
        >>> {name: tuple(v.shape) for name, v in read_adam(adam.state_dict(), model).second.items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    instance("model", model, nn.Module, error=CaptureError, expected="a torch.nn.Module")
    state, path = _read_optimizer(source)
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    states = {number: state["state"][number] for number in numbers if number in state["state"]}
    needed = {"exp_avg", "exp_avg_sq", "step"}
    if not states or any(not needed <= values.keys() for values in states.values()):
        some: Mapping[str, Any] = next(iter(states.values()), {})
        raise CaptureError(
            "the optimizer has no second moments",
            code="capture.no_second_moments",
            path=path,
            found=", ".join(map(str, some)) or "no state: it has not taken a step",
            expected="exp_avg, exp_avg_sq and step of every parameter, as Adam has them",
        )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    order_names = None if names is None else texts("names", names, error=CaptureError)
    orders: list[list[str]] = []
    for order in _orders(model, groups, order_names):
        fits = len(order) == len(numbers) and all(
            number not in states or tuple(states[number]["exp_avg_sq"].shape) == shapes.get(name)
            for name, number in zip(order, numbers, strict=True)
        )
        if fits and order not in orders:
            orders.append(order)
    if len(orders) != 1:
        how = "can be matched to the model in several ways" if orders else "does not fit the model"
        raise CaptureError(
            f"the state of the optimizer {how}",
            code="capture.optimizer_ambiguous" if orders else "capture.optimizer_does_not_fit",
            path=path,
            found=f"{len(numbers)} parameters in groups of {[len(g['params']) for g in groups]}",
            expected=f"the {len(shapes)} parameters of {type(model).__name__}, or those it trains",
            fix="Pass the model of that training; if its parameters are grouped "
            "differently, pass names= in the optimizer's order.",
        )
    pairs = zip(orders[0], numbers, strict=True)
    by_name = {name: states[number] for name, number in pairs if number in states}
    return AdamState(
        first={name: values["exp_avg"] for name, values in by_name.items()},
        second={name: values["exp_avg_sq"] for name, values in by_name.items()},
        step=max(int(values["step"]) for values in by_name.values()),
        beta2=float(groups[0]["betas"][1]),
        eps=float(groups[0]["eps"]),
    )


def _read_optimizer(source: Any) -> tuple[Mapping[str, Any], Path | None]:
    path: Path | None = None
    state = source
    if not isinstance(source, Mapping):
        path = Path(file_path("source", source, error=CaptureError))
        path = path / _OPTIMIZER if path.is_dir() else path
        if not path.exists():
            raise CaptureError(
                "there is no saved optimizer",
                code="capture.no_optimizer",
                path=path,
                fix="Train without save_only_model=True, or save optimizer.state_dict() yourself.",
            )
        saved = "torch.save(optimizer.state_dict(), path)"
        state = _torch_load(path, "state of the optimizer", saved, mmap=True)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CaptureError(
            "this is not optimizer.state_dict()", code="capture.not_an_optimizer", path=path
        )
    return state, path


def _orders(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], names_in_order: tuple[str, ...] | None
) -> Iterator[list[str]]:
    """Yield orders in which an optimizer with such groups may have numbered the parameters."""
    if names_in_order is not None:
        yield list(names_in_order)
        return
    if all("param_names" in group for group in groups):
        yield [name for group in groups for name in group["param_names"]]
        return
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    adapter = [name for name in parameters if _NAMED.search(name)]
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    # Parameters without weight decay: biases and norms, as in transformers' Trainer; or all vectors.
    trainer = {
        name
        for name in parameters
        if _UNDECAYED.search(name.lower()) or name.rpartition(".")[0] in norms
    }
    vectors = {name for name, parameter in parameters.items() if parameter.dim() < 2}
    for names in (trained, list(parameters), adapter):
        if len(groups) == 1:
            yield names
        for undecayed in (trainer, vectors) if len(groups) == 2 else ():
            parts = [[n for n in names if (n in undecayed) == last] for last in (False, True)]
            if [len(part) for part in parts] == [len(group["params"]) for group in groups]:
                yield [*parts[0], *parts[1]]
