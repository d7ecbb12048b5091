"""Sums of v v^T."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._conv import even

if TYPE_CHECKING:
    from torch import Tensor

WIDE = 4096
"""A side longer than this keeps its own coordinates: only the diagonal of its moments is made."""
_BAND = 64
"""Rows of a moment that are made at a time, at least."""


def whole(size: int) -> bool:
    """Whether all moments of a side of this length are made."""
    return size <= WIDE


def zeros(groups: int, size: int) -> Tensor:
    """An empty sum for each group, `[groups, d, d]` or a diagonal `[groups, d]`; float64."""
    shape = (groups, size, size) if whole(size) else (groups, size)
    return torch.zeros(shape, dtype=torch.float64)


def moment(values: Tensor, like: Tensor) -> Tensor:
    """Sum of v v^T over `[S, d]`, or its diagonal.

    The matrix is symmetric: a band of rows is multiplied from the diagonal on, and mirrored.
    """
    if like.dim() == 1:
        return values.square().sum(0)
    size = values.shape[1]
    step = max(_BAND, even(math.ceil(size / 4)))
    if size <= step:
        return values.t() @ values
    out = values.new_empty(size, size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        band = values[:, start:stop].t() @ values[:, start:]
        out[start:stop, start:] = band
        out[stop:, start:stop] = band[:, stop - start :].t()
    return out
