"""Example data that comes with packages or lies on disk, and small reference models.

Nothing is downloaded.
"""

from gradkeep.data._agnews import Texts, load_agnews
from gradkeep.data._characters import load_characters
from gradkeep.data._cifar10 import load_cifar10
from gradkeep.data._dataset import dataset
from gradkeep.data._digit_images import load_digit_images
from gradkeep.data._digits import Digits, load_digits
from gradkeep.data._examples import Examples, Scaling
from gradkeep.data._idx import load_idx, read_idx
from gradkeep.data._image_folder import ImageFolder, load_image_folder
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

__all__ = [
    "Digits",
    "Examples",
    "ImageFolder",
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
    "published_sizes",
    "read_idx",
    "zoo",
]
