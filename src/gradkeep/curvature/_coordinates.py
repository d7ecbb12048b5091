"""Eigencoordinates of rows, computed from rotated factors, and sums of their squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from gradkeep.curvature._basis import MatrixBasis
from gradkeep.curvature._moments import scaled_suffixes
from gradkeep.factors._arithmetic import CACHED, tiles
from gradkeep.factors._form import Parameter, has_factors
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gradkeep.curvature._basis import Basis
    from gradkeep.curvature._fisher import CoordinateRows
    from gradkeep.factors._convolution import Convolution, ConvolutionRows
    from gradkeep.factors._form import AnyForm, GradientRows

    Tile = tuple[int, int, Tensor]


def coordinates(
    basis: Basis, form: AnyForm, rows: GradientRows, slopes: Tensor | None
) -> Iterator[Tile]:
    """Yield `(start, stop, [stop - start, *values])` for all rows, in tiles that stay in the cache.

    From factors T (R^2 + C^2 + R C) products per row; other rows are restored and rotated.
    """
    if isinstance(basis, MatrixBasis) and has_factors(form) and form.kind in _COORDINATES:
        yield from _COORDINATES[form.kind](basis, form, rows, slopes)
    else:
        yield from _of_restored(basis, form, rows, slopes)


def rotated_factors(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None
) -> OuterRows:
    """Return suffixes L^T g `[S, R]` and prefixes R^T x `[S, C]`, including the ones of the bias."""
    g, x = scaled_suffixes(rows.g, rows.offsets, slopes), rows.x
    g = g if basis.row_vectors is None else _times(g, basis.row_vectors[0])
    x = form.with_ones(x) if basis.col_vectors is None else _times(x, basis.col_vectors[0])
    return OuterRows(x, g, rows.offsets)


def _times(values: Tensor, vectors: Tensor) -> Tensor:
    """Multiply `[S, C]` with `[C, C]`; for `[S, C - 1]` the last column is ones, without building it.

    Columns are padded to a multiple of 16; other widths take up to twice as long.
    """
    size = vectors.shape[1]
    filled = functional.pad(vectors.to(values.dtype), (0, -size % 16))
    width = values.shape[1]
    if width == len(vectors):
        return (values @ filled)[:, :size]
    return torch.addmm(filled[-1], values, filled[:width])[:, :size]


def _of_outer(
    basis: MatrixBasis, form: Outer, rows: OuterRows, slopes: Tensor | None
) -> Iterator[Tile]:
    _, high, cols = basis.values.shape
    plain = Outer((Parameter("", (high, cols)),), "", "", d_in=cols, d_out=high)
    size = rows.g.element_size()
    # 4096 positions at a time: enough for a fast product that stays in the cache.
    for first, last in rows.spans.tiles(4096):
        some = None if slopes is None else slopes[first:last]
        rotated = rotated_factors(basis, form, rows.take(first, last), some)
        for start, stop in tiles(last - first, high * cols, size, 2 * CACHED):
            values = plain.restore(rotated.take(start, stop))
            yield first + start, first + stop, values.view(-1, 1, high, cols)


def _of_conv(
    basis: MatrixBasis, form: Convolution, rows: ConvolutionRows, slopes: Tensor | None
) -> Iterator[Tile]:
    """Rotate patches by convolving with the eigenvectors, without building the patches."""
    if basis.col_vectors is None:
        yield from _of_restored(basis, form, rows, slopes)
        return
    groups, high, cols = basis.values.shape
    dtype, flat = rows.wide.dtype, [0] * len(form.kernel)
    inner = form.channels // form.groups
    sides = basis.col_vectors.mT.to(dtype)
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
        if basis.row_vectors is not None:
            g = basis.row_vectors.mT.to(g.dtype) @ g
        yield start, stop, g @ x.view(count, groups, cols, form.positions).mT


def _of_restored(
    basis: Basis, form: AnyForm, rows: GradientRows, slopes: Tensor | None
) -> Iterator[Tile]:
    for start, stop in tiles(len(rows), 2 * form.restored_size, 4, 8 * CACHED):
        dense = form.restore(rows.take(start, stop))
        values = basis.coordinates(dense)
        if slopes is not None:
            values = values * slopes[start:stop].view(-1, *[1] * (values.dim() - 1)).to(
                values.dtype
            )
        yield start, stop, values


def coordinate_squares(
    basis: Basis,
    form: AnyForm,
    rows: GradientRows,
    slopes: Tensor | None,
    *,
    keep: CoordinateRows | None = None,
) -> Tensor:
    """Return sums over rows of squared coordinates, in the shape of the basis' values.

    With one position per row, (L^T g)^2 (R^T x)^2 is summed by one product; else the coordinates of every row are
    computed. They, or their two factors, are also written into `keep` `[B, size]` if it is given.
    """
    by_sides = has_factors(form) and form.kind in _SQUARES and isinstance(basis, MatrixBasis)
    if by_sides and not isinstance(keep, torch.Tensor):
        direct = _SQUARES[form.kind](basis, form, rows, slopes, keep)
        if direct is not None:
            return direct
    out = torch.zeros_like(basis.values)
    for start, stop, values in coordinates(basis, form, rows, slopes):
        if isinstance(keep, torch.Tensor):
            keep[start:stop] = values.flatten(1)
        out += values.square().sum(0)
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
    rotated = rotated_factors(basis, form, rows, slopes)
    if keep is not None and not isinstance(keep, torch.Tensor):
        keep.g[:], keep.x[:] = rotated.g, rotated.x
    return (rotated.g.square().t() @ rotated.x.square()).unsqueeze(0)


def _embedding_squares(
    basis: MatrixBasis,
    form: Lookup,
    rows: LookupRows,
    slopes: Tensor | None,
    keep: CoordinateRows | None,
) -> Tensor:
    del keep
    g = scaled_suffixes(rows.g, rows.offsets, slopes)
    if basis.col_vectors is not None:
        g = g @ basis.col_vectors[0].to(g.dtype)
    moved = LookupRows(rows.ids, g, rows.offsets)
    ones = g.new_ones(1, len(moved))
    return form.weighted_squares(moved, ones).view(basis.values.shape)


_COORDINATES: dict[str, Callable[..., Iterator[Tile]]] = {"outer": _of_outer, "conv": _of_conv}
_SQUARES: dict[str, Callable[..., Tensor | None]] = {
    "outer": _linear_squares,
    "lookup": _embedding_squares,
}
"""Forms with a direct way; it returns None for rows that it does not cover."""
