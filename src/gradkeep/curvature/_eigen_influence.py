"""Influence in eigencoordinates, of stored coordinates and of rows with one position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradkeep._budgets import parse_bytes
from gradkeep.curvature._basis import MatrixBasis, coordinates, rotated_factors
from gradkeep.curvature._row_parts import only_layer, row_parts
from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.query._engine import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.curvature._basis import Basis
    from gradkeep.curvature._fisher import CoordinateRows, Damping, LayerFisher
    from gradkeep.query import Gradients


@dataclass(frozen=True, slots=True)
class EigenBlock:
    """Some rows, and the number of their leading columns with their own weights."""

    start: int
    stop: int
    cols: int

    @property
    def rows(self) -> slice:
        """Slice of the rows."""
        return slice(self.start, self.stop)

    def pieces(self) -> list[EigenBlock]:
        """Split into parts of 4096 coordinates, which stay in the cache."""
        if not self.cols:
            return []
        step = max(1, 4096 // self.cols)
        starts = range(self.start, self.stop, step)
        return [EigenBlock(at, min(at + step, self.stop), self.cols) for at in starts]


@dataclass(frozen=True, slots=True, eq=False)
class SinglePositionInfluence:
    """A layer whose gradients g x^T have coordinates (L^T g)(R^T x)^T, by descending eigenvalue.

    The leading coordinates are multiplied one by one with 1 / (eigenvalue + damping). For all others that is
    1 / damping, and their sum is a product of products of suffixes and prefixes.
    """

    layer: str
    basis: MatrixBasis
    damping: float
    weights: Tensor
    """1 / (eigenvalue + damping) `[R, C]`"""
    blocks: tuple[EigenBlock, ...]
    """All rows, with ever fewer columns."""
    rows: OuterRows | None = None
    """Rotated factors of all training rows, if they were stored."""

    @property
    def leading_size(self) -> int:
        """Number of coordinates K that are multiplied one by one."""
        return sum((block.stop - block.start) * block.cols for block in self.blocks)

    def scores(
        self, queries: Gradients, train: Gradients, positions: list[int], memory_budget: int | None
    ) -> Tensor:
        """Return products `[b, N]` of some queries with all training rows; 2 K operations per pair."""
        some = only_layer(queries, self.layer).rows(positions).factors[self.layer]
        slopes = queries.slopes()
        g, x = self._rotated(queries, some, None if slopes is None else slopes[positions])
        weighed = [
            _outer(g, x, piece) * self.weights[piece.rows, : piece.cols].flatten()
            for block in self.blocks
            for piece in block.pieces()
        ]
        out = torch.empty(len(positions), len(train))
        widest = max((part.shape[1] for part in weighed), default=1)
        free_bytes = DEFAULT_BUDGET if memory_budget is None else memory_budget
        # 512 training rows at a time stay in the cache.
        rows = max(1, min(512, free_bytes // 16 // (4 * widest)))
        held = 4 * (len(g) * self.leading_size + 2 * out.numel() + rows * widest)
        for first, ours, theirs in self._train(train, memory_budget, held):
            for start in range(0, len(ours), rows):
                high, wide = ours[start : start + rows], theirs[start : start + rows]
                into = out[:, first + start : first + start + len(high)]
                into.copy_(self._tile(g, x, high, wide, weighed))
        return out

    def _train(
        self, train: Gradients, memory_budget: int | None, held: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of the first row, and rotated suffixes and prefixes from it on."""
        if self.rows is not None:
            yield 0, *self._descending(self.rows)
            return
        for part in row_parts(train, self.layer, memory_budget, held=held):
            yield part.start, *self._rotated(train, part.factors, part.slopes)

    def _tile(
        self, g: Tensor, x: Tensor, high: Tensor, wide: Tensor, weighed: list[Tensor]
    ) -> Tensor:
        """Return products `[b, n]` of rotated queries with rotated training rows."""
        scores = g.new_zeros(len(g), len(high))
        rest = torch.zeros_like(scores)
        edge, remaining = x.shape[1], iter(weighed)
        for block in self.blocks:
            if block.cols < edge:
                columns = slice(block.cols, edge)
                rest.addmm_(x[:, columns], wide[:, columns].t(), alpha=1 / self.damping)
                edge = block.cols
            if edge < x.shape[1]:
                scores.addcmul_(g[:, block.rows] @ high[:, block.rows].t(), rest)
            for piece in block.pieces():
                scores.addmm_(next(remaining), _outer(high, wide, piece).t())
        return scores

    def _rotated(
        self, gradients: Gradients, rows: Any, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """L^T g `[B, R]` and R^T x `[B, C]`, by falling eigenvalue."""
        form: Any = gradients.forms[self.layer]  # a linear layer, see `has_single_position`
        return self._descending(rotated_factors(self.basis, form, rows.widened(), slopes))

    def _descending(self, rotated: OuterRows) -> tuple[Tensor, Tensor]:
        g, x = rotated.g.float(), rotated.x.float()
        return (
            g if self.basis.row_vectors is None else g.flip(1),
            x if self.basis.col_vectors is None else x.flip(1),
        )


def _outer(g: Tensor, x: Tensor, block: EigenBlock) -> Tensor:
    """Return the coordinates `[B, size]` of some rows and columns."""
    return (g[:, block.rows, None] * x[:, None, : block.cols]).flatten(1)


def single_position_influence(
    layer: str, fisher: LayerFisher, damping: Damping, *sides: Gradients
) -> SinglePositionInfluence | None:
    """Return the layer in eigencoordinates if all sides store prefixes and suffixes of one position."""
    basis = fisher.bases[0]
    added = damping.of(fisher.mean)
    if len(fisher.bases) > 1 or not isinstance(basis, MatrixBasis) or added <= 0:
        return None
    if not all(has_single_position(side, layer) for side in sides):
        return None
    values = basis.values[0]
    if basis.row_vectors is not None:
        values = values.flip(0)
    if basis.col_vectors is not None:
        values = values.flip(1)
    weights = (1 / (values + added)).float()
    rows = None if isinstance(fisher.rows, Tensor) else fisher.rows
    # Eigenvalues below 1e-3 of the damping count as zero. An eigenvalue is the mean square of its
    # coordinate, so the error is of the order of 1e-6.
    return SinglePositionInfluence(
        layer, basis, added, weights, _blocks(values > 1e-3 * added), rows
    )


def has_single_position(gradients: Gradients, layer: str) -> bool:
    """Return True if a linear layer stores one prefix and one suffix per row."""
    form = gradients.forms[layer]
    if not isinstance(form, Outer) or form.ones:
        return False
    return not gradients.block.schema.array(form.suffix).ragged


def _blocks(is_large: Tensor) -> tuple[EigenBlock, ...]:
    """Group rows by the last column that is True in these or later rows.

    >>> _blocks(torch.tensor([[False, True], [True, False], [False, False]]))
    (EigenBlock(start=0, stop=2, cols=2), EigenBlock(start=2, stop=3, cols=0))
    """
    last = (is_large * torch.arange(1, is_large.shape[1] + 1)).amax(1)
    most = last.flip(0).cummax(0).values.flip(0)
    # In steps of 16, so that neighboring rows have equally many.
    cols = (-(-most // 16) * 16).clamp(max=is_large.shape[1])
    kinds, counts = torch.unique_consecutive(cols, return_counts=True)
    ends = counts.cumsum(0)
    bounds = zip((ends - counts).tolist(), ends.tolist(), kinds.tolist(), strict=True)
    return tuple(EigenBlock(start, stop, wide) for start, stop, wide in bounds)


def room_for_rows(memory_budget: float | str | None) -> int:
    """Return the bytes for the rows of one layer and their coordinates: half of the budget.

    A budget that suffices without stored rows must still suffice, so the other half stays free.
    """
    return (DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)) // 2


def empty_rows(
    gradients: Gradients,
    layer: str,
    bases: Sequence[Basis],
    free_bytes: int,
    spare: Tensor | None = None,
) -> CoordinateRows | None:
    """Allocate the coordinates of a layer's rows; None if they do not fit into the room.

    Those of an embedding are as many as its table has values, mostly zero, and never stored. `spare` memory is
    reused if it is large enough: new memory costs as much as filling it.
    """
    form, count = gradients.forms[layer], len(gradients)
    if has_single_position(gradients, layer):
        _, high, wide = bases[0].values.shape
        if 4 * count * (high + wide) > free_bytes:
            return None
        return OuterRows(torch.empty(count, wide), torch.empty(count, high))
    size = sum(basis.values.numel() for basis in bases)
    if form.sparse or 4 * count * size > free_bytes:
        return None
    if spare is not None and len(spare) >= count * size:
        return spare[: count * size].view(count, size)
    return torch.empty(count, size)


@dataclass(frozen=True, slots=True, eq=False)
class StoredCoordinates:
    """A layer whose training rows are held as coordinates `[N, P]`."""

    layer: str
    fisher: LayerFisher
    rows: Tensor
    added: float
    """The damping."""

    def scores(self, queries: Gradients, positions: list[int]) -> Tensor:
        """Return products `[b, N]` of some queries with all training rows; 2 P operations per pair."""
        factors = only_layer(queries, self.layer).rows(positions).factors[self.layer].widened()
        slopes = queries.slopes()
        some = None if slopes is None else slopes[positions]
        weighed = torch.empty(len(positions), self.rows.shape[1])
        at = 0
        for basis in self.fisher.bases:
            into = weighed[:, at : at + basis.values.numel()]
            weights = (1 / (basis.values + self.added)).float()
            for start, stop, values in coordinates(basis, queries.forms[self.layer], factors, some):
                into[start:stop] = (values * weights).flatten(1)
            at += basis.values.numel()
        return pairwise(weighed, self.rows)


def stored_coordinates(
    layer: str, fisher: LayerFisher, damping: Damping
) -> StoredCoordinates | None:
    """Return the layer in its stored coordinates, if there are any and the damping is positive."""
    added = damping.of(fisher.mean)
    if not isinstance(fisher.rows, torch.Tensor) or added <= 0:
        return None
    return StoredCoordinates(layer, fisher, fisher.rows, added)
