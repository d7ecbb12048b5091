"""Lengths and inner products of rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 16


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
    out = left[:, :_PIECE] @ right[:, :_PIECE].t()
    for start in range(_PIECE, left.shape[1], _PIECE):
        out += left[:, start : start + _PIECE] @ right[:, start : start + _PIECE].t()
    return out
