"""Reference models by name; listing needs no torch."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from gradkeep._arguments import checked
from gradkeep.data._examples import known_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import torch

_LARGEST = 2**24
"""No size of a reference model is as large: a slip of the finger, and all memory is gone."""
_CLASSES = {
    "bert": ("_transformers", "BertClassifier"),
    "cnn": ("_image_models", "CNN"),
    "gpt": ("_transformers", "GPT"),
    "mlp": ("_image_models", "MLP"),
    "resnet9": ("_image_models", "ResNet9"),
    "resnet20": ("_image_models", "ResNet20"),
    "resnet50": ("_image_models", "ResNet50"),
    "vgg16": ("_image_models", "VGG16"),
}


def models() -> tuple[str, ...]:
    """The names that `model` knows.

    >>> models()
    ('bert', 'cnn', 'gpt', 'mlp', 'resnet9', 'resnet20', 'resnet50', 'vgg16')
    """
    return tuple(_CLASSES)


@checked(DataError)
def model(name: str, *, seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """A reference model, the same for the same seed; torch's own random state is left as it was.

    Sizes are those of the class: `classes`, `width`, `layers`. Case does not matter in the name.

    >>> digits = model("mlp")
    >>> sum(parameter.numel() for parameter in digits.parameters())
    85002
    """
    key = known_name(str(name).lower(), _CLASSES, what="model", fix="models() lists all names")
    module, kind = _CLASSES[key]
    built = getattr(importlib.import_module(f"gradkeep.data.{module}"), kind)
    known = {
        size: parameter.default
        for size, parameter in inspect.signature(built.__init__).parameters.items()
        if size != "self"
    }
    for size, value in sizes.items():
        known_name(size, known, what=f"size of {key}")
        _check(key, size, value, known[size])
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: torch.nn.Module = built(**sizes)
    return made


def _check(model: str, size: str, value: object, default: object) -> None:
    """Refuse what differs in type from the default: configuration files give texts for numbers."""
    if isinstance(default, bool):
        right, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        # What can be left out has zero as its default; nothing else can be of size zero.
        least = min(default, 1)
        whole = isinstance(value, int) and not isinstance(value, bool)
        right = whole and least <= value < _LARGEST  # type: ignore[operator]
        expected = f"a whole number from {least}"
    elif isinstance(default, float):
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        expected = "a share from 0 up to 1"
    else:
        several = isinstance(value, list | tuple)
        right = several and all(type(n) is int and 0 < n < _LARGEST for n in value)  # type: ignore[attr-defined]
        expected = "a list of whole numbers"
    if not right:
        raise DataError(f"{size} of {model} is {expected}", found=repr(value), expected=expected)
