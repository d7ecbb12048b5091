"""Adapters: weights that are a small part of a model, in files that leave out the adapter's name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

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
