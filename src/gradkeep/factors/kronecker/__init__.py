"""Second moments of both sides of a weight's gradients, and the coordinates that they give."""

from gradkeep.factors.kronecker._basis import Basis, MatrixBasis, VectorBasis, eigen, leading
from gradkeep.factors.kronecker._moments import (
    MatrixMoments,
    VectorMoments,
    matrix_moments,
    scaled_suffixes,
)
from gradkeep.factors.kronecker._patch_moments import WIDE

__all__ = [
    "WIDE",
    "Basis",
    "MatrixBasis",
    "MatrixMoments",
    "VectorBasis",
    "VectorMoments",
    "eigen",
    "leading",
    "matrix_moments",
    "scaled_suffixes",
]
