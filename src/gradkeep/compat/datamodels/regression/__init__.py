"""Collect the completed models of a store directory, and fit datamodels."""
