"""Influence in eigencoordinates: of coordinates that were kept, and of one position a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradkeep._budgets import parse_bytes
from gradkeep.curvature._basis import MatrixBasis
from gradkeep.curvature._coordinates import coordinates, turned_factors
from gradkeep.curvature._row_parts import only_layer, row_parts
from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.query._engine import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.curvature._basis import Basis
    from gradkeep.curvature._fisher import CoordinateRows, Damping, LayerFisher
    from gradkeep.query import Gradients


_STEP = 16
"""Columns are taken in such steps, so that neighbouring rows take equally many."""
_ROWS, _COLUMNS = 512, 4096
"""Training rows, and coordinates of them, that are multiplied at a time: stays in the cache, and
is enough for a matrix product of a good shape."""


@dataclass(frozen=True, slots=True)
class EigenBlock:
    """Some rows, and how many of their first columns have a weight of their own."""

    start: int
    stop: int
    cols: int

    @property
    def rows(self) -> slice:
        """Which rows."""
        return slice(self.start, self.stop)

    def pieces(self) -> list[EigenBlock]:
        """The same in parts of some thousand coordinates."""
        if not self.cols:
            return []
        step = max(1, _COLUMNS // self.cols)
        starts = range(self.start, self.stop, step)
        return [EigenBlock(at, min(at + step, self.stop), self.cols) for at in starts]


@dataclass(frozen=True, slots=True, eq=False)
class SinglePositionInfluence:
    """A layer whose gradients g x^T have coordinates (L^T g)(R^T x)^T, by falling eigenvalue.

    The leading coordinates are multiplied one by one with 1 / (eigenvalue + damping). For all
    others that is 1 / damping, and their sum is a product of products of suffixes and prefixes.
    """

    layer: str
    basis: MatrixBasis
    damping: float
    weights: Tensor
    """1 / (eigenvalue + damping) `[R, C]`"""
    blocks: tuple[EigenBlock, ...]
    """All rows, with ever fewer columns."""
    rows: OuterRows | None = None
    """The turned factors of all training rows, if they were kept."""

    @property
    def kept(self) -> int:
        """K, the number of coordinates that are multiplied one by one."""
        return sum((block.stop - block.start) * block.cols for block in self.blocks)

    def scores(
        self, asked: Gradients, train: Gradients, positions: list[int], memory_budget: int | None
    ) -> Tensor:
        """Products `[b, N]` of some queries with all training rows; 2 K operations a pair."""
        some = only_layer(asked, self.layer).rows(positions).factors[self.layer]
        slopes = asked.slopes()
        g, x = self._turned(asked, some, None if slopes is None else slopes[positions])
        weighed = [
            _outer(g, x, piece) * self.weights[piece.rows, : piece.cols].flatten()
            for block in self.blocks
            for piece in block.pieces()
        ]
        out = torch.empty(len(positions), len(train))
        widest = max((part.shape[1] for part in weighed), default=1)
        room = DEFAULT_BUDGET if memory_budget is None else memory_budget
        rows = max(1, min(_ROWS, room // 16 // (4 * widest)))
        held = 4 * (len(g) * self.kept + 2 * out.numel() + rows * widest)
        for first, ours, theirs in self._train(train, memory_budget, held):
            for start in range(0, len(ours), rows):
                high, wide = ours[start : start + rows], theirs[start : start + rows]
                into = out[:, first + start : first + start + len(high)]
                into.copy_(self._tile(g, x, high, wide, weighed))
        return out

    def _train(
        self, train: Gradients, memory_budget: int | None, held: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number of the first row, and turned suffixes and prefixes from it on."""
        if self.rows is not None:
            yield 0, *self._falling(self.rows)
            return
        for part in row_parts(train, self.layer, memory_budget, held=held):
            yield part.start, *self._turned(train, part.factors, part.slopes)

    def _tile(
        self, g: Tensor, x: Tensor, high: Tensor, wide: Tensor, weighed: list[Tensor]
    ) -> Tensor:
        """Products `[b, n]` of turned queries with turned training rows."""
        found = g.new_zeros(len(g), len(high))
        rest = torch.zeros_like(found)
        edge, left = x.shape[1], iter(weighed)
        for block in self.blocks:
            if block.cols < edge:
                columns = slice(block.cols, edge)
                rest.addmm_(x[:, columns], wide[:, columns].t(), alpha=1 / self.damping)
                edge = block.cols
            if edge < x.shape[1]:
                found.addcmul_(g[:, block.rows] @ high[:, block.rows].t(), rest)
            for piece in block.pieces():
                found.addmm_(next(left), _outer(high, wide, piece).t())
        return found

    def _turned(
        self, gradients: Gradients, rows: Any, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """L^T g `[B, R]` and R^T x `[B, C]`, by falling eigenvalue."""
        form: Any = gradients.forms[self.layer]  # a linear layer, as `has_single_position` says
        return self._falling(turned_factors(self.basis, form, rows.widened(), slopes))

    def _falling(self, turned: OuterRows) -> tuple[Tensor, Tensor]:
        g, x = turned.g.float(), turned.x.float()
        return (
            g if self.basis.left is None else g.flip(1),
            x if self.basis.right is None else x.flip(1),
        )


def _outer(g: Tensor, x: Tensor, block: EigenBlock) -> Tensor:
    """The coordinates `[B, size]` of some rows and columns."""
    return (g[:, block.rows, None] * x[:, None, : block.cols]).flatten(1)


def single_position_influence(
    layer: str, fisher: LayerFisher, damping: Damping, *sides: Gradients
) -> SinglePositionInfluence | None:
    """The layer in eigencoordinates, if all sides keep prefixes and suffixes of one position."""
    basis = fisher.bases[0]
    added = damping.of(fisher.mean)
    if len(fisher.bases) > 1 or not isinstance(basis, MatrixBasis) or added <= 0:
        return None
    if not all(has_single_position(side, layer) for side in sides):
        return None
    values = basis.values[0]
    if basis.left is not None:
        values = values.flip(0)
    if basis.right is not None:
        values = values.flip(1)
    weights = (1 / (values + added)).float()
    rows = None if isinstance(fisher.rows, Tensor) else fisher.rows
    # An eigenvalue below this share of the damping counts as zero. It is the mean square of its
    # coordinate, so what that changes is of the order of the square of this share.
    return SinglePositionInfluence(
        layer, basis, added, weights, _blocks(values > 1e-3 * added), rows
    )


def has_single_position(gradients: Gradients, layer: str) -> bool:
    """Whether a linear layer's prefixes and suffixes are kept, one of each a row."""
    form = gradients.forms[layer]
    if not isinstance(form, Outer) or form.ones:
        return False
    return not gradients.block.schema.array(form.suffix).ragged


def _blocks(there: Tensor) -> tuple[EigenBlock, ...]:
    """All rows; columns up to the last that is there in these or later rows.

    >>> _blocks(torch.tensor([[False, True], [True, False], [False, False]]))
    (EigenBlock(start=0, stop=2, cols=2), EigenBlock(start=2, stop=3, cols=0))
    """
    last = (there * torch.arange(1, there.shape[1] + 1)).amax(1)
    most = last.flip(0).cummax(0).values.flip(0)
    cols = (-(-most // _STEP) * _STEP).clamp(max=there.shape[1])
    kinds, counts = torch.unique_consecutive(cols, return_counts=True)
    ends = counts.cumsum(0)
    found = zip((ends - counts).tolist(), ends.tolist(), kinds.tolist(), strict=True)
    return tuple(EigenBlock(start, stop, wide) for start, stop, wide in found)


def room_for_rows(memory_budget: float | str | None) -> int:
    """Bytes that the rows of one layer and their coordinates may take: half of the budget.

    A budget that is enough without kept rows must stay enough: the other half is left alone.
    """
    return (DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)) // 2


def empty_rows(
    gradients: Gradients,
    layer: str,
    bases: Sequence[Basis],
    room: int,
    spare: Tensor | None = None,
) -> CoordinateRows | None:
    """Where to keep the coordinates of a layer's rows; None where they do not fit into the room.

    Those of an embedding are as many as its table has values, most of them zero: never kept. What
    is `spare` is written over where it is large enough: new memory costs as much as what fills it.
    """
    form, count = gradients.forms[layer], len(gradients)
    if has_single_position(gradients, layer):
        _, high, wide = bases[0].values.shape
        if 4 * count * (high + wide) > room:
            return None
        return OuterRows(torch.empty(count, wide), torch.empty(count, high))
    size = sum(basis.values.numel() for basis in bases)
    if form.sparse or 4 * count * size > room:
        return None
    if spare is not None and len(spare) >= count * size:
        return spare[: count * size].view(count, size)
    return torch.empty(count, size)


@dataclass(frozen=True, slots=True, eq=False)
class KeptCoordinates:
    """A layer whose training rows are held as coordinates `[N, P]`."""

    layer: str
    fisher: LayerFisher
    rows: Tensor
    added: float
    """The damping."""

    def scores(self, asked: Gradients, positions: list[int]) -> Tensor:
        """Products `[b, N]` of some queries with all training rows; 2 P operations a pair."""
        factors = only_layer(asked, self.layer).rows(positions).factors[self.layer].widened()
        slopes = asked.slopes()
        some = None if slopes is None else slopes[positions]
        weighed = torch.empty(len(positions), self.rows.shape[1])
        at = 0
        for basis in self.fisher.bases:
            into = weighed[:, at : at + basis.values.numel()]
            weights = (1 / (basis.values + self.added)).float()
            for start, stop, found in coordinates(basis, asked.forms[self.layer], factors, some):
                into[start:stop] = (found * weights).flatten(1)
            at += basis.values.numel()
        return pairwise(weighed, self.rows)


def kept_coordinates(layer: str, fisher: LayerFisher, damping: Damping) -> KeptCoordinates | None:
    """The layer in the coordinates that were kept, if they were and mean something."""
    added = damping.of(fisher.mean)
    if not isinstance(fisher.rows, torch.Tensor) or added <= 0:
        return None
    return KeptCoordinates(layer, fisher, fisher.rows, added)
