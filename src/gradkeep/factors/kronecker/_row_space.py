"""Eigenvectors of second moments: of the moments, or, of few rows, from products of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkeep.factors.kronecker._basis import eigen

EigenSide = tuple[Tensor, Tensor | None]
"""Eigenvalues `[G, r]` and vectors `[G, d, r]`; None: the coordinates themselves."""
_NOTHING = 1e-12
"""An eigenvalue below this share of the largest is what rounding leaves of none."""


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
        there = values > _NOTHING * values.abs().amax() if len(values) else values > 0
        values, turned = values[there], turned[:, there]
        vectors = v.t() @ (turned / values.sqrt())
        return (values / max(1, count)).unsqueeze(0), vectors.float().unsqueeze(0)
