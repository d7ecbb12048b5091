"""The names of the reference models and where each is built; listing them needs no torch."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from gradkeep.data._names import known_name
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import torch

_MODULES = {
    "BertClassifier": "_bert",
    "CNN": "_digits",
    "GPT": "_gpt",
    "MLP": "_digits",
    "ResNet9": "_resnet9",
    "ResNet20": "_resnet20",
    "ResNet50": "_resnet50",
    "VGG16": "_vgg16",
}
CLASSES = tuple(_MODULES)
_NAMES = {"bert" if name == "BertClassifier" else name.lower(): name for name in CLASSES}


def models() -> tuple[str, ...]:
    """The names that `model` knows.

    >>> models()
    ('bert', 'cnn', 'gpt', 'mlp', 'resnet9', 'resnet20', 'resnet50', 'vgg16')
    """
    return tuple(_NAMES)


def model_class(name: str) -> Any:
    """The class of a model by its own name, as in `CLASSES`."""
    module = importlib.import_module(f"gradkeep.data._models.{_MODULES[name]}")
    return getattr(module, name)


def model(name: str, *, seed: int = 0, **sizes: Any) -> torch.nn.Module:
    """A reference model, the same for the same seed; torch's own random state is left as it was.

    Sizes are those of the class: `classes`, `width`, `layers`. Case does not matter in the name.

    >>> digits = model("mlp")
    >>> sum(parameter.numel() for parameter in digits.parameters())
    85002
    """
    key = known_name(str(name).lower(), _NAMES, what="model", fix="models() lists all names")
    built = model_class(_NAMES[key])
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
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        expected = f"a whole number from {least}"
    elif isinstance(default, float):
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        expected = "a share from 0 up to 1"
    else:
        right = isinstance(value, list | tuple) and all(type(n) is int and n > 0 for n in value)
        expected = "a list of whole numbers"
    if not right:
        raise DataError(f"{size} of {model} is {expected}", found=repr(value), expected=expected)
