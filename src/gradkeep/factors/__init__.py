"""Representations of per-sample gradients and the algebra on them."""
