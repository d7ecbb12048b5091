"""Example data that comes with packages or lies on disk, and small reference models.

Nothing is downloaded. The classes of models are loaded when they are first used, for they need
torch; everything else imports it only when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.data._cifar10 import load_cifar10
from gradkeep.data._dataset import dataset
from gradkeep.data._digits import Digits, load_digit_images, load_digits
from gradkeep.data._examples import Examples, Scaling
from gradkeep.data._idx import load_idx, read_idx
from gradkeep.data._image_folder import ImageFolder, load_image_folder
from gradkeep.data._npz import load_npz
from gradkeep.data._texts import Texts, Vocabulary, load_agnews, load_characters
from gradkeep.data.architectures import CLASSES as _MODELS
from gradkeep.data.architectures import (
    Workload,
    build,
    checked_sizes,
    default_sizes,
    model,
    model_class,
    models,
    published_sizes,
    zoo,
)

if TYPE_CHECKING:
    from gradkeep.data.architectures._resnets import ResNet9, ResNet20, ResNet50
    from gradkeep.data.architectures._small import CNN, MLP, VGG16
    from gradkeep.data.architectures._transformers import GPT, BertClassifier

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "VGG16",
    "BertClassifier",
    "Digits",
    "Examples",
    "ImageFolder",
    "ResNet9",
    "ResNet20",
    "ResNet50",
    "Scaling",
    "Texts",
    "Vocabulary",
    "Workload",
    "build",
    "checked_sizes",
    "dataset",
    "default_sizes",
    "load_agnews",
    "load_characters",
    "load_cifar10",
    "load_digit_images",
    "load_digits",
    "load_idx",
    "load_image_folder",
    "load_npz",
    "model",
    "models",
    "published_sizes",
    "read_idx",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        return model_class(name)
    raise AttributeError(f"module 'gradkeep.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
