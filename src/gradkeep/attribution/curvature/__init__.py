"""Curvature products and iterative solvers on replayed or stored gradients."""
