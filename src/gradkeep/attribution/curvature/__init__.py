"""The curvature of the loss over all chosen layers at once, as products with vectors."""

from gradkeep.attribution.curvature._iterative import Eigenpairs, conjugate_gradients, lanczos
from gradkeep.attribution.curvature._operator import (
    CurvatureOptions,
    CurvatureProblem,
    GradientSpace,
    curvature,
)

__all__ = [
    "CurvatureOptions",
    "CurvatureProblem",
    "Eigenpairs",
    "GradientSpace",
    "conjugate_gradients",
    "curvature",
    "lanczos",
]
