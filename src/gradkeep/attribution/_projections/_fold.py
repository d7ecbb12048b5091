"""Signed fold and shift: blocks of k values, each with signs and a random shift."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._projections import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._projections._sum import Sum


class Fold:
    """Value i of block j = i // k is added with its sign at (i mod k + shift_j) mod k.

    One pass and no temporary; P operations a row. Two values of one block never meet.
    """

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self.size, self.dim = size, dim
        # A byte each: as floats they would take four times the room, and a block is soon widened.
        self._signs = _random.signs(size, *words)
        self._shifts = _random.places(-(-size // dim), dim, "shift", *words).tolist()

    def add(self, into: Sum, start: int, values: Tensor) -> None:
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

    def add(self, into: Sum, start: int, values: Tensor) -> None:
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
