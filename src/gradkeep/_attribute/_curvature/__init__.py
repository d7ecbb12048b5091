"""The curvature of the loss over all chosen layers at once, as products with vectors."""

from gradkeep._attribute._curvature._chosen import CurvatureOptions, Curved, curvature
from gradkeep._attribute._curvature._conjugate import conjugate_gradients
from gradkeep._attribute._curvature._lanczos import Eigenpairs, lanczos
from gradkeep._attribute._curvature._space import Space

__all__ = [
    "CurvatureOptions",
    "Curved",
    "Eigenpairs",
    "Space",
    "conjugate_gradients",
    "curvature",
    "lanczos",
]
