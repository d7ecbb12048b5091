"""Reference models by name; listing them does not need torch."""

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
"""Limit for sizes of reference models, to catch typos before memory runs out."""
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
    """Return the names that `model` accepts.

    Returns:
        Names of reference models.

    Example:
        >>> models()
        ('bert', 'cnn', 'gpt', 'mlp', 'resnet9', 'resnet20', 'resnet50', 'vgg16')
    """
    return tuple(_CLASSES)


@checked(DataError)
def model(name: str, *, seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """Build a reference model, the same for the same seed; torch's random state is restored.

    Args:
        name: Name of the model, in any case; `models()` lists them.
        seed: Seed of the initial weights.
        **sizes: Sizes of the class, such as `classes`, `width` or `layers`.

    Returns:
        The model.

    Raises:
        DataError: The name or a size is unknown, or a size has a wrong value.

    Example:
        >>> digits = model("mlp")
        >>> sum(parameter.numel() for parameter in digits.parameters())
        85002
    """
    key = known_name(str(name).lower(), _CLASSES, noun="model")
    module, kind = _CLASSES[key]
    built = getattr(importlib.import_module(f"gradkeep.data.{module}"), kind)
    known = {
        size: parameter.default
        for size, parameter in inspect.signature(built.__init__).parameters.items()
        if size != "self"
    }
    for size, value in sizes.items():
        known_name(size, known, noun=f"size of {key}")
        _check(key, size, value, known[size])
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: torch.nn.Module = built(**sizes)
    return network


def _check(model: str, size: str, value: object, default: object) -> None:
    """Raise for values of another type than the default: configuration files give texts for numbers."""
    if isinstance(default, bool):
        right, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        # Only optional parts, with a default of zero, can have size zero.
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
        raise DataError(
            f"{size} of {model} has a wrong value",
            code="data.model_size",
            found=repr(value),
            expected=expected,
        )
