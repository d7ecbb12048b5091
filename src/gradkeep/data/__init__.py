"""Example data that comes with packages or lies on disk, and small reference models.

Nothing is downloaded. The classes of models are loaded when they are first used, for they need
torch; everything else imports it only when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.data._agnews import Texts, load_agnews
from gradkeep.data._characters import load_characters
from gradkeep.data._cifar10 import load_cifar10
from gradkeep.data._dataset import dataset
from gradkeep.data._digit_images import load_digit_images
from gradkeep.data._digits import Digits, load_digits
from gradkeep.data._examples import Examples, Scaling
from gradkeep.data._idx import load_idx, read_idx
from gradkeep.data._image_folder import ImageFolder, load_image_folder
from gradkeep.data._models import CLASSES as _MODELS
from gradkeep.data._models import model, model_class, models
from gradkeep.data._npz import load_npz
from gradkeep.data._words import Vocabulary
from gradkeep.data._zoo import (
    Workload,
    build,
    checked_sizes,
    default_sizes,
    published_sizes,
    zoo,
)

if TYPE_CHECKING:
    from gradkeep.data._models._bert import BertClassifier
    from gradkeep.data._models._digits import CNN, MLP
    from gradkeep.data._models._gpt import GPT
    from gradkeep.data._models._resnet9 import ResNet9
    from gradkeep.data._models._resnet20 import ResNet20
    from gradkeep.data._models._resnet50 import ResNet50
    from gradkeep.data._models._vgg16 import VGG16

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
