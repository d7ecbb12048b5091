"""Checkpoints: where weights come from, how they are loaded, and their fingerprint."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from gradkeep.capturing._adapters import (
    AdapterWeights,
    adapter_file,
    adapter_settings,
    is_adapter,
    is_adapter_file,
    whole_state,
)
from gradkeep.capturing._stand_ins import kept_value
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn

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
