"""Subsampled randomised Hadamard transform."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._projections import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._projections._sum import Sum

_RADIX = 64


class Srht:
    """sqrt(L / k) (H D g) at k different places, H the orthonormal Walsh-Hadamard matrix `[L, L]`.

    L is the next power of two of the longer of P and k; about 64 L log64(L) operations a row.
    """

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self.length = 1 << (max(size, dim, 1) - 1).bit_length()
        self._signs = _random.signs(size, *words)
        self._places = _random.distinct(dim, self.length, *words)
        self._scale = 1 / math.sqrt(dim)

    def add(self, into: Sum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        dim = len(self._places)
        room = values.new_zeros(len(values), self.length)
        torch.mul(values, self._signs.to(values), out=room[:, : values.shape[1]])
        moved = _hadamard(room).index_select(1, self._places.to(values.device))
        into.buffer[start : start + len(values), :dim].add_(moved, alpha=self._scale)


def _hadamard(values: Tensor) -> Tensor:
    """Rows `[b, L]` times the Walsh-Hadamard matrix of signs, by products with small ones."""
    rows, length = values.shape
    inner = 1
    while inner < length:
        radix = min(_RADIX, length // inner)
        small = _signs_matrix(radix).to(values)
        if inner == 1:
            values = values.view(-1, radix) @ small
        else:
            values = small @ values.view(-1, radix, inner)
        inner *= radix
    return values.view(rows, length)


def _signs_matrix(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
