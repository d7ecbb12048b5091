"""Sums of v v^T."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._symmetric import squared

if TYPE_CHECKING:
    from torch import Tensor

WIDE = 4096
"""A side longer than this keeps its own coordinates: only the diagonal of its moments is made."""


def whole(size: int) -> bool:
    """Whether all moments of a side of this length are made."""
    return size <= WIDE


def zeros(groups: int, size: int) -> Tensor:
    """An empty sum for each group, `[groups, d, d]` or a diagonal `[groups, d]`; float64."""
    shape = (groups, size, size) if whole(size) else (groups, size)
    return torch.zeros(shape, dtype=torch.float64)


def moment(values: Tensor, like: Tensor) -> Tensor:
    """Sum of v v^T over `[S, d]`, or its diagonal."""
    return values.square().sum(0) if like.dim() == 1 else squared(values)
