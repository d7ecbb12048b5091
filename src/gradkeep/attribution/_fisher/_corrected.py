"""Corrected eigenvalues: the second moment of every coordinate of the rows' gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._fisher._basis import MatrixBasis
from gradkeep.attribution._fisher._coordinates import coordinates, turned_factors
from gradkeep.attribution._fisher._sums import scaled
from gradkeep.factors import Lookup, LookupRows, Outer, OuterRows

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._fisher._basis import Basis
    from gradkeep.attribution._fisher._curvature import Kept
    from gradkeep.factors import AnyForm, Rows


def squares(
    basis: Basis, form: AnyForm, rows: Rows, slopes: Tensor | None, *, keep: Kept | None = None
) -> Tensor:
    """Sums over rows of squared coordinates, in the shape of the basis' values.

    With one position a row, (L^T g)^2 (R^T x)^2 summed by one product; else the coordinates of
    every row are made. Where they are wanted again, they are written into `keep` `[B, size]`, or
    both factors of them.
    """
    if not isinstance(keep, torch.Tensor) and isinstance(basis, MatrixBasis) and form.factored:
        match form, rows:
            case Outer(), OuterRows(offsets=None):
                return _one_position(basis, form, rows, slopes, keep)
            case Lookup(), LookupRows():
                return _lookup(basis, form, rows, slopes)
    out = torch.zeros_like(basis.values)
    for start, stop, found in coordinates(basis, form, rows, slopes):
        if isinstance(keep, torch.Tensor):
            keep[start:stop] = found.flatten(1)
        out += found.square().sum(0)
    return out


def _one_position(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None, keep: Kept | None
) -> Tensor:
    turned = turned_factors(basis, form, rows, slopes)
    if isinstance(keep, OuterRows):
        keep.g[:], keep.x[:] = turned.g, turned.x
    return (turned.g.square().t() @ turned.x.square()).unsqueeze(0)


def _lookup(basis: MatrixBasis, form: Lookup, rows: LookupRows, slopes: Tensor | None) -> Tensor:
    g = scaled(rows.g, rows.offsets, slopes)
    if basis.right is not None:
        g = g @ basis.right[0].to(g.dtype)
    moved = LookupRows(rows.ids, g, rows.offsets)
    ones = g.new_ones(1, len(moved))
    return form.weighted_squares(moved, ones).view(basis.values.shape)
