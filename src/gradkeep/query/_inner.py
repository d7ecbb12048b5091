"""Lengths and inner products of rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 16
_SHORT_PIECE = 1 << 11
_FEW = 1 << 12
"""Below so many products at once, a library sums each of them in one go, without blocks."""


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
