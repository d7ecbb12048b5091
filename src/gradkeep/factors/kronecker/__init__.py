"""Second moments of both sides of a weight's gradients, and the coordinates that they give."""

from gradkeep.factors.kronecker._basis import Basis, MatrixBasis, VectorBasis, eigen, leading
from gradkeep.factors.kronecker._moments import (
    MatrixMoments,
    VectorMoments,
    matrix_moments,
    scaled_suffixes,
)
from gradkeep.factors.kronecker._patch_moments import WIDE
from gradkeep.factors.kronecker._row_space import EigenSide, eigen_side

__all__ = [
    "WIDE",
    "Basis",
    "EigenSide",
    "MatrixBasis",
    "MatrixMoments",
    "VectorBasis",
    "VectorMoments",
    "eigen",
    "eigen_side",
    "leading",
    "matrix_moments",
    "scaled_suffixes",
]
