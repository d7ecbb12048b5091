"""Tasks: what is measured of a model for every sample."""
