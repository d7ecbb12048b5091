"""Orthonormal coordinates of a layer's gradients in which its curvature is diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradkeep.factors._arithmetic import CACHED, row_of, spans, tiles
from gradkeep.factors._form import Parameter, has_factors
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradkeep.curvature._fisher import CoordinateRows
    from gradkeep.factors._convolution import Convolution, ConvolutionRows
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.factors._weights import WeightMatrix, WeightVector

    Tile = tuple[int, int, Tensor]


_DOUBLE = 512
"""Matrices up to this size are decomposed in float64, larger ones in float32, which is twice as
fast and rounds far below any damping."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixBasis:
    """Coordinates L^T W R `[G, r, c]` of a weight's gradient W, with an eigenvalue for each.

    Vectors whose eigenvalue is zero may be left out: then r < R or c < C.
    """

    piece: WeightMatrix
    row_vectors: Tensor | None
    """`[G, R, r]`; None for the identity."""
    col_vectors: Tensor | None
    """`[G, C, c]`; None for the identity."""
    values: Tensor
    """Eigenvalues `[G, r, c]`, float64."""

    @property
    def whole(self) -> bool:
        """True if no vector was left out."""
        return self.values.numel() == self.piece.size

    @property
    def nbytes(self) -> int:
        """Bytes of values and vectors."""
        return _nbytes(self.row_vectors, self.col_vectors, self.values)

    def coordinates(self, dense: Tensor) -> Tensor:
        """Return coordinates `[B, G, r, c]` of gradients `[B, P]`; 2 R C (R + C) operations per row."""
        matrices = self.piece.taken(dense)
        if self.col_vectors is not None:
            matrices = _times(matrices, self.col_vectors)
        return (
            matrices
            if self.row_vectors is None
            else self.row_vectors.mT.to(matrices.dtype) @ matrices
        )

    def put(self, coordinates: Tensor, into: Tensor, plus: Tensor | None = None) -> None:
        """Write the gradients with these coordinates, plus other ones, into dense gradients `[B, P]`."""
        matrices = coordinates
        if self.row_vectors is not None:
            matrices = self.row_vectors.to(matrices.dtype) @ matrices
        if self.col_vectors is not None:
            matrices = _times(matrices, self.col_vectors.mT)
        self.piece.put(matrices if plus is None else matrices + self.piece.taken(plus), into)


@dataclass(frozen=True, slots=True, eq=False)
class VectorBasis:
    """Coordinates Q^T v `[size]`, with an eigenvalue for each."""

    piece: WeightVector
    vectors: Tensor | None
    """`[size, size]`; None for the identity."""
    values: Tensor
    """Eigenvalues `[size]`, float64."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and vectors."""
        return _nbytes(self.vectors, self.values)

    def coordinates(self, dense: Tensor) -> Tensor:
        """Return the coordinates `[B, size]` of dense gradients `[B, P]`."""
        values = self.piece.taken(dense)
        return values if self.vectors is None else values @ self.vectors.to(values.dtype)

    def put(self, coordinates: Tensor, into: Tensor) -> None:
        """Write the gradients with these coordinates into dense gradients `[B, P]`."""
        if self.vectors is not None:
            coordinates = coordinates @ self.vectors.mT.to(coordinates.dtype)
        self.piece.put(coordinates, into)


Basis = MatrixBasis | VectorBasis


def eigen(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues `[..., d]`, clamped at zero, and eigenvectors `[..., d, d]` of moments."""
    small = moment if moment.shape[-1] <= _DOUBLE else moment.float()
    values, vectors = torch.linalg.eigh(small)
    return values.double().clamp(min=0), vectors.float()


def leading(moment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest eigenvalues `[G, count]`, descending, and their vectors `[G, d, count]`.

    For a diagonal `[G, d]` these are unit vectors. Large moments are not decomposed: a random subspace is
    multiplied with them until it contains the leading one; 2 d^2 count operations each time.
    """
    if moment.dim() == 2:
        values, places = moment.sort(dim=1, descending=True, stable=True)
        vectors = functional.one_hot(places[:, :count], moment.shape[1]).mT
        return values[:, :count].double().clamp(min=0), vectors.float()
    size = moment.shape[-1]
    count = min(count, size)
    if size <= _DOUBLE or count > size // 4:
        values, vectors = eigen(moment)
    else:
        values, vectors = _by_subspace(moment.float(), min(size, count + 16))
    return values.flip(-1)[..., :count], vectors.flip(-1)[..., :count]


def _by_subspace(moment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return approximate eigenpairs, ascending, by subspace iteration.

    Four multiplications are enough for eigenvalues that are damped anyway.
    """
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(*moment.shape[:-1], count, generator=draws).to(moment)
    space = torch.linalg.qr(moment @ start).Q
    for _ in range(4):
        space = torch.linalg.qr(moment @ space).Q
    inside = space.mT @ (moment @ space)
    values, rotation = torch.linalg.eigh((inside + inside.mT).double() / 2)
    return values.clamp(min=0), space @ rotation.float()


def even(columns: int) -> int:
    """Round up to a multiple of 16."""
    return -(-columns // 16) * 16


def _times(values: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices `[B, G, R, C]` with `[G, C, c]`: one large product per group, not B small ones.

    Columns are padded to a multiple of 16; other widths take up to twice as long.
    """
    count, groups, rows, cols = values.shape
    wide = right.shape[-1]
    more, after = even(cols) - cols, even(wide) - wide
    filled = functional.pad(values, (0, more)) if more else values
    square = functional.pad(right, (0, after, 0, more)).to(values.dtype)
    parts = [
        (filled[:, group].reshape(-1, cols + more) @ square[group]).view(count, rows, -1)
        for group in range(groups)
    ]
    return torch.stack(parts, 1)[..., :wide] if groups > 1 else parts[0].unsqueeze(1)[..., :wide]


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


EigenSide = tuple[Tensor, Tensor | None]
"""Eigenvalues `[G, r]` and vectors `[G, d, r]`; None for the identity."""


def eigen_side(moment: Tensor) -> EigenSide:
    """Decompose moments `[G, d, d]`, or a diagonal `[G, d]`; ArithmeticError if they are not finite."""
    if not bool(moment.isfinite().all()):
        raise ArithmeticError("moments are not finite")
    return (moment, None) if moment.dim() == 2 else eigen(moment)


class RowSpace:
    """Hold rows `[S, d]` as long as S is below d, and at most `most`.

    Their moment V^T V `[d, d]` has at most S eigenvalues above zero, those of V V^T `[S, S]`. So S^3
    operations replace d^3, and S vectors d: the others are orthogonal to all rows.
    """

    def __init__(self, width: int, most: int) -> None:
        self.width, self.most = width, min(width - 1, most)
        self._parts: list[Tensor] = []
        self._count = 0

    @property
    def open(self) -> bool:
        """True while all rows are held."""
        return self.most > 0

    def add(self, rows: Tensor) -> list[Tensor]:
        """Add rows; return the rows to sum elsewhere: none, or all of them once there are too many."""
        if not self.open:
            return [rows]
        self._parts.append(rows.clone())
        self._count += len(rows)
        if self._count <= self.most:
            return []
        parts, self._parts, self.most = self._parts, [], 0
        return parts

    def rows(self) -> Tensor:
        """Return the held rows, float64 `[S, d]`."""
        return torch.cat([torch.zeros(0, self.width, dtype=torch.float64), *self._parts])

    def eigen(self, count: int) -> EigenSide:
        """Return eigenvalues `[1, r]` above zero of V^T V / count, ascending, and their vectors `[1, d, r]`."""
        v = self.rows()
        if not bool(v.isfinite().all()):
            raise ArithmeticError("rows are not finite")
        values, rotation = torch.linalg.eigh(v @ v.t())
        # Eigenvalues below 1e-12 of the largest are rounding errors.
        is_positive = values > 1e-12 * values.abs().amax() if len(values) else values > 0
        values, rotation = values[is_positive], rotation[:, is_positive]
        vectors = v.t() @ (rotation / values.sqrt())
        return (values / max(1, count)).unsqueeze(0), vectors.float().unsqueeze(0)


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
    g = g if basis.row_vectors is None else _times_with_ones(g, basis.row_vectors[0])
    x = (
        form.with_ones(x)
        if basis.col_vectors is None
        else _times_with_ones(x, basis.col_vectors[0])
    )
    return OuterRows(x, g, rows.offsets)


def _times_with_ones(values: Tensor, vectors: Tensor) -> Tensor:
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


def scaled_suffixes(g: Tensor, offsets: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Return suffixes `[S, d]` times the slopes of their rows."""
    if slopes is None:
        return g
    where = slopes if offsets is None else slopes[row_of(spans(offsets, len(g)), slopes.device)]
    return g * where[:, None].to(g.dtype)
