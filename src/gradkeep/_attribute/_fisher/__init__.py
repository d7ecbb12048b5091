"""Curvature of the loss, layer by layer, as products of small matrices."""

from gradkeep._attribute._fisher._curvature import Damping, Fisher, LayerFisher
from gradkeep._attribute._fisher._fit import fisher

__all__ = ["Damping", "Fisher", "LayerFisher", "fisher"]
