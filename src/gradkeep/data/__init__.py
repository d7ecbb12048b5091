"""Example data that comes with packages, and small reference models: nothing is downloaded."""

from gradkeep.data._digits import Digits, load_digits
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
    "Workload",
    "build",
    "checked_sizes",
    "default_sizes",
    "load_digits",
    "published_sizes",
    "zoo",
]
