"""Lengths and inner products of rows of numbers, and how many rows are worked on at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHED = 1 << 21
"""Bytes of one temporary that several operators pass over: what stays in the cache."""
RESTORED = 1 << 26
"""Bytes of restored gradients: enough rows for a matrix product of a good shape."""
_PIECE = 1 << 16
_SHORT_PIECE = 1 << 11
_FEW = 1 << 12
"""Below so many products at once, a library sums each of them in one go, without blocks."""
_BANDS, _LEAST, _MOST = 4, 64, 192
"""How many bands a product is cut into, and rows of a band: many bands leave more of the mirrored
half out, but a product of few rows is slow."""


def tiles(count: int, values: int, itemsize: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Rows `(start, stop)` of so many values each that fit into `scratch` bytes, at least one.

    Tiles of one size: products of a few rows that are left over take long for what they are.

    >>> list(tiles(5, 10, 4, 80)), list(tiles(9, 10, 4, 320))
    ([(0, 2), (2, 4), (4, 5)], [(0, 5), (5, 9)])
    """
    most = max(1, scratch // max(1, values * itemsize))
    step = -(-count // max(1, -(-count // most))) or 1
    for start in range(0, count, step):
        yield start, min(start + step, count)


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared lengths `[B]` of rows `[B, P]`."""
    return inner(rows, rows)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[B]` of the rows of `[B, P]` and `[B, P]`."""
    products: Tensor = torch.linalg.vecdot(left, right)
    return products


def pairwise(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[K, B]` of all rows of `[K, P]` with all rows of `[B, P]`.

    Long rows are summed in pieces: one sum over millions of values loses a digit of float32.
    """
    piece = _SHORT_PIECE if len(left) * len(right) < _FEW else _PIECE
    out = left[:, :piece] @ right[:, :piece].t()
    for start in range(piece, left.shape[1], piece):
        out += left[:, start : start + piece] @ right[:, start : start + piece].t()
    return out


def squared(values: Tensor) -> Tensor:
    """V^T V `[d, d]` of V `[S, d]`.

    It is symmetric: a band of rows is multiplied from the diagonal on, and mirrored, which is
    little more than half of the 2 S d^2 operations.
    """
    size = values.shape[1]
    # Products whose sides are multiples of 16 are up to twice as fast.
    step = min(_MOST, max(_LEAST, math.ceil(size / _BANDS / 16) * 16))
    if size <= step:
        return values.t() @ values
    out = values.new_empty(size, size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        band = values[:, start:stop].t() @ values[:, start:]
        out[start:stop, start:] = band
        out[stop:, start:stop] = band[:, stop - start :].t()
    return out
