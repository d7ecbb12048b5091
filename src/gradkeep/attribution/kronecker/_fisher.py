"""A Fisher matrix in its eigenbasis, layer by layer, and its damped inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.errors import AttributionError
from gradkeep.factors._outer import OuterRows
from gradkeep.factors.kronecker._basis import VectorBasis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.factors.kronecker._basis import Basis


CoordinateRows = Tensor | OuterRows
"""Coordinates `[N, P]`, or of one position a row their factors `[N, R]` and `[N, C]`."""

DECADES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Relative dampings to choose from: no single one is right for all models."""


def bytes_kept(rows: CoordinateRows | None) -> int:
    """Bytes of coordinates."""
    if rows is None:
        return 0
    return rows.nbytes if isinstance(rows, Tensor) else rows.x.nbytes + rows.g.nbytes


@dataclass(frozen=True, slots=True)
class Damping:
    """What is added to eigenvalues before they are inverted."""

    relative: float = 0.3
    """Times the mean eigenvalue of the layer."""
    absolute: float | None = None
    """The same for all layers, in place of the relative one."""

    def __post_init__(self) -> None:
        value = self.relative if self.absolute is None else self.absolute
        if not 0 < value < float("inf"):
            raise AttributionError(
                "damping must be above zero: else the smallest eigenvalues decide everything",
                found=value,
                fix="0.01 to 10 times the mean eigenvalue are usual",
            )

    @classmethod
    def told(cls, relative: float | str, absolute: float | None = None) -> Damping:
        """As an option says it; what was to be chosen has been chosen by now."""
        if isinstance(relative, str):
            raise AttributionError("damping must be a number, or 'auto'", found=repr(relative))
        return cls(relative, absolute)

    def of(self, mean: float) -> float:
        """For a layer whose eigenvalues have this mean."""
        return self.relative * mean if self.absolute is None else self.absolute


@dataclass(frozen=True, slots=True, eq=False)
class LayerFisher:
    """The curvature F of one layer."""

    bases: tuple[Basis, ...]
    """One for each piece of its gradient."""
    rows: CoordinateRows | None = None
    """Coordinates of the rows that it was made of, where there was room to keep them."""

    @property
    def size(self) -> int:
        """P, the number of values of a gradient."""
        return sum(basis.piece.size for basis in self.bases)

    @property
    def mean(self) -> float:
        """The mean eigenvalue."""
        return float(sum(basis.values.sum() for basis in self.bases)) / max(1, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of eigenvectors, eigenvalues and kept coordinates."""
        return bytes_kept(self.rows) + sum(basis.nbytes for basis in self.bases)

    def solved(self, dense: Tensor, damping: Damping) -> Tensor:
        """(F + damping)^-1 g `[B, P]` of dense gradients g `[B, P]`.

        Of a layer whose rows were all zero nothing is known: zeros. Cost: 4 R C (R + C) operations
        a row.
        """
        out = torch.zeros_like(dense)
        added = damping.of(self.mean)
        if added > 0:
            for basis in self.bases:
                weights = 1 / (basis.values + added)
                if isinstance(basis, VectorBasis) or basis.whole:
                    basis.put(basis.coordinates(dense) * weights.to(dense.dtype), out)
                else:  # where there are no vectors the damping is all there is
                    more = (weights - 1 / added).to(dense.dtype)
                    basis.put(basis.coordinates(dense) * more, out, plus=dense / added)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFisher:
    """The curvature of all chosen layers, each by itself."""

    layers: Mapping[str, LayerFisher]
