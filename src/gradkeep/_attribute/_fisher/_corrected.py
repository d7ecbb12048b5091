"""Corrected eigenvalues: the second moment of every coordinate of the rows' gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._basis import MatrixBasis
from gradkeep._attribute._fisher._conv import by_channels, order
from gradkeep._attribute._fisher._layout import size_kept
from gradkeep._attribute._fisher._sums import by_positions, scaled, with_ones
from gradkeep.query import _operators
from gradkeep.query._factors import ConvRows, LookupRows, OuterRows
from gradkeep.query._forms import Conv, Lookup, Outer, Parameter
from gradkeep.query._tiles import RESTORED, tiles

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
    shape = (g.shape[1], x.shape[1])
    plain = Outer((Parameter("", shape),), "", "", d_in=shape[1], d_out=shape[0])
    moved = OuterRows(x, g, offsets)
    return _operators.squares(plain, moved, _ones(moved)).view(shape)


def _conv(basis: MatrixBasis, form: Conv, rows: ConvRows, slopes: Tensor | None) -> Tensor:
    out = torch.zeros_like(basis.values)
    at = order(form).argsort()
    right = None if basis.right is None else basis.right[:, at]
    for start, stop, groups in by_channels(form, rows):
        part = None if slopes is None else slopes[start:stop]
        for group, one in enumerate(groups):
            g = scaled(one.g, one.offsets, part)
            turned = None if right is None else right[group]
            left = None if basis.left is None else basis.left[group]
            out[group] += _linear(one.x, g, one.offsets, left, turned)
    return out if right is not None else out[:, :, order(form)]


def _restored(basis: Basis, form: Form, rows: Factors, slopes: Tensor | None) -> Tensor:
    out = torch.zeros_like(basis.values)
    for start, stop in tiles(len(rows), 2 * size_kept(form), 4, RESTORED):
        dense = _operators.restore(form, _operators.take(form, rows, start, stop))
        found = basis.coordinates(dense)
        if slopes is not None:
            found = found * slopes[start:stop].view(-1, *[1] * (found.dim() - 1)).to(found.dtype)
        out += found.square().sum(0)
    return out


def _ones(rows: OuterRows | LookupRows) -> Tensor:
    return rows.g.new_ones(1, len(rows))
