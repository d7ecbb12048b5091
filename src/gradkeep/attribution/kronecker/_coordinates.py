"""Eigencoordinates of rows, made from turned factors, and sums of their squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.factors import (
    CACHED,
    Convolution,
    ConvolutionRows,
    Lookup,
    LookupRows,
    Outer,
    OuterRows,
    Parameter,
    tiles,
)
from gradkeep.factors.kronecker import MatrixBasis, scaled_suffixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gradkeep.attribution.kronecker._fisher import CoordinateRows
    from gradkeep.factors import AnyForm, GradientRows
    from gradkeep.factors.kronecker import Basis

    Tile = tuple[int, int, Tensor]


def coordinates(
    basis: Basis, form: AnyForm, rows: GradientRows, slopes: Tensor | None
) -> Iterator[Tile]:
    """`(start, stop, [stop - start, *values])` of all rows, a tile that stays in the cache a time.

    Of factors T (R^2 + C^2 + R C) products a row; what has none is restored and turned.
    """
    if isinstance(basis, MatrixBasis) and form.factored and form.kind in _COORDINATES:
        return _COORDINATES[form.kind](basis, form, rows, slopes)
    return _of_restored(basis, form, rows, slopes)


def turned_factors(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None
) -> OuterRows:
    """Suffixes L^T g `[S, R]` and prefixes R^T x `[S, C]`, the ones of the bias among them."""
    g, x = scaled_suffixes(rows.g, rows.offsets, slopes), form.with_ones(rows.x)
    g = g if basis.left is None else g @ basis.left[0].to(g.dtype)
    x = x if basis.right is None else x @ basis.right[0].to(x.dtype)
    return OuterRows(x, g, rows.offsets)


def _of_outer(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None
) -> Iterator[Tile]:
    turned = turned_factors(basis, form, rows, slopes)
    high, cols = turned.g.shape[1], turned.x.shape[1]
    plain = Outer((Parameter("", (high, cols)),), "", "", d_in=cols, d_out=high)
    for start, stop in tiles(len(rows), high * cols, turned.x.element_size(), 2 * CACHED):
        some = plain.restore(turned.take(start, stop))
        yield start, stop, some.view(-1, 1, high, cols)


def _of_conv(
    basis: MatrixBasis, form: Convolution, rows: ConvolutionRows, slopes: Tensor | None
) -> Iterator[Tile]:
    """To turn patches is to convolve with the eigenvectors: they are never laid out."""
    if basis.right is None:
        yield from _of_restored(basis, form, rows, slopes)
        return
    groups, high, cols = basis.values.shape
    dtype, flat = rows.wide.dtype, [0] * len(form.kernel)
    inner = form.channels // form.groups
    sides = basis.right.mT.to(dtype)
    filters = sides[:, :, : inner * form.taps].reshape(groups * cols, inner, *form.kernel)
    ones = sides[:, :, -1].reshape(-1) if form.bias == "narrow" else None
    values = groups * cols * form.positions + form.padded_values
    for start, stop in tiles(len(rows), values, rows.wide.element_size(), 2 * CACHED):
        count = stop - start
        pixels = form.padded(rows.wide[start:stop])
        x = torch.ops.aten.convolution(
            pixels, filters, ones, form.stride, flat, form.dilation, False, flat, groups
        )
        g = rows.narrow[start:stop].reshape(count, groups, high, form.positions)
        if slopes is not None:
            g = g * slopes[start:stop].view(-1, 1, 1, 1).to(g.dtype)
        if basis.left is not None:
            g = basis.left.mT.to(g.dtype) @ g
        yield start, stop, g @ x.view(count, groups, cols, form.positions).mT


def _of_restored(
    basis: Basis, form: AnyForm, rows: GradientRows, slopes: Tensor | None
) -> Iterator[Tile]:
    for start, stop in tiles(len(rows), 2 * form.restored_size, 4, 8 * CACHED):
        dense = form.restore(rows.take(start, stop))
        found = basis.coordinates(dense)
        if slopes is not None:
            found = found * slopes[start:stop].view(-1, *[1] * (found.dim() - 1)).to(found.dtype)
        yield start, stop, found


def coordinate_squares(
    basis: Basis,
    form: AnyForm,
    rows: GradientRows,
    slopes: Tensor | None,
    *,
    keep: CoordinateRows | None = None,
) -> Tensor:
    """Sums over rows of squared coordinates, in the shape of the basis' values.

    With one position a row, (L^T g)^2 (R^T x)^2 summed by one product; else the coordinates of
    every row are made. Where they are wanted again, they are written into `keep` `[B, size]`, or
    both factors of them.
    """
    by_sides = form.factored and form.kind in _SQUARES and isinstance(basis, MatrixBasis)
    if by_sides and not isinstance(keep, torch.Tensor):
        direct = _SQUARES[form.kind](basis, form, rows, slopes, keep)
        if direct is not None:
            return direct
    out = torch.zeros_like(basis.values)
    for start, stop, found in coordinates(basis, form, rows, slopes):
        if isinstance(keep, torch.Tensor):
            keep[start:stop] = found.flatten(1)
        out += found.square().sum(0)
    return out


def _linear_squares(
    basis: MatrixBasis,
    form: Outer,
    rows: OuterRows,
    slopes: Tensor | None,
    keep: CoordinateRows | None,
) -> Tensor | None:
    if rows.offsets is not None:
        return None
    turned = turned_factors(basis, form, rows, slopes)
    if keep is not None and not isinstance(keep, torch.Tensor):
        keep.g[:], keep.x[:] = turned.g, turned.x
    return (turned.g.square().t() @ turned.x.square()).unsqueeze(0)


def _embedding_squares(
    basis: MatrixBasis,
    form: Lookup,
    rows: LookupRows,
    slopes: Tensor | None,
    keep: CoordinateRows | None,
) -> Tensor:
    del keep
    g = scaled_suffixes(rows.g, rows.offsets, slopes)
    if basis.right is not None:
        g = g @ basis.right[0].to(g.dtype)
    moved = LookupRows(rows.ids, g, rows.offsets)
    ones = g.new_ones(1, len(moved))
    return form.weighted_squares(moved, ones).view(basis.values.shape)


_COORDINATES: dict[str, Callable[..., Iterator[Tile]]] = {"outer": _of_outer, "conv": _of_conv}
_SQUARES: dict[str, Callable[..., Tensor | None]] = {
    "outer": _linear_squares,
    "lookup": _embedding_squares,
}
"""Which forms have a way of their own; None: these rows have not."""
