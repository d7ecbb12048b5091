"""Solving with the damped, weighted kernel of all training rows: exactly, in a byte budget."""

from gradkeep.attribution.kernels._choice import WAYS, KernelWay, kernel_solver
from gradkeep.attribution.kernels._cholesky import CholeskyFactor, cholesky
from gradkeep.attribution.kernels._parameters import ParameterSolver
from gradkeep.attribution.kernels._weighted import Solution, WeightedKernel, summed_up

__all__ = [
    "WAYS",
    "CholeskyFactor",
    "KernelWay",
    "ParameterSolver",
    "Solution",
    "WeightedKernel",
    "cholesky",
    "kernel_solver",
    "summed_up",
]
