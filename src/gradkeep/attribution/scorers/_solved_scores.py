"""Scores of queries through the inverse of a damped kernel, in whichever exact way is cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._method import Scorer
from gradkeep.attribution.kernels._choice import kernel_solver
from gradkeep.attribution.kernels._parameters import ParameterSolver
from gradkeep.attribution.kronecker._row_parts import dense_rows
from gradkeep.attribution.scorers._gradient_products import products

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.attribution.kernels._choice import KernelWay
    from gradkeep.attribution.kernels._weighted import WeightedKernel
    from gradkeep.query._gradients import GradientOf


def solved_scores(
    at: CheckpointView,
    kernel: WeightedKernel,
    pull: Tensor,
    *,
    of: GradientOf,
    tolerance: float,
    wish: KernelWay | None = None,
) -> Scorer:
    """pull / s * M^-1 (s k) of the products k of each query with all rows; M and s are the kernel's."""
    question = at.question
    asked = products(at, of)
    parts = len(kernel.train.forms) if question.per_layer else 1
    solver = kernel_solver(kernel, parts * len(question.positions), tolerance=tolerance, wish=wish)
    if isinstance(solver, ParameterSolver):
        return _by_parameters(at, solver, pull, of)
    s = kernel.weight.sqrt()
    after = pull / s

    def score(start: int, stop: int) -> Tensor:
        right = asked.score(start, stop)
        shape = right.shape
        right = right.mul_(s).reshape(-1, len(s)).t().contiguous()
        return (solver.solved(right).t() * after).reshape(shape)

    return Scorer(score, plan=asked.plan, solution=solver.solution)


def _by_parameters(
    at: CheckpointView, solver: ParameterSolver, pull: Tensor, of: GradientOf
) -> Scorer:
    question, asked = at.question, at.queries(of)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        parts = [dense_rows(asked, name, positions).float() for name in asked.forms]
        if not question.per_layer:
            return solver.along_rows(torch.cat(parts, 1)).mul_(pull)
        # A layer alone is a gradient that is zero elsewhere.
        alone = [
            [part if here == only else torch.zeros_like(part) for here, part in enumerate(parts)]
            for only in range(len(parts))
        ]
        return torch.stack([solver.along_rows(torch.cat(one, 1)).mul_(pull) for one in alone])

    return Scorer(score, solution=solver.solution)
