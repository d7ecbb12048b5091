"""Example data that comes with packages or lies on disk, and small reference models.

Nothing is downloaded. Model classes are imported when they are first used, because they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.data._dataset import dataset
from gradkeep.data._examples import load_digit_images, load_digits
from gradkeep.data._files import load_cifar10
from gradkeep.data.architectures._catalog import model, models

if TYPE_CHECKING:
    from gradkeep.data.architectures._convolutional import CNN, MLP
    from gradkeep.data.architectures._resnets import ResNet9
    from gradkeep.data.architectures._transformers import GPT

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "ResNet9",
    "dataset",
    "load_cifar10",
    "load_digit_images",
    "load_digits",
    "model",
    "models",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "CNN": "gradkeep.data.architectures._convolutional",
            "GPT": "gradkeep.data.architectures._transformers",
            "MLP": "gradkeep.data.architectures._convolutional",
            "ResNet9": "gradkeep.data.architectures._resnets",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
