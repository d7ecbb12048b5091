"""Lengths and inner products of rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared lengths `[B]` of rows `[B, P]`."""
    return inner(rows, rows)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[B]` of the rows of `[B, P]` and `[B, P]`."""
    products: Tensor = torch.linalg.vecdot(left, right)
    return products
