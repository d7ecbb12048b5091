"""Second moments of a layer's factors: what its Kronecker factors are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kronecker._patch_moments import (
    PatchMoments,
    PixelMoments,
    moment,
    whole,
    zeros,
)
from gradkeep.factors import (
    CACHED,
    WHOLE,
    Convolution,
    ConvolutionRows,
    Lookup,
    LookupRows,
    Outer,
    OuterRows,
    WeightMatrix,
    WeightVector,
    row_of,
    spans,
    tiles,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors import AnyForm, GradientRows


class MatrixMoments:
    """Sums over rows of both sides' second moments, of one weight.

    From factors: of suffixes sum g g^T over all S positions / N, of prefixes sum x x^T / S, so
    that their Kronecker product has the size of the Fisher matrix. From gradients G: left = mean G G^T,
    right = mean G^T G, divided by the trace of one of them.
    """

    def __init__(self, piece: WeightMatrix, form: AnyForm, *, room: int = 0) -> None:
        self.piece, self.form = piece, form
        self.factored = form.factored
        self.left = zeros(piece.groups, piece.rows)
        self.patches: PixelMoments | PatchMoments | None = None
        if isinstance(form, Convolution):
            self.patches = _patch_moments(piece, form, room)
        else:
            self.right = zeros(piece.groups, piece.cols)
        if isinstance(form, Lookup):
            self.left = torch.zeros(1, piece.rows, dtype=torch.float64)
        self.rows = self.positions = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        right = 8 * self.right.numel() if self.patches is None else self.patches.nbytes
        return 8 * self.left.numel() + right + 8 * self.piece.size

    def add(self, rows: GradientRows, slopes: Tensor | None) -> None:
        """Add some rows, whose gradients are to be multiplied with slopes `[B]`."""
        self.rows += len(rows)
        if not self.factored:
            self._add_gradients(rows, slopes)
            return
        match self.form, rows:
            case Outer(), OuterRows():
                x = self.form.with_ones(rows.x)
                self.left[0] += moment(scaled_suffixes(rows.g, rows.offsets, slopes), self.left[0])
                self.right[0] += moment(x, self.right[0])
                self.positions += len(rows.x)
            case Convolution(), ConvolutionRows():
                self._add_pixels(self.form, rows, slopes)
            case Lookup(), LookupRows():
                self.left[0] += torch.bincount(rows.ids, minlength=self.form.rows)
                self.right[0] += moment(
                    scaled_suffixes(rows.g, rows.offsets, slopes), self.right[0]
                )
                self.positions += len(rows.ids)
            case _:
                raise AssertionError(self.form)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Left and right moments, `[G, d, d]` or their diagonals `[G, d]`."""
        rows, positions = max(1, self.rows), max(1, self.positions)
        if isinstance(self.form, Lookup) or (
            isinstance(self.form, Convolution) and self.form.transposed
        ):
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
        return self.right if self.patches is None else self.patches.moments()

    def _add_pixels(self, form: Convolution, rows: ConvolutionRows, slopes: Tensor | None) -> None:
        assert self.patches is not None
        wide, narrow = rows.wide, rows.narrow
        if slopes is not None:
            each = slopes.view(-1, *[1] * (wide.dim() - 1)).to(wide.dtype)
            if form.transposed:
                wide = wide * each
            else:
                narrow = narrow * each
        self.patches.add(wide)
        # By filters, not by positions: runs of positions are copied faster.
        filters = narrow.transpose(0, 1).reshape(form.groups, self.piece.rows, -1)
        for into, one in zip(self.left, filters, strict=True):
            into += moment(one.t(), into)
        self.positions += len(rows) * form.positions

    def _add_gradients(self, rows: GradientRows, slopes: Tensor | None) -> None:
        for start, stop in tiles(len(rows), self.piece.size, 8, 8 * CACHED):
            part = rows.take(start, stop)
            dense = self.form.restore(part)
            if slopes is not None:
                dense = dense * slopes[start:stop, None].to(dense.dtype)
            found = self.piece.taken(dense)
            for group in range(self.piece.groups):
                one = found[:, group]
                high = one.transpose(1, 2).reshape(-1, self.piece.rows)
                self.left[group] += moment(high, self.left[group])
                self.right[group] += moment(one.reshape(-1, self.piece.cols), self.right[group])


def _patch_moments(
    piece: WeightMatrix, form: Convolution, room: int
) -> PixelMoments | PatchMoments:
    """Pixel by pixel where that is less work, and there is room for it."""
    fits = whole(piece.cols) and PixelMoments.bytes_of(form) <= room
    if fits and PixelMoments.operations(form) < PatchMoments.operations(form):
        return PixelMoments(form)
    return PatchMoments(form)


class VectorMoments:
    """The mean of v v^T, or only its diagonal where v is long."""

    def __init__(self, piece: WeightVector, form: AnyForm) -> None:
        self.piece, self.form, self.rows = piece, form, 0
        size = (piece.size,) if piece.size > WHOLE else (piece.size, piece.size)
        self.moment = torch.zeros(size, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of the moment."""
        return 8 * self.moment.numel()

    def add(self, rows: GradientRows, slopes: Tensor | None) -> None:
        """Add some rows, whose gradients are to be multiplied with slopes `[B]`."""
        self.rows += len(rows)
        values = self.form.restored_size
        for start, stop in tiles(len(rows), values, 8, 8 * CACHED):
            part = rows.take(start, stop)
            found = self.piece.taken(self.form.restore(part))
            if slopes is not None:
                found = found * slopes[start:stop, None].to(found.dtype)
            self.moment += moment(found, self.moment)

    def mean(self) -> Tensor:
        """`[size, size]` or `[size]`"""
        return self.moment / max(1, self.rows)


def scaled_suffixes(g: Tensor, offsets: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Suffixes `[S, d]` times the slopes of their rows."""
    if slopes is None:
        return g
    where = slopes if offsets is None else slopes[row_of(spans(offsets, len(g)), slopes.device)]
    return g * where[:, None].to(g.dtype)
