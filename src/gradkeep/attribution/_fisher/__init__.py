"""Curvature of the loss, layer by layer, as products of small matrices."""

from gradkeep.attribution._fisher._curvature import DECADES, Damping, Fisher, LayerFisher
from gradkeep.attribution._fisher._fit import fisher

__all__ = ["DECADES", "Damping", "Fisher", "LayerFisher", "fisher"]
