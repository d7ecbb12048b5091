"""Influence in eigencoordinates, of linear layers with one position a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._basis import MatrixBasis
from gradkeep._attribute._fisher._stream import only, parts
from gradkeep._attribute._fisher._sums import scaled, with_ones
from gradkeep._attribute._projections._rows import widened
from gradkeep.query._factors import OuterRows
from gradkeep.query._forms import Outer
from gradkeep.query._memory import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep._attribute._fisher._curvature import Damping, LayerFisher
    from gradkeep.query import Gradients

NEGLIGIBLE = 1e-4
"""An eigenvalue below this share of the damping counts as zero: no damped one changes by more."""
_STEP = 16
"""Columns are taken in such steps, so that neighbouring rows take equally many."""
_ROWS, _COLUMNS = 512, 4096
"""Training rows, and coordinates of them, that are multiplied at a time: stays in the cache, and
is enough for a matrix product of a good shape."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows, and their first columns."""

    start: int
    stop: int
    cols: int

    @property
    def rows(self) -> slice:
        """Which rows."""
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return (self.stop - self.start) * self.cols


@dataclass(frozen=True, slots=True, eq=False)
class OnePosition:
    """A layer whose gradients g x^T have coordinates (L^T g)(R^T x)^T.

    1 / (value + damping) = 1 / damping - shrink. The first part is a plain inner product, from
    factors; the second is zero but for the leading rows and columns.
    """

    layer: str
    basis: MatrixBasis
    damping: float
    shrink: Tensor
    """`[R, C]`, rows and columns by falling eigenvalue"""
    blocks: tuple[Block, ...]
    """Where it is not zero."""

    @property
    def kept(self) -> int:
        """K, the number of coordinates that are multiplied."""
        return sum(block.size for block in self.blocks)

    def scores(
        self,
        asked: Gradients,
        train: Gradients,
        positions: list[int],
        memory_budget: int | None,
        *,
        held: int,
    ) -> Tensor:
        """Products `[b, N]` of some queries with all training rows; 2 K operations a pair."""
        some = only(asked, self.layer).rows(positions).factors[self.layer]
        slopes = asked.slopes()
        g, x = self._turned(asked, some, None if slopes is None else slopes[positions])
        weighed = torch.cat(
            [
                _outer(g, x, block) * self.shrink[block.rows, : block.cols].flatten()
                for block in self.blocks
            ]
            or [g[:, :0]],
            1,
        )
        out = torch.empty(len(positions), len(train))
        widest = max((block.size for block in self.blocks), default=1)
        room = DEFAULT if memory_budget is None else memory_budget
        rows = max(1, min(_ROWS, room // 16 // (4 * widest)))
        held += 4 * (weighed.numel() + 2 * out.numel() + rows * widest)
        for part in parts(train, self.layer, memory_budget, held=held):
            ours, theirs = self._turned(train, part.factors, part.slopes)
            for start in range(0, len(ours), rows):
                high, wide = ours[start : start + rows], theirs[start : start + rows]
                into = (g @ high.t()).mul_(x @ wide.t()).div_(self.damping)
                at = 0
                for block in self.blocks:
                    shrunk = weighed[:, at : at + block.size]
                    into.addmm_(shrunk, _outer(high, wide, block).t(), alpha=-1)
                    at += block.size
                first = part.start + start
                out[:, first : first + len(high)] = into
        return out

    def _turned(
        self, gradients: Gradients, rows: object, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """L^T g `[B, R]` and R^T x `[B, C]`, by falling eigenvalue."""
        form = gradients.forms[self.layer]
        assert isinstance(rows, OuterRows)
        assert isinstance(form, Outer)
        wide = widened(rows)
        assert isinstance(wide, OuterRows)
        g, x = scaled(wide.g, None, slopes), with_ones(form, wide.x)
        if self.basis.left is not None:
            g = g @ self.basis.left[0].flip(1).to(g.dtype)
        if self.basis.right is not None:
            x = x @ self.basis.right[0].flip(1).to(x.dtype)
        return g.float(), x.float()


def _outer(g: Tensor, x: Tensor, block: Block) -> Tensor:
    """The coordinates `[B, size]` of some rows and columns."""
    return (g[:, block.rows, None] * x[:, None, : block.cols]).flatten(1)


def one_position(
    layer: str, fisher: LayerFisher, damping: Damping, *sides: Gradients
) -> OnePosition | None:
    """The layer in eigencoordinates, if all sides keep prefixes and suffixes of one position."""
    basis = fisher.bases[0]
    added = damping.of(fisher.mean)
    if len(fisher.bases) > 1 or not isinstance(basis, MatrixBasis) or added <= 0:
        return None
    if not all(_has_one(side, layer) for side in sides):
        return None
    values = basis.values[0]
    if basis.left is not None:
        values = values.flip(0)
    if basis.right is not None:
        values = values.flip(1)
    shrink = (values / (added * (values + added))).float()
    return OnePosition(layer, basis, added, shrink, _blocks(values > NEGLIGIBLE * added))


def _has_one(gradients: Gradients, layer: str) -> bool:
    form = gradients.forms[layer]
    if not isinstance(form, Outer) or form.ones:
        return False
    ragged = {array.name: array.ragged for array in gradients.block.schema.arrays}
    return not ragged[form.suffix]


def _blocks(there: Tensor) -> tuple[Block, ...]:
    """Neighbouring rows with as many columns up to the last that is there.

    >>> _blocks(torch.tensor([[True, True], [True, False], [False, False]]))
    (Block(start=0, stop=2, cols=2),)
    """
    last = (there * torch.arange(1, there.shape[1] + 1)).amax(1)
    cols = ((last + _STEP - 1) // _STEP * _STEP).clamp(max=there.shape[1]).tolist()
    blocks: list[Block] = []
    for row, wide in enumerate(cols):
        before = blocks[-1] if blocks else Block(0, 0, 0)
        if not wide:
            continue
        if (before.stop, before.cols) == (row, wide) and before.size + wide <= _COLUMNS:
            blocks[-1] = Block(before.start, row + 1, wide)
        else:
            blocks.append(Block(row, row + 1, wide))
    return tuple(blocks)
