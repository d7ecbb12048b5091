"""Solvers of the kernel method."""
