"""Kronecker-factored influence functions (K-FAC, EK-FAC)."""
