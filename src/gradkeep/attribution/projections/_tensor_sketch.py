"""TensorSketch: a count-sketch of a weight whose places and signs are those of its sides.

Value (r, c) of a weight `[R, C]` is added at (shift_r + place_c) mod k with sign_r sign_c. The
places of columns are their own numbers, folded if there are more than k, so that a row of the
weight is one block to add, and the transform of a column factor needs no scattering. Values of
one row never meet if C <= k; those of different rows meet with probability 1 / k.

The map is one; there are several ways to compute it, which differ in cost only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep.attribution.projections import _random
from gradkeep.attribution.projections._flat_sketches import folded
from gradkeep.factors._ragged import sum_rows

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution.projections._flat_sketches import ProjectionSum
    from gradkeep.factors._ragged import Spans

SketchWay = Literal["matrix", "blocks", "spectrum"]
_FEW = 1 << 14
"""Values below which a block is not worth an operation of its own."""
_CALL, _ADD, _MOVE, _SCATTER, _BUTTERFLY, _PRODUCT = 3500.0, 0.15, 0.6, 1.0, 0.17, 0.04
"""Nanoseconds: to call an operation, and per value to add what is in the cache, to move what is
not, to scatter, to transform and to multiply."""
_UNFOLD = 4.0
"""Nanoseconds more per value of a patch that is laid out by position, not by channel."""
_ROWS = 64
"""Rows at once that costs are compared for."""
_CACHED = 1 << 21
"""Bytes of the rows of the sum that one block after the other is added to."""


class TensorSketch:
    """The sides of one parameter, `[R, C]` in its layout: shifts of rows, signs of both."""

    def __init__(self, rows: int, cols: int, dim: int, *words: object) -> None:
        self.rows, self.cols, self.dim = rows, cols, dim
        self._shifts = _random.places(rows, dim, "rows", *words)
        self._row_signs = _random.signs(rows, "rows", *words)
        self._col_signs = _random.signs(cols, "columns", *words)
        self._col_shifts = _random.places(-(-cols // dim), dim, "columns", *words).tolist()

    @property
    def width(self) -> int:
        """Numbers that a row of the weight takes once it is folded."""
        return min(self.cols, self.dim)

    def add_matrix(self, into: ProjectionSum, start: int, values: Tensor) -> None:
        """Add gradients `[b, R, C]` to rows from `start` on: each row of the weight at its shift.

        R C operations a row.
        """
        # Signs of the columns first: what is folded must have them before.
        flat = self._folded(values)
        count, device = len(values), values.device
        # Few rows of the sum at a time, so that they stay in the cache while all blocks pass.
        step = max(1, _CACHED // (2 * self.dim * values.element_size()))
        signs = self._row_signs.tolist()
        if min(step, count) * self.width < _FEW:
            index = (self._shifts[:, None] + torch.arange(self.width)).flatten().to(device)
            flat = flat * self._row_signs[:, None].to(flat)
            into.buffer[start : start + count].index_add_(1, index, flat.reshape(count, -1))
            return
        for first in range(0, count, step):
            room = into.buffer[start + first : start + min(first + step, count)]
            some = flat[first : first + step]
            for row, (shift, sign) in enumerate(zip(self._shifts.tolist(), signs, strict=True)):
                room[:, shift : shift + self.width].add_(some[:, row], alpha=sign)

    def add_blocks(self, into: ProjectionSum, start: int, left: Tensor, right: Tensor) -> None:
        """Add products `[b, R] x [b, C]` of one position a row, without forming them.

        R C operations a row.
        """
        right = self._folded(right)
        left = left * self._row_signs.to(left)
        step = max(1, _CACHED // (2 * self.dim * left.element_size()))
        shifts, width = self._shifts.tolist(), self.width
        for first in range(0, len(left), step):
            some, times = right[first : first + step], left[first : first + step].t().unsqueeze(2)
            room = into.buffer[start + first : start + first + len(some)]
            for row, shift in enumerate(shifts):
                room[:, shift : shift + width].addcmul_(some, times[row])

    def add_spectrum(
        self,
        into: ProjectionSum,
        start: int,
        left: Tensor,
        right: Tensor,
        parts: Spans,
        *,
        first: int = 0,
    ) -> None:
        """Add sums over positions of products `[S, R] x [S, C]`, as products of their transforms.

        Two transforms of k numbers a position. `left` may be some rows of the weight only, from
        `first` on.
        """
        if not len(left):  # the transforms refuse nothing at all
            return
        chosen = slice(first, first + left.shape[1])
        scattered = left.new_zeros(len(left), self.dim)
        scattered.index_add_(
            1, self._shifts[chosen].to(left.device), left * self._row_signs[chosen].to(left)
        )
        spectrum = torch.fft.rfft(scattered)
        spectrum *= torch.fft.rfft(self._folded(right), n=self.dim)
        into.add_spectrum(start, sum_rows(spectrum, parts))

    def add_tokens(self, into: ProjectionSum, ids: Tensor, values: Tensor, where: Tensor) -> None:
        """Add values `[S, C]` to the rows `ids` of the weight, of the rows `where` of the sum.

        C operations a token.
        """
        flat = self._folded(values) * self._row_signs.to(values)[ids].unsqueeze(1)
        begin = where * into.buffer.shape[1] + self._shifts.to(ids.device)[ids]
        index = begin.unsqueeze(1) + torch.arange(self.width, device=ids.device)
        into.buffer.view(-1).index_add_(0, index.flatten(), flat.flatten())

    def way(self, positions: float, *, patches: bool = False) -> SketchWay:
        """The cheapest way for rows with so many positions; `matrix` means to restore first."""
        return min(self.costs(positions, patches=patches).items(), key=lambda item: item[1])[0]

    def costs(self, positions: float, *, patches: bool = False) -> dict[SketchWay, float]:
        """Nanoseconds a row that each way takes, about; never a function of the batch.

        `patches` says that the columns are those of a convolution, which have to be laid out.
        """
        size = self.rows * self.cols
        calls = self.rows * _CALL / _ROWS
        put = _MOVE * size + calls if _ROWS * self.width >= _FEW else _SCATTER * size
        transform = _BUTTERFLY * self.dim * math.log2(self.dim + 1)
        position = 2 * transform + _MOVE * (self.dim + self.cols) + _SCATTER * self.rows
        if patches:
            position += _UNFOLD * self.cols
        found: dict[SketchWay, float] = {
            "matrix": _PRODUCT * positions * size + 2 * _MOVE * size + put,
            "spectrum": positions * position,
        }
        if positions == 1 and not patches:
            found["blocks"] = _ADD * size + calls
        return found

    def _folded(self, values: Tensor) -> Tensor:
        return folded(values, self._col_signs.to(values.device), self._col_shifts, self.dim)
