"""Large arrays of scores: in memory, or mapped from a file without a name."""

from __future__ import annotations

import math
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Floats = np.ndarray[Any, np.dtype[np.float32]]

IN_MEMORY = 4 << 30
"""Bytes of scores that are held in memory unless a budget says otherwise."""


def zeros(shape: tuple[int, ...], *, limit: int = IN_MEMORY) -> Floats:
    """Zeros in memory if they take no more than `limit` bytes, else on disk.

    >>> zeros((2, 3)).shape, type(zeros((2, 3), limit=1)).__name__
    ((2, 3), 'memmap')
    """
    size = math.prod(shape) * 4
    if size <= limit:
        return np.zeros(shape, np.float32)
    # The file has no name: it is gone with the last array that maps it.
    with tempfile.TemporaryFile(prefix="gradkeep-scores-") as file:
        file.truncate(size)
        return np.memmap(file, np.float32, "r+", shape=shape)
