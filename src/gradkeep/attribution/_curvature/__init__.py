"""The curvature of the loss over all chosen layers at once, as products with vectors."""

from gradkeep.attribution._curvature._chosen import CurvatureOptions, Curved, curvature
from gradkeep.attribution._curvature._conjugate import conjugate_gradients
from gradkeep.attribution._curvature._lanczos import Eigenpairs, lanczos
from gradkeep.attribution._curvature._space import Space

__all__ = [
    "CurvatureOptions",
    "Curved",
    "Eigenpairs",
    "Space",
    "conjugate_gradients",
    "curvature",
    "lanczos",
]
