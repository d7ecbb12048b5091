"""Count-sketch: every value at its own random place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._projections import _random

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._projections._sum import Sum


class CountSketch:
    """out[place(i)] += sign(i) value_i; P operations a row, at random places."""

    def __init__(self, size: int, dim: int, *words: object) -> None:
        self._signs = _random.signs(size, *words)
        self._places = _random.places(size, dim, *words)

    def add(self, into: Sum, start: int, values: Tensor) -> None:
        """Add values `[b, P]` to rows from `start` on."""
        signed = values * self._signs.to(values)
        into.buffer[start : start + len(values)].index_add_(
            1, self._places.to(values.device), signed
        )
