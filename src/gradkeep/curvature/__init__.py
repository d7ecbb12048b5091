"""Curvature of the loss: Kronecker moments and eigenbases, EK-FAC, projections and solvers."""
