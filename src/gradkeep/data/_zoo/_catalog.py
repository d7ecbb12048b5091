"""The names in the zoo, their sizes, and where each is built; listing them needs no torch."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.data._zoo._workload import Workload
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Sizes = Mapping[str, int | float]
    Built = tuple[torch.nn.Module, Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    """The module beside this one whose `build(name, sizes)` makes the model."""
    small: Sizes
    """Sizes for one core: a step takes well under a second."""
    published: Sizes
    """What differs from `small` in the published experiments."""


def _image(batch: int, side: int, classes: int = 10) -> Sizes:
    return {"batch_size": batch, "height": side, "width": side, "classes": classes}


_CIFAR = {
    "resnet20": (_image(8, 32), _image(56, 224)),
    "resnet32": (_image(8, 32), _image(56, 224)),
    "resnet44": (_image(4, 32), _image(56, 32)),
    "resnet56": (_image(4, 32), _image(56, 32)),
    "resnet110": (_image(2, 32), _image(64, 32)),
    "resnet1202": (_image(1, 32), _image(64, 32)),
}
_IMAGENET = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_DENSE = ("densenet121", "densenet161", "densenet169", "densenet201")
_WORDS = {
    "batch_size": 4,
    "length": 20,
    "tokens": 300,
    "dim": 32,
    "hidden": 32,
    "layers": 2,
    "dropout": 0.2,
}
_WIKITEXT = {"batch_size": 32, "length": 35, "tokens": 33278, "dim": 200, "hidden": 200}

_ENTRIES: dict[str, _Entry] = {
    **{name: _Entry("_resnets", small, full) for name, (small, full) in _CIFAR.items()},
    **{name: _Entry("_resnets", _image(2, 64), _image(32, 224, 1000)) for name in _IMAGENET},
    "densenet100": _Entry("_densenets", _image(2, 32), _image(64, 32)),
    **{name: _Entry("_densenets", _image(2, 64), _image(84, 224, 1000)) for name in _DENSE},
    "inceptionv4": _Entry("_inception", _image(2, 96), _image(64, 299, 1001)),
    "unet": _Entry(
        "_unet",
        {"batch_size": 2, "height": 64, "width": 64, "channels": 8},
        {"batch_size": 6, "height": 416, "width": 608, "channels": 64},
    ),
    "lstm": _Entry(
        "_recurrent",
        {"batch_size": 8, "length": 16, "in_dim": 16, "mem_dim": 32},
        {"batch_size": 512, "length": 256, "in_dim": 512, "mem_dim": 1700},
    ),
    "lstm_encoder": _Entry("_recurrent", _WORDS, _WIKITEXT),
    "gru_encoder": _Entry("_recurrent", _WORDS, _WIKITEXT),
    "treelstm": _Entry(
        "_trees",
        {"batch_size": 4, "depth": 4, "children": 3, "irregular": 1, "in_dim": 16, "mem_dim": 32},
        {
            "batch_size": 640,
            "depth": 9,
            "children": 2,
            "irregular": 0,
            "in_dim": 100,
            "mem_dim": 300,
        },
    ),
    "transformer": _Entry(
        "_transformers",
        {
            "batch_size": 2,
            "length": 32,
            "target_length": 16,
            "dim": 64,
            "heads": 4,
            "layers": 2,
            "decoder_layers": 2,
            "hidden": 128,
            "dropout": 0.1,
        },
        {
            "batch_size": 10,
            "length": 512,
            "target_length": 20,
            "dim": 512,
            "heads": 16,
            "layers": 12,
            "decoder_layers": 6,
            "hidden": 2048,
        },
    ),
    "transformer_encoder": _Entry(
        "_transformers", {**_WORDS, "heads": 2}, {**_WIKITEXT, "heads": 2}
    ),
    "unrolled_gan": _Entry(
        "_gans",
        {"batch_size": 16, "noise_dim": 16, "g_hidden": 32, "d_hidden": 32, "unrolled_steps": 3},
        {
            "batch_size": 512,
            "noise_dim": 4096,
            "g_hidden": 2048,
            "d_hidden": 2048,
            "unrolled_steps": 60,
        },
    ),
}


def zoo() -> tuple[str, ...]:
    """The names that `build` knows.

    >>> "resnet32" in zoo(), "unet" in zoo()
    (True, True)
    """
    return tuple(_ENTRIES)


def default_sizes(name: str) -> dict[str, int | float]:
    """The sizes of a model, batch size included, that `build` takes unless told otherwise.

    >>> default_sizes("lstm")
    {'batch_size': 8, 'length': 16, 'in_dim': 16, 'mem_dim': 32}
    """
    return dict(_entry(name).small)


def published_sizes(name: str) -> dict[str, int | float]:
    """The sizes of the published experiments; most need a large machine.

    >>> published_sizes("lstm")["length"]
    256
    """
    entry = _entry(name)
    return {**entry.small, **entry.published}


def build(name: str, *, batch_size: int | None = None, seed: int = 0, **sizes: float) -> Workload:
    """A model of the zoo with generated inputs; torch's own random state is left as it was.

    >>> build("lstm", batch_size=4, length=3).parameters
    6272
    """
    if batch_size is not None:
        sizes["batch_size"] = batch_size
    full = {**default_sizes(name), **checked_sizes(name, sizes)}
    import torch

    module = importlib.import_module(f"gradkeep.data._zoo.{_entry(name).module}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss = module.build(name, full)
    return Workload(name, model, loss, full)


def checked_sizes(name: str, sizes: Sizes) -> dict[str, int | float]:
    """The sizes, each of the type that the model expects; wrong ones are refused by name."""
    known = default_sizes(name)
    checked = {}
    for key, value in sizes.items():
        if key not in known:
            raise RematError(
                f"{name} has no size {key!r}", found=f"{key}={value!r}", expected=", ".join(known)
            )
        whole = isinstance(known[key], int)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            raise RematError(f"{key} of {name} is {kind}", found=repr(value), expected=kind)
        # Zero switches off what is a share or a choice; nothing can be of size zero.
        least = 0 if key in ("dropout", "irregular") else 1
        if value < least:
            raise RematError(
                f"{key} of {name} is too small", found=value, expected=f"at least {least}"
            )
        checked[key] = int(value) if whole else float(value)
    return checked


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=3, cutoff=0.4)
        raise RematError(
            "the zoo has no such model",
            found=repr(name),
            expected=", ".join(near or _ENTRIES),
            fix="gradkeep.data.zoo() lists all names",
        )
    return _ENTRIES[name]
