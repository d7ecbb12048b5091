"""Checkpoints: weights, adapters and optimizer states, how they are loaded, and their fingerprint."""

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
import xxhash
from torch import nn

from gradkeep._arguments import file_path, instance, texts
from gradkeep.capturing._readiness import kept_value
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator


CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPER = "base_model.model."
_PARTS = r"(?:lora_[A-Za-z_]+|ia3_l|vera_lambda_[bd]|modules_to_save)"
_NAMED = re.compile(rf"(?:^|\.)({_PARTS})\.([^.]+)(?:\.|$)")
_BARE = re.compile(rf"(?:^|\.){_PARTS}(?:\.(?:weight|bias))?$")
_SETTINGS = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
    *("rank_pattern", "alpha_pattern"),
)
"""What changes the function of a model whose adapter has the same weights."""


class AdapterWeights(dict[str, torch.Tensor]):
    """The weights of an adapter under their names in its file, with what its folder says of it."""

    def __init__(self, values: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.settings = dict(settings)
        """The contents of `adapter_config.json`; empty where there is none."""


def adapter_file(folder: Path) -> Path | None:
    """The file with an adapter's weights in a folder, if it is an adapter's folder."""
    found = [folder / name for name in _FILES if (folder / name).exists()]
    return found[0] if found else None


def adapter_settings(file: Path) -> dict[str, Any]:
    """What stands in `adapter_config.json` beside a file of weights; empty if there is none."""
    path = file.parent / CONFIG
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise CaptureError("this is no JSON", path=path, found=str(error)[:200]) from error
    if not isinstance(settings, dict):
        raise CaptureError("no settings of an adapter", path=path, found=type(settings).__name__)
    return settings


def is_adapter_file(path: Path) -> bool:
    """Whether a file is named as those of adapters are."""
    return path.name in _FILES


def is_adapter(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> bool:
    """Whether weights are those of an adapter alone, under names without the adapter's."""
    if isinstance(state, AdapterWeights):
        return True
    return any(_BARE.search(key) for key in state) and not any(key in own for key in state)


def whole_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, checkpoint: str
) -> dict[str, torch.Tensor]:
    """The model's own weights with those of its adapter replaced.

    Raises where the adapter's modules, ranks, settings or base model are others than the model's.
    """
    own = model.state_dict()
    adapter = _adapter_of(model, own, checkpoint=checkpoint)
    settings = state.settings if isinstance(state, AdapterWeights) else {}
    _check_settings(model, adapter, settings, checkpoint=checkpoint)
    given = {key.removeprefix(_WRAPPER): value for key, value in state.items()}
    places = {_name_in_file(key, adapter): key for key in own if _belongs(key, adapter)}
    missing = sorted(places.keys() - given.keys())
    # Embeddings that were saved along, and biases that were trained, have the model's own names.
    plain = {key.removeprefix(_WRAPPER): key for key in own}
    places |= {key: plain[key] for key in given.keys() - places.keys() if key in plain}
    unknown = sorted(given.keys() - places.keys())
    shapes = [
        f"{key} {tuple(given[key].shape)} for {tuple(own[place].shape)}"
        for key, place in places.items()
        if key in given and given[key].shape != own[place].shape
    ]
    if missing or unknown:
        raise _refused(
            checkpoint,
            "another adapter than the model's",
            found=f"missing {missing[:4]}, unknown {unknown[:4]}",
            expected=f"the {len(places)} weights of the model's adapter {adapter!r}",
            fix="give the model an adapter of the same kind and for the same modules "
            "(target_modules=, modules_to_save=, use_dora=)",
        )
    if shapes:
        raise _refused(
            checkpoint,
            "an adapter of another rank, or for a base model of another size",
            found=f"other shapes {shapes[:4]}",
            expected="the shapes of the model's adapter",
            fix="give the model an adapter with r= as in the folder, on the base model it was "
            "trained on",
        )
    return {**own, **{place: given[key] for key, place in places.items() if key in given}}


def _adapter_of(model: Any, own: Mapping[str, Any], *, checkpoint: str) -> str:
    names: dict[str, None] = dict.fromkeys(
        match[2] for key in own for match in _NAMED.finditer(key)
    )
    if not names:
        raise CaptureError(
            f"checkpoint {checkpoint} is an adapter, but the model has none; nothing was loaded",
            found=type(model).__name__,
            expected="a model with an adapter of the same kind",
            fix="wrap the base model first: PeftModel.from_pretrained(model, folder, "
            "is_trainable=True)",
        )
    if len(names) == 1:
        return next(iter(names))
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    active = active() if callable(active) else active
    active = [active] if isinstance(active, str) else active
    if isinstance(active, list) and len(active) == 1 and active[0] in names:
        return str(active[0])
    raise CaptureError(
        f"checkpoint {checkpoint}: the model has several adapters; nothing was loaded",
        found=", ".join(names),
        expected="one adapter, or one that is active",
        fix="call model.set_adapter(name) first",
    )


def _belongs(key: str, adapter: str) -> bool:
    return any(match[2] == adapter for match in _NAMED.finditer(key))


def _name_in_file(key: str, adapter: str) -> str:
    """How a weight of the model is called in files, which do not name the adapter."""
    bare = key.removeprefix(_WRAPPER).replace(f".modules_to_save.{adapter}.", ".")
    bare = re.sub(rf"\.({_PARTS})\.{re.escape(adapter)}(?=\.|$)", r".\1", f".{bare}")[1:]
    return bare.removesuffix(".weight") if "lora_magnitude_vector" in bare else bare


def _check_settings(model: Any, adapter: str, given: Mapping[str, Any], *, checkpoint: str) -> None:
    """Raise where a folder's settings contradict those of the model's adapter, if it has any."""
    known = getattr(model, "peft_config", None)
    own = known.get(adapter) if isinstance(known, Mapping) else None
    if own is None or not given:
        return
    base, wanted = given.get("base_model_name_or_path"), own.base_model_name_or_path
    kind = (given.get("auto_mapping") or {}).get("base_model_class")
    base_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = {parent.__name__ for parent in type(base_model).__mro__}
    names = [os.path.basename(str(name).rstrip("/")) for name in (base, wanted)]
    if (base and wanted and names[0] != names[1]) or (kind and kind not in kinds):
        raise _refused(
            checkpoint,
            "an adapter of another base model",
            found=f"an adapter for {base or kind}",
            expected=f"one for {wanted or type(base_model).__name__}",
            fix="load the base model that it was trained on; if that has only moved, say so under "
            "base_model_name_or_path in adapter_config.json",
        )
    other = [
        f"{name}={given[name]!r} for {_plain(getattr(own, name))!r}"
        for name in _SETTINGS
        if name in given and hasattr(own, name) and given[name] != _plain(getattr(own, name))
    ]
    if other:
        raise _refused(
            checkpoint,
            "an adapter with other settings",
            found="; ".join(other),
            expected="those of the model's adapter: with others the same weights are another model",
            fix="make the adapter with the settings in adapter_config.json",
        )


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _refused(checkpoint: str, what: str, *, found: str, expected: str, fix: str) -> CaptureError:
    return CaptureError(
        f"checkpoint {checkpoint} is {what}; nothing was loaded",
        found=found,
        expected=expected,
        fix=fix,
    )


_FILE = "optimizer.pt"
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_[A-Za-z_]+|ia3_l|modules_to_save)\.")


@dataclass(frozen=True, slots=True, eq=False)
class AdamState:
    """What Adam knew at a checkpoint, by the names of the parameters that it trained."""

    first: dict[str, torch.Tensor]
    """`exp_avg`, in the parameter's shape."""
    second: dict[str, torch.Tensor]
    """`exp_avg_sq`, in the parameter's shape, without the correction for the first steps."""
    step: int
    """Steps that were taken."""
    beta2: float
    eps: float

    def corrected(self, name: str) -> torch.Tensor:
        """`exp_avg_sq` of a parameter over 1 - beta2^step: what Adam divides by, squared."""
        return self.second[name] / (1 - self.beta2**self.step)


def read_adam(
    source: Mapping[str, Any] | str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
) -> AdamState:
    """The moments of Adam by parameter, from `optimizer.state_dict()`, its file or a Trainer's folder.

    An optimizer numbers its parameters: by group, in the model's order. The groups are those of
    `torch.optim.AdamW(model.parameters())`, of transformers' Trainer (with and without weight decay)
    or of `param_names`, if they were saved; for others, `names` lists all parameters in the
    optimizer's order. All shapes must fit. Cost: reading the file, without running code from it.

    >>> model = nn.Linear(3, 2)
    >>> adam = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> adam.step()
    >>> {name: tuple(v.shape) for name, v in read_adam(adam.state_dict(), model).second.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    instance("model", model, nn.Module, error=CaptureError, expected="a torch.nn.Module")
    state, path = _read(source)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = {number: state["state"][number] for number in numbers if number in state["state"]}
    _check_adam(kept, path)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    given = None if names is None else texts("names", names, error=CaptureError)
    found = _fitting(_orders(model, state["param_groups"], given), numbers, kept, shapes)
    if len(found) != 1:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        raise CaptureError(
            "this optimizer's state does not fit the model"
            if not found
            else "this optimizer's state fits the model in several ways",
            path=path,
            found=f"{len(numbers)} parameters in groups of {sizes}",
            expected=f"the {len(shapes)} parameters of {type(model).__name__}, or those it trains",
            fix="give the model of that training; if its parameters are grouped in a way of your "
            "own, pass names= in the optimizer's order",
        )
    (order,) = found
    by_name = {
        name: kept[number] for name, number in zip(order, numbers, strict=True) if number in kept
    }
    group = state["param_groups"][0]
    return AdamState(
        first={name: values["exp_avg"] for name, values in by_name.items()},
        second={name: values["exp_avg_sq"] for name, values in by_name.items()},
        step=max(int(values["step"]) for values in by_name.values()),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
    )


def _read(source: Any) -> tuple[Mapping[str, Any], Path | None]:
    path: Path | None = None
    state = source
    if not isinstance(source, Mapping):
        path = Path(file_path("source", source, error=CaptureError))
        path = path / _FILE if path.is_dir() else path
        if not path.exists():
            raise CaptureError(
                "there is no saved optimizer",
                path=path,
                expected=f"a Trainer's checkpoint folder with {_FILE}, or a file of "
                "optimizer.state_dict()",
                fix="train without save_only_model=True, or save the optimizer's state yourself",
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CaptureError(
                "this optimizer's state cannot be read",
                path=path,
                found=str(error).splitlines()[0][:200],
                fix="save it with torch.save(optimizer.state_dict(), path)",
            ) from error
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CaptureError(
            "this is not the state of an optimizer",
            path=path,
            found=f"a dict with {', '.join(map(str, state))[:80]}"
            if isinstance(state, Mapping)
            else type(state).__name__,
            expected="state and param_groups, as optimizer.state_dict() gives them",
        )
    return state, path


def _check_adam(kept: Mapping[Any, Any], path: Path | None) -> None:
    wanted = {"exp_avg", "exp_avg_sq", "step"}
    if not kept or any(not wanted <= values.keys() for values in kept.values()):
        some: Mapping[str, Any] = next(iter(kept.values()), {})
        raise CaptureError(
            "this optimizer has no second moments",
            path=path,
            found=", ".join(map(str, some)) or "no state: it has not taken a step",
            expected="exp_avg, exp_avg_sq and step of every parameter, as Adam and AdamW have them",
        )


def _orders(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], given: tuple[str, ...] | None
) -> Iterator[list[str]]:
    """Orders in which an optimizer with such groups may have numbered the model's parameters."""
    if given is not None:
        yield list(given)
        return
    if all("param_names" in group for group in groups):
        yield [name for group in groups for name in group["param_names"]]
        return
    everything = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapter = [name for name in everything if _ADAPTER.search(name)]
    sizes = [len(group["params"]) for group in groups]
    for names in (trained, everything, adapter):
        if len(groups) == 1:
            yield names
        if len(groups) == 2:
            for undecayed in (_without_decay(model), _vectors(model)):
                parts = [[n for n in names if (n in undecayed) == last] for last in (False, True)]
                if [len(part) for part in parts] == sizes:
                    yield [*parts[0], *parts[1]]


def _fitting(
    orders: Iterator[list[str]],
    numbers: Sequence[Any],
    kept: Mapping[Any, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[list[str]]:
    """Those of the orders in which every moment has its parameter's shape, each once."""
    found: list[list[str]] = []
    for order in orders:
        fits = len(order) == len(numbers) and all(
            number not in kept or tuple(kept[number]["exp_avg_sq"].shape) == shapes.get(name)
            for name, number in zip(order, numbers, strict=True)
        )
        if fits and order not in found:
            found.append(order)
    return found


def _without_decay(model: nn.Module) -> set[str]:
    """The parameters that transformers' Trainer does not decay: biases, and those of norms."""
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    return {
        name
        for name, _ in model.named_parameters()
        if _UNDECAYED.search(name.lower()) or name.rpartition(".")[0] in norms
    }


def _vectors(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dim() < 2}


Source = Mapping[str, torch.Tensor] | str | os.PathLike[str]
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "weights")
_IN_FOLDERS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_COUNTER = "num_batches_tracked"
_PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of one checkpoint and when in training they were: a state dict, file or folder."""

    source: Source
    step: int | None = None
    lr: float | None = None


def fingerprint_weights(model: nn.Module) -> str:
    """A digest of all parameters and buffers with their names, shapes and types."""
    digest = xxhash.xxh3_128()
    for name, given in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(given, torch.Tensor):
            continue
        value = kept_value(given)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def load_weights(source: Source) -> Mapping[str, torch.Tensor]:
    """The state dict in a file (.pt, .bin, .safetensors) or a folder as Hugging Face writes it.

    A folder may hold a model, in one file or in several, or a PEFT adapter. Files are read without
    running code from them.
    """
    if isinstance(source, Mapping):
        return _unwrapped(source)
    path = Path(source)
    if is_adapter_file(path) and path.exists():
        return AdapterWeights(_from_file(path), adapter_settings(path))
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise CaptureError("there is no such checkpoint", path=path, fix="check the path")
    return _from_file(path)


def _from_file(path: Path) -> Mapping[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CaptureError(
            "this checkpoint cannot be read",
            path=path,
            found=str(error).splitlines()[0][:200],
            expected="a state dict saved by torch.save, or a .safetensors file",
            fix="save it again with torch.save(model.state_dict(), path)",
        ) from error
    if not isinstance(loaded, Mapping):
        raise CaptureError(
            "this checkpoint holds no state dict", path=path, found=type(loaded).__name__
        )
    return _unwrapped(loaded)


def _from_folder(path: Path) -> Mapping[str, torch.Tensor]:
    adapter = adapter_file(path)
    if adapter is not None:
        return load_weights(adapter)
    for name in _IN_FOLDERS:
        file = path / name
        if not file.exists():
            continue
        if not name.endswith(".json"):
            return load_weights(file)
        merged: dict[str, torch.Tensor] = {}
        parts = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        for part in parts:
            merged.update(load_weights(path / part))
        return merged
    raise CaptureError(
        "no weights in this folder",
        path=path,
        found=", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing",
        expected=f"one of {', '.join(_IN_FOLDERS)}, or adapter_model.safetensors",
    )


def _unwrapped(loaded: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    for name in _WRAPPERS:
        inner = loaded.get(name)
        if isinstance(inner, Mapping) and any(isinstance(v, torch.Tensor) for v in inner.values()):
            return inner
    return loaded


def _of_tied(
    own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], *, checkpoint: str
) -> dict[str, torch.Tensor]:
    """Weights that files leave out, because the model has them under another name too.

    Under both names they must be the same: a model has room for one of them only.
    """
    tied: dict[tuple[object, ...], list[str]] = {}
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta:
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            tied.setdefault(place, []).append(key)
    found: dict[str, torch.Tensor] = {}
    for keys in tied.values():
        given = [key for key in keys if key in state]
        for key in given[1:]:
            if not torch.equal(state[given[0]], state[key]):
                raise CaptureError(
                    f"checkpoint {checkpoint}: its weights do not fit the model; nothing was loaded",
                    found=f"other values for {given[0]} than for {key}",
                    expected="the same values: in the model the two are one parameter (tied weights)",
                    fix="untie them in the model, or load the checkpoint that belongs to it",
                )
        if given:
            found |= dict.fromkeys(keys, state[given[0]])
    return found


def put_weights(model: nn.Module, state: Mapping[str, torch.Tensor], *, name: str) -> None:
    """Load a state dict whose keys must fit the model's exactly, but for a wrapper's prefix.

    Weights of an adapter alone replace those of the model's adapter; all others stay.
    """
    own = model.state_dict()
    _check_at_hand(own, checkpoint=name)
    if is_adapter(state, own):
        model.load_state_dict(whole_state(model, state, checkpoint=name))
        return
    known = [name for name in own if not name.endswith(_COUNTER)]
    for prefix in ("", *_PREFIXES):
        stripped = {key.removeprefix(prefix): value for key, value in state.items()}
        if len(stripped) == len(state) and any(name in stripped for name in known):
            # Files from before torch counted batches have no counters: nothing is computed of them.
            counters = {name: own[name] for name in own if name.endswith(_COUNTER)}
            state = {**counters, **stripped}
            break
    state = {**_of_tied(own, state, checkpoint=name), **state}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{key} {tuple(state[key].shape)} for {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if missing or unknown or shapes:
        near = difflib.get_close_matches(missing[0], unknown, n=1) if missing and unknown else []
        raise CaptureError(
            f"checkpoint {name}: its weights do not fit the model; nothing was loaded",
            found=f"missing {missing[:4]}, unknown {unknown[:4]}, other shapes {shapes[:4]}",
            expected=f"the {len(own)} keys of model.state_dict()",
            fix=f"{near[0]} may be {missing[0]}: rename the keys" if near else None,
        )
    model.load_state_dict(dict(state))


def _check_at_hand(own: Mapping[str, torch.Tensor], *, checkpoint: str) -> None:
    away = [key for key, value in own.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if away:
        raise CaptureError(
            f"checkpoint {checkpoint} cannot be loaded into a model whose weights are offloaded",
            found=f"{len(away)} weights that are elsewhere, such as {away[0]}",
            expected="a model that holds its weights",
            fix="load the checkpoint into the model before it is offloaded, and capture one "
            "checkpoint at a time: checkpoints='name'",
        )
