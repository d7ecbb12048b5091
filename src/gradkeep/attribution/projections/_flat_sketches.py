"""Random projections of plain vectors, and the sum that they add to."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gradkeep.attribution.projections import _random


class CountSketch:
    """out[place(i)] += sign(i) value_i; P operations a row, at random places."""

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self._signs = _random.signs(size, *words)
        self._places = _random.places(size, dim, *words)

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        signed = values * self._signs.to(values)
        into.buffer[start : start + len(values)].index_add_(
            1, self._places.to(values.device), signed
        )


TILE = 1024
"""Rows and columns of a whole tile; part of what the matrix is, so it must not change."""


class DenseMatrix:
    """values `[b, P]` @ matrix `[P, k]` / sqrt(k); 2 P k operations a row, and P k draws a call."""

    def __init__(
        self, kind: Literal["rademacher", "normal"], size: int, dim: int, *words: object
    ) -> None:
        self._kind, self._size, self._dim, self._words = kind, size, dim, words

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
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


class Fold:
    """Value i of block j = i // k is added with its sign at (i mod k + shift_j) mod k.

    One pass and no temporary; P operations a row. Two values of one block never meet.
    """

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self.size, self.dim = size, dim
        # A byte each: as floats they would take four times the room, and a block is soon widened.
        self._signs = _random.signs(size, *words)
        self._shifts = _random.places(-(-size // dim), dim, "shift", *words).tolist()

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        rows = into.buffer[start : start + len(values)]
        fold_into(rows, values, self._signs.to(values.device), self._shifts, self.dim)


class Sjlt:
    """Four folds of a quarter of the numbers each, divided by 2: every value is added four times."""

    def __init__(self, size: int, dim: int, parts: int, *words: object) -> None:
        self.dim = dim
        bounds = [dim * part // parts for part in range(parts + 1)]
        self._starts = bounds[:-1]
        self._scale = parts**-0.5
        self._folds = [
            Fold(size, high - low, "part", part, *words)
            for part, (low, high) in enumerate(pairwise(bounds))
        ]

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        for low, fold in zip(self._starts, self._folds, strict=True):
            room = values.new_zeros(len(values), 2 * fold.dim)
            fold_into(room, values, fold._signs.to(values.device), fold._shifts, fold.dim)
            both = room[:, : fold.dim].add_(room[:, fold.dim :])
            at = into.buffer[start : start + len(values), low : low + fold.dim]
            at.add_(both, alpha=self._scale)


def fold_into(room: Tensor, values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> None:
    """Add values `[b, P]` with signs `[P]` to room `[b, 2 dim]`, block by block."""
    for block, shift in enumerate(shifts):
        part = slice(block * dim, (block + 1) * dim)
        some = values[:, part]
        room[:, shift : shift + some.shape[1]].addcmul_(some, signs[part].to(values.dtype))


def folded(values: Tensor, signs: Tensor, shifts: list[int], dim: int) -> Tensor:
    """Values `[..., C]` folded to `[..., min(C, dim)]`; up to `dim` they keep their places."""
    if values.shape[-1] <= dim:
        return values * signs.to(values.dtype)
    flat = values.reshape(-1, values.shape[-1])
    room = flat.new_zeros(len(flat), 2 * dim)
    fold_into(room, flat, signs, shifts, dim)
    return torch.add(room[:, :dim], room[:, dim:]).view(*values.shape[:-1], dim)


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

    def add(self, into: ProjectionSum, start: int, values: Tensor) -> None:
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


class ProjectionSum:
    """The sketch `[B, k]` of rows, as the sum of what was added so far.

    Blocks of up to k numbers are added at a shift below k without looking at the end: the buffer
    has 2k numbers, and the second half is added to the first when all is done. Products of
    spectra are added as spectra, so that all layers share one inverse transform.
    """

    def __init__(self, rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = dim
        self.buffer = torch.zeros(rows, 2 * dim, dtype=dtype, device=device)
        self._spectrum: Tensor | None = None

    def add_spectrum(self, start: int, spectrum: Tensor) -> None:
        """Add to rows from `start` on what has this half spectrum `[b, k // 2 + 1]`."""
        if self._spectrum is None:
            self._spectrum = spectrum.new_zeros(len(self.buffer), spectrum.shape[1])
        self._spectrum[start : start + len(spectrum)] += spectrum

    def values(self) -> Tensor:
        """The sum `[B, k]`."""
        out = self.buffer[:, : self.dim] + self.buffer[:, self.dim :]
        if self._spectrum is not None:
            out += torch.fft.irfft(self._spectrum, n=self.dim)
        return out
