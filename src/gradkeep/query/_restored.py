"""What is computed on restored gradients, a tile of rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.query._tiles import RESTORED, tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    Restore = Callable[[int, int], Tensor]


def norms(dense: Tensor) -> Tensor:
    """Squared lengths `[B]` of dense gradients `[B, P]`."""
    return inner(dense, dense)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[B]` of the rows of `[B, P]` and `[B, P]`."""
    products: Tensor = torch.linalg.vecdot(left, right)
    return products


def squares(weights: Tensor, size: int, restore: Restore) -> Tensor:
    """Weighted sums `[K, P]` of the squared entries of restored gradients `[B, P]`."""
    out = weights.new_zeros(len(weights), size)
    for start, stop in tiles(weights.shape[1], size, weights.element_size(), RESTORED):
        dense = restore(start, stop)
        out.addmm_(weights[:, start:stop], dense * dense)
    return out


def against(directions: Tensor, count: int, restore: Restore, *, scratch: int) -> Tensor:
    """Products `[K, B]` of dense directions `[K, P]` with restored gradients."""
    out = directions.new_empty(len(directions), count)
    size = directions.shape[1]
    for start, stop in tiles(count, size, directions.element_size(), min(scratch, RESTORED)):
        torch.mm(directions, restore(start, stop).t(), out=out[:, start:stop])
    return out
