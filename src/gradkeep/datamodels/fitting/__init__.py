"""Sparse regression from subsets to outputs."""
