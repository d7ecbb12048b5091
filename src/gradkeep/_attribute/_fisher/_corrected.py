"""Corrected eigenvalues: the second moment of every coordinate of the rows' gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep._attribute._fisher._basis import MatrixBasis
from gradkeep._attribute._fisher._coordinates import coordinates
from gradkeep._attribute._fisher._sums import by_positions, scaled, with_ones
from gradkeep.query import _operators
from gradkeep.query._factors import LookupRows, OuterRows
from gradkeep.query._forms import Lookup, Outer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep._attribute._fisher._basis import Basis
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form


def squares(
    basis: Basis, form: Form, rows: Factors, slopes: Tensor | None, *, keep: Tensor | None = None
) -> Tensor:
    """Sums over rows of squared coordinates, in the shape of the basis' values.

    With one position a row, (L^T g)^2 (R^T x)^2 summed by one product; else the coordinates of
    every row are made, and written into `keep` `[B, size]` if they are wanted again.
    """
    if keep is None and isinstance(basis, MatrixBasis) and by_positions(form):
        match form, rows:
            case Outer(), OuterRows(offsets=None):
                return _one_position(basis, form, rows, slopes)
            case Lookup(), LookupRows():
                return _lookup(basis, form, rows, slopes)
    out = torch.zeros_like(basis.values)
    for start, stop, found in coordinates(basis, form, rows, slopes):
        if keep is not None:
            keep[start:stop] = found.flatten(1)
        out += found.square().sum(0)
    return out


def _one_position(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None
) -> Tensor:
    g, x = scaled(rows.g, None, slopes), with_ones(form, rows.x)
    g = g if basis.left is None else g @ basis.left[0].to(g.dtype)
    x = x if basis.right is None else x @ basis.right[0].to(x.dtype)
    return (g.square().t() @ x.square()).unsqueeze(0)


def _lookup(basis: MatrixBasis, form: Lookup, rows: LookupRows, slopes: Tensor | None) -> Tensor:
    g = scaled(rows.g, rows.offsets, slopes)
    if basis.right is not None:
        g = g @ basis.right[0].to(g.dtype)
    moved = LookupRows(rows.ids, g, rows.offsets)
    ones = g.new_ones(1, len(moved))
    return _operators.squares(form, moved, ones).view(basis.values.shape)
