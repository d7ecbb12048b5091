"""Kronecker moments of gradients and their eigenbases."""
