"""Orthonormal coordinates of a layer's gradients in which its curvature is a diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from gradkeep.factors._weights import WeightMatrix, WeightVector


_MORE, _PASSES = 16, 4
"""More vectors than are wanted, and how often they are multiplied: enough for what is damped anyway."""
_DOUBLE = 512
"""Matrices up to this size are decomposed in float64, larger ones in float32: twice as fast, and
its rounding is far below any damping."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixBasis:
    """Coordinates L^T W R `[G, r, c]` of a weight's gradient W, with a value for each.

    Vectors whose eigenvalue is zero may be left out: then r < R or c < C.
    """

    piece: WeightMatrix
    left: Tensor | None
    """`[G, R, r]`; None: its own coordinates."""
    right: Tensor | None
    """`[G, C, c]`"""
    values: Tensor
    """Eigenvalues `[G, r, c]`, float64."""

    @property
    def whole(self) -> bool:
        """Whether every gradient has these coordinates: no vector was left out."""
        return self.values.numel() == self.piece.size

    @property
    def nbytes(self) -> int:
        """Bytes of values and vectors."""
        return _nbytes(self.left, self.right, self.values)

    def coordinates(self, dense: Tensor) -> Tensor:
        """Those `[B, G, r, c]` of dense gradients `[B, P]`; 2 R C (R + C) operations a row."""
        found = self.piece.taken(dense)
        if self.right is not None:
            found = _times(found, self.right)
        return found if self.left is None else self.left.mT.to(found.dtype) @ found

    def put(self, coordinates: Tensor, into: Tensor, plus: Tensor | None = None) -> None:
        """Writes what has these coordinates into dense gradients `[B, P]`, plus other ones."""
        found = coordinates
        if self.left is not None:
            found = self.left.to(found.dtype) @ found
        if self.right is not None:
            found = _times(found, self.right.mT)
        self.piece.put(found if plus is None else found + self.piece.taken(plus), into)


@dataclass(frozen=True, slots=True, eq=False)
class VectorBasis:
    """Coordinates Q^T v `[size]`, with a value for each."""

    piece: WeightVector
    vectors: Tensor | None
    """`[size, size]`; None: its own coordinates."""
    values: Tensor
    """Eigenvalues `[size]`, float64."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and vectors."""
        return _nbytes(self.vectors, self.values)

    def coordinates(self, dense: Tensor) -> Tensor:
        """Those `[B, size]` of dense gradients `[B, P]`."""
        found = self.piece.taken(dense)
        return found if self.vectors is None else found @ self.vectors.to(found.dtype)

    def put(self, coordinates: Tensor, into: Tensor) -> None:
        """Writes what has these coordinates into dense gradients `[B, P]`."""
        if self.vectors is not None:
            coordinates = coordinates @ self.vectors.mT.to(coordinates.dtype)
        self.piece.put(coordinates, into)


Basis = MatrixBasis | VectorBasis


def eigen(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[..., d]`, not below zero, and eigenvectors `[..., d, d]` of moments."""
    small = moment if moment.shape[-1] <= _DOUBLE else moment.float()
    values, vectors = torch.linalg.eigh(small)
    return values.double().clamp(min=0), vectors.float()


def leading(moment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest eigenvalues `[G, count]`, falling, and their vectors `[G, d, count]`.

    Of a diagonal `[G, d]` the vectors are unit vectors. Large moments are not decomposed: a random
    subspace is multiplied with them until it holds the leading one; 2 d^2 count operations each time.
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
    """Approximate eigenpairs, rising: those of the moment inside of a subspace that it stretches."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(*moment.shape[:-1], count, generator=draws).to(moment)
    space = torch.linalg.qr(moment @ start).Q
    for _ in range(_PASSES):
        space = torch.linalg.qr(moment @ space).Q
    inside = space.mT @ (moment @ space)
    values, turned = torch.linalg.eigh((inside + inside.mT).double() / 2)
    return values.clamp(min=0), space @ turned.float()


def even(columns: int) -> int:
    """The next multiple of 16."""
    return -(-columns // 16) * 16


def _times(values: Tensor, right: Tensor) -> Tensor:
    """Matrices `[B, G, R, C]` times `[G, C, c]`: one large product for each group, not B small.

    Columns are filled up to a multiple of 16, without which it takes up to twice as long.
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
"""Eigenvalues `[G, r]` and vectors `[G, d, r]`; None: the coordinates themselves."""


def eigen_side(moment: Tensor) -> EigenSide:
    """Of moments `[G, d, d]`, or of a diagonal `[G, d]`; ArithmeticError if they are no numbers."""
    if not bool(moment.isfinite().all()):
        raise ArithmeticError("moments are no numbers")
    return (moment, None) if moment.dim() == 2 else eigen(moment)


class RowSpace:
    """Rows `[S, d]` that are held as long as S is below d, and no more than `most`.

    Their moment V^T V `[d, d]` has S eigenvalues above zero at most, those of V V^T `[S, S]`. So S^3
    operations stand for d^3, and S vectors for d: the others are at a right angle to all rows.
    """

    def __init__(self, width: int, most: int) -> None:
        self.width, self.most = width, min(width - 1, most)
        self._parts: list[Tensor] = []
        self._count = 0

    @property
    def open(self) -> bool:
        """Whether all rows so far are held."""
        return self.most > 0

    def add(self, rows: Tensor) -> list[Tensor]:
        """Hold some rows more; what cannot be held: nothing, or, once there are too many, all."""
        if not self.open:
            return [rows]
        self._parts.append(rows.clone())
        self._count += len(rows)
        if self._count <= self.most:
            return []
        found, self._parts, self.most = self._parts, [], 0
        return found

    def rows(self) -> Tensor:
        """What is held, float64 `[S, d]`."""
        return torch.cat([torch.zeros(0, self.width, dtype=torch.float64), *self._parts])

    def eigen(self, count: int) -> EigenSide:
        """Eigenvalues `[1, r]` above zero of V^T V / count, rising, and their vectors `[1, d, r]`."""
        v = self.rows()
        if not bool(v.isfinite().all()):
            raise ArithmeticError("rows are no numbers")
        values, turned = torch.linalg.eigh(v @ v.t())
        # An eigenvalue below this share of the largest is what rounding leaves of none.
        there = values > 1e-12 * values.abs().amax() if len(values) else values > 0
        values, turned = values[there], turned[:, there]
        vectors = v.t() @ (turned / values.sqrt())
        return (values / max(1, count)).unsqueeze(0), vectors.float().unsqueeze(0)
