"""Corrected eigenvalues: the second moment of every coordinate of the rows' gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._basis import MatrixBasis
from gradkeep._attribute._fisher._conv import by_channels, order, width
from gradkeep._attribute._fisher._layout import SCRATCH, size_kept
from gradkeep._attribute._fisher._sums import by_positions, scaled, with_ones
from gradkeep.query import _operators
from gradkeep.query._factors import ConvRows, LookupRows, OuterRows
from gradkeep.query._forms import Conv, Lookup, Outer, Parameter
from gradkeep.query._tiles import CACHED, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep._attribute._fisher._basis import Basis
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form

    Side = Tensor | None


def squares(basis: Basis, form: Form, rows: Factors, slopes: Tensor | None) -> Tensor:
    """Sums over rows of squared coordinates, in the shape of the basis' values.

    With one position a row, (L^T g)^2 (R^T x)^2 summed by one product; else the rotated factors
    are multiplied out, a tile of rows at a time; what has no factors is restored and rotated.
    """
    if isinstance(basis, MatrixBasis) and by_positions(form):
        match form, rows:
            case Outer(), OuterRows():
                left = None if basis.left is None else basis.left[0]
                right = None if basis.right is None else basis.right[0]
                g = scaled(rows.g, rows.offsets, slopes)
                found = _linear(with_ones(form, rows.x), g, rows.offsets, left, right)
                return found.unsqueeze(0)
            case Conv(), ConvRows():
                return _conv(basis, form, rows, slopes)
            case Lookup(), LookupRows():
                g = scaled(rows.g, rows.offsets, slopes)
                if basis.right is not None:
                    g = g @ basis.right[0].to(g.dtype)
                moved = LookupRows(rows.ids, g, rows.offsets)
                return _operators.squares(form, moved, _ones(moved)).view(basis.values.shape)
    return _restored(basis, form, rows, slopes)


def _linear(x: Tensor, g: Tensor, offsets: Tensor | None, left: Side, right: Side) -> Tensor:
    """Of prefixes `[S, C]` and suffixes `[S, R]`, as `[R, C]`."""
    g = g if left is None else g @ left.to(g.dtype)
    x = x if right is None else x @ right.to(x.dtype)
    if offsets is None:
        return g.square().t() @ x.square()
    shape = (g.shape[1], x.shape[1])
    plain = Outer((Parameter("", shape),), "", "", d_in=shape[1], d_out=shape[0])
    rows, out = OuterRows(x, g, offsets), x.new_zeros(shape)
    for start, stop in tiles(len(rows), shape[0] * shape[1], x.element_size(), 2 * CACHED):
        some = _operators.take(plain, rows, start, stop)
        out += _operators.restore(plain, some).square_().sum(0).view(shape)
    return out


def _conv(basis: MatrixBasis, form: Conv, rows: ConvRows, slopes: Tensor | None) -> Tensor:
    groups, high, cols = basis.values.shape
    # The weight's columns among those of the patches; the rest stay zero.
    right = torch.zeros(groups, width(form), width(form), dtype=rows.wide.dtype)
    turned = torch.eye(cols).expand(groups, cols, cols) if basis.right is None else basis.right
    right[:, order(form), :cols] = turned.to(right.dtype)
    out = torch.zeros(groups, high, width(form), dtype=torch.float64)
    for start, stop, parts in by_channels(form, rows):
        part = None if slopes is None else slopes[start:stop]
        for group, one in enumerate(parts):
            g = scaled(one.g, one.offsets, part)
            left = None if basis.left is None else basis.left[group]
            out[group] += _linear(one.x, g, one.offsets, left, right[group])
    return out[:, :, :cols]


def _restored(basis: Basis, form: Form, rows: Factors, slopes: Tensor | None) -> Tensor:
    out = torch.zeros_like(basis.values)
    for start, stop in tiles(len(rows), 2 * size_kept(form), 4, SCRATCH):
        dense = _operators.restore(form, _operators.take(form, rows, start, stop))
        found = basis.coordinates(dense)
        if slopes is not None:
            found = found * slopes[start:stop].view(-1, *[1] * (found.dim() - 1)).to(found.dtype)
        out += found.square().sum(0)
    return out


def _ones(rows: OuterRows | LookupRows) -> Tensor:
    return rows.g.new_ones(1, len(rows))
