"""Example data sets from packages or from disk, and small reference models.

Nothing is downloaded. Model classes are imported at first use, because they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._public import lazy_names
from gradkeep.data._dataset import dataset
from gradkeep.data._examples import load_digit_images, load_digits
from gradkeep.data._files import load_cifar10
from gradkeep.data._models import model, models

if TYPE_CHECKING:
    from gradkeep.data._image_models import CNN, MLP, ResNet9
    from gradkeep.data._transformers import GPT

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
            "CNN": "gradkeep.data._image_models",
            "GPT": "gradkeep.data._transformers",
            "MLP": "gradkeep.data._image_models",
            "ResNet9": "gradkeep.data._image_models",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
