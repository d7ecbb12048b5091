"""Second moments of a layer's factors: what its Kronecker factors are made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._conv import by_channels, even, order, width
from gradkeep._attribute._fisher._layout import FULL, SCRATCH, Matrix, Vector, layout
from gradkeep.query import _operators
from gradkeep.query._factors import ConvRows, LookupRows, OuterRows
from gradkeep.query._forms import Conv, Lookup, Outer
from gradkeep.query._segments import row_of, spans
from gradkeep.query._tiles import tiles

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form

WIDE = 4096
"""A side longer than this keeps its own coordinates: only the diagonal of its moments is made."""


_BAND = 64
"""Rows of a moment that are made at a time, at least."""


def by_positions(form: Form) -> bool:
    """Whether prefixes and suffixes are kept, so that the moments are those of K-FAC.

    Others (kept dense, of cut rank, used twice) have those of their gradient matrices instead.
    """
    return (isinstance(form, Outer) and not form.ones) or isinstance(form, Conv | Lookup)


def turned(form: Form) -> bool:
    """Whether it is a transposed convolution, whose patches are of the suffix."""
    return isinstance(form, Conv) and form.wide.endswith("suffix")


class MatrixSums:
    """Sums over rows of both sides' second moments, of one weight.

    From factors: of suffixes sum g g^T over all S positions / N, of prefixes sum x x^T / S, so
    that their Kronecker product has the size of the Fisher matrix. From gradients G: left = mean G G^T,
    right = mean G^T G, divided by the trace of one of them.
    """

    def __init__(self, piece: Matrix, form: Form) -> None:
        self.piece, self.form = piece, form
        self.factored = by_positions(form)
        self.left = _zeros(piece.groups, piece.rows)
        cols = width(form) if isinstance(form, Conv) else piece.cols
        self.right = _zeros(piece.groups, cols)
        if isinstance(form, Lookup):
            self.left = torch.zeros(1, piece.rows, dtype=torch.float64)
        self.rows = self.positions = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return 8 * (self.left.numel() + self.right.numel()) + 8 * self.piece.size

    def add(self, rows: Factors, slopes: Tensor | None) -> None:
        """Add some rows, whose gradients are to be multiplied with slopes `[B]`."""
        self.rows += len(rows)
        if not self.factored:
            self._add_gradients(rows, slopes)
            return
        match self.form, rows:
            case Outer(), OuterRows():
                x = with_ones(self.form, rows.x)
                self._add(0, x, scaled(rows.g, rows.offsets, slopes))
                self.positions += len(rows.x)
            case Conv(), ConvRows():
                for start, stop, groups in by_channels(self.form, rows):
                    part = None if slopes is None else slopes[start:stop]
                    for group, one in enumerate(groups):
                        x, g = one.x, one.g
                        if turned(self.form):
                            x = scaled(x, one.offsets, part)
                        else:
                            g = scaled(g, one.offsets, part)
                        self._add(group, x, g)
                    self.positions += (stop - start) * self.form.positions
            case Lookup(), LookupRows():
                self.left[0] += torch.bincount(rows.ids, minlength=self.form.rows)
                self.right[0] += _moment(scaled(rows.g, rows.offsets, slopes), self.right[0])
                self.positions += len(rows.ids)
            case _:
                raise AssertionError(self.form)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Left and right moments, `[G, d, d]` or their diagonals `[G, d]`."""
        rows, positions = max(1, self.rows), max(1, self.positions)
        if isinstance(self.form, Lookup) or turned(self.form):
            return self.left / positions, self._right() / rows
        if self.factored:
            return self.left / rows, self._right() / positions
        left, right = self.left / rows, self.right / rows
        size = right if right.dim() == 2 else right.diagonal(dim1=1, dim2=2)
        trace = size.sum(1)
        return left, right / trace.clamp(min=torch.finfo(torch.float64).tiny).view(
            -1, *[1] * (right.dim() - 1)
        )

    def _right(self) -> Tensor:
        """The moments of prefixes, columns in the order of the weight."""
        if not isinstance(self.form, Conv):
            return self.right
        at = order(self.form)
        return self.right[:, at] if self.right.dim() == 2 else self.right[:, at][:, :, at]

    def _add(self, group: int, x: Tensor, g: Tensor) -> None:
        self.left[group] += _moment(g, self.left[group])
        self.right[group] += _moment(x, self.right[group])

    def _add_gradients(self, rows: Factors, slopes: Tensor | None) -> None:
        for start, stop in tiles(len(rows), self.piece.size, 8, SCRATCH):
            part = _operators.take(self.form, rows, start, stop)
            dense = _operators.restore(self.form, part)
            if slopes is not None:
                dense = dense * slopes[start:stop, None].to(dense.dtype)
            found = self.piece.taken(dense)
            for group in range(self.piece.groups):
                one = found[:, group]
                high = one.transpose(1, 2).reshape(-1, self.piece.rows)
                self.left[group] += _moment(high, self.left[group])
                self.right[group] += _moment(one.reshape(-1, self.piece.cols), self.right[group])


class VectorSums:
    """The mean of v v^T, or only its diagonal where v is long."""

    def __init__(self, piece: Vector, form: Form) -> None:
        self.piece, self.form, self.rows = piece, form, 0
        size = (piece.size,) if piece.size > FULL else (piece.size, piece.size)
        self.moment = torch.zeros(size, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of the moment."""
        return 8 * self.moment.numel()

    def add(self, rows: Factors, slopes: Tensor | None) -> None:
        """Add some rows, whose gradients are to be multiplied with slopes `[B]`."""
        self.rows += len(rows)
        values = sum(piece.size for piece in layout(self.form))
        for start, stop in tiles(len(rows), values, 8, SCRATCH):
            part = _operators.take(self.form, rows, start, stop)
            found = self.piece.taken(_operators.restore(self.form, part))
            if slopes is not None:
                found = found * slopes[start:stop, None].to(found.dtype)
            self.moment += _moment(found, self.moment)

    def mean(self) -> Tensor:
        """`[size, size]` or `[size]`"""
        return self.moment / max(1, self.rows)


def with_ones(form: Outer, x: Tensor) -> Tensor:
    """The prefix `[S, C]` with the column of ones that the bias reads."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1) if form.bias and not form.ones else x


def scaled(g: Tensor, offsets: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Suffixes `[S, d]` times the slopes of their rows."""
    if slopes is None:
        return g
    where = slopes if offsets is None else slopes[row_of(spans(offsets, len(g)), slopes.device)]
    return g * where[:, None].to(g.dtype)


def _zeros(groups: int, size: int) -> Tensor:
    shape = (groups, size) if size > WIDE else (groups, size, size)
    return torch.zeros(shape, dtype=torch.float64)


def _moment(values: Tensor, like: Tensor) -> Tensor:
    """Sum of v v^T over `[S, d]`, or its diagonal.

    The matrix is symmetric: a band of rows is multiplied from the diagonal on, and mirrored.
    """
    if like.dim() == 1:
        return values.square().sum(0)
    size = values.shape[1]
    step = max(_BAND, even(math.ceil(size / 4)))
    if size <= step:
        return values.t() @ values
    out = values.new_empty(size, size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        band = values[:, start:stop].t() @ values[:, start:]
        out[start:stop, start:] = band
        out[stop:, start:stop] = band[:, stop - start :].t()
    return out
