"""Curvature of the loss, layer by layer, as products of small matrices."""

from gradkeep.attribution.kronecker._fisher import DECADES, Damping, KroneckerFisher, LayerFisher
from gradkeep.attribution.kronecker._fit import fisher
from gradkeep.attribution.kronecker._single_position import has_single_position

__all__ = ["DECADES", "Damping", "KroneckerFisher", "LayerFisher", "fisher", "has_single_position"]
