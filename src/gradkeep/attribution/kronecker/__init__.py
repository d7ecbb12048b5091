"""Curvature of the loss, layer by layer, as products of small matrices."""

from gradkeep.attribution.kronecker._fisher import DECADES, Damping, KroneckerFisher, LayerFisher
from gradkeep.attribution.kronecker._fit import FisherFit, fisher, fisher_basis
from gradkeep.attribution.kronecker._single_position import has_single_position

__all__ = [
    "DECADES",
    "Damping",
    "FisherFit",
    "KroneckerFisher",
    "LayerFisher",
    "fisher",
    "fisher_basis",
    "has_single_position",
]
