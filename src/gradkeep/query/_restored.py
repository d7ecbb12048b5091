"""What is computed on restored gradients, a tile of rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Restore = Callable[[int, int], Tensor]

TILE = 1 << 24
"""Bytes of restored gradients at a time, where the caller sets no bound."""


def tiles(count: int, values: int, itemsize: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Rows `(start, stop)` of so many values each that fit into `scratch` bytes, at least one.

    >>> list(tiles(5, 10, 4, 80))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, scratch // max(1, values * itemsize))
    for start in range(0, count, step):
        yield start, min(start + step, count)


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
    for start, stop in tiles(weights.shape[1], size, weights.element_size(), TILE):
        dense = restore(start, stop)
        out.addmm_(weights[:, start:stop], dense * dense)
    return out


def against(directions: Tensor, count: int, restore: Restore, *, scratch: int) -> Tensor:
    """Products `[K, B]` of dense directions `[K, P]` with restored gradients."""
    out = directions.new_empty(len(directions), count)
    size = directions.shape[1]
    for start, stop in tiles(count, size, directions.element_size(), min(scratch, TILE)):
        torch.mm(directions, restore(start, stop).t(), out=out[:, start:stop])
    return out
