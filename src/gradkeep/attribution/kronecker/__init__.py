"""Curvature of the loss, layer by layer, as products of small matrices."""

from gradkeep.attribution.kronecker._fisher import DECADES, Damping, KroneckerFisher, LayerFisher
from gradkeep.attribution.kronecker._fit import fisher

__all__ = ["DECADES", "Damping", "KroneckerFisher", "LayerFisher", "fisher"]
