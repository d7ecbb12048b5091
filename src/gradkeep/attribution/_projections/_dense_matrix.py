"""Dense random matrices, generated a tile at a time and never kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from gradkeep.attribution._projections import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._projections._sum import Sum

TILE = 1024
"""Rows and columns of a whole tile; part of what the matrix is, so it must not change."""


class DenseMatrix:
    """values `[b, P]` @ matrix `[P, k]` / sqrt(k); 2 P k operations a row, and P k draws a call."""

    def __init__(
        self, kind: Literal["rademacher", "normal"], size: int, dim: int, *words: object
    ) -> None:
        self._kind, self._size, self._dim, self._words = kind, size, dim, words

    def add(self, into: Sum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        for high in range(0, self._size, TILE):
            part = values[:, high : high + TILE]
            for low in range(0, self._dim, TILE):
                wide = min(TILE, self._dim - low)
                tile = self._tile(high // TILE, low // TILE, part.shape[1], wide)
                at = into.buffer[start : start + len(values), low : low + wide]
                at.addmm_(part, tile.to(values), alpha=self._dim**-0.5)

    def matrix(self) -> Tensor:
        """The whole matrix `[P, k]`, without its scale."""
        out = torch.empty(self._size, self._dim)
        for high in range(0, self._size, TILE):
            for low in range(0, self._dim, TILE):
                rows, cols = min(TILE, self._size - high), min(TILE, self._dim - low)
                tile = self._tile(high // TILE, low // TILE, rows, cols)
                out[high : high + rows, low : low + cols] = tile
        return out

    def _tile(self, row: int, column: int, rows: int, cols: int) -> Tensor:
        draw = _random.signs if self._kind == "rademacher" else _random.normals
        return draw(rows * cols, row, column, *self._words).view(rows, cols)
