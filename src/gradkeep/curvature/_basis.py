"""Orthonormal coordinates of a layer's gradients in which its curvature is diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from gradkeep.factors._weights import WeightMatrix, WeightVector


_MORE, _PASSES = 16, 4
"""Extra vectors of the random subspace, and the number of multiplications: enough for eigenvalues
that are damped anyway."""
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
        values, vectors = _by_subspace(moment.float(), min(size, count + _MORE))
    return values.flip(-1)[..., :count], vectors.flip(-1)[..., :count]


def _by_subspace(moment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return approximate eigenpairs, ascending, by subspace iteration."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(*moment.shape[:-1], count, generator=draws).to(moment)
    space = torch.linalg.qr(moment @ start).Q
    for _ in range(_PASSES):
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
