"""`influence` and `arnoldi`: inverse curvature by conjugate gradients, or by leading eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep import query
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution.curvature._iterative import conjugate_gradients, lanczos
from gradkeep.attribution.curvature._operator import CurvatureOptions, curvature
from gradkeep.attribution.kernels._weighted import WeightedKernel
from gradkeep.attribution.kronecker._row_parts import only_layer
from gradkeep.attribution.projections import _random
from gradkeep.attribution.scorers._solved_scores import solved_scores
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


_VECTORS = 10
"""Vectors of float64 that a query has while it is solved."""


@dataclass(frozen=True, slots=True)
class InfluenceOptions(CurvatureOptions):
    """What `influence` can be told."""

    tolerance: float = 1e-4
    """The relative residual that each query is solved to."""
    max_steps: int = 1000
    """Of conjugate gradients; an error if they are not enough."""


def _prepare_influence(at: CheckpointView, options: InfluenceOptions) -> Scorer:
    if not 0 < options.tolerance < 1 or options.max_steps < 1:
        raise AttributionError(
            "conjugate gradients need a tolerance between 0 and 1, and some steps",
            found=f"tolerance={options.tolerance}, max_steps={options.max_steps}",
        )
    curved = curvature(at, options)
    question, asked, train = at.question, at.queries(), at.train()
    budget = question.memory_budget
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    if options.curvature == "fisher" and not question.per_layer:
        return _by_kernel(at, curved.damping, options.tolerance)
    step = max(1, limit // 4 // (8 * _VECTORS * curved.space.size + 4 * len(train)))

    def layer(name: str, directions: Directions) -> Tensor:
        one = Directions(
            directions.groups,
            {name: directions.layers[name]},
            {name: train.forms[name]},
            directions.weights,
        )
        return query.along(only_layer(train, name), one, memory_budget=budget)

    def some(positions: list[int]) -> Tensor:
        solved = conjugate_gradients(
            curved.damped,
            curved.space.rows(asked, positions),
            tolerance=options.tolerance,
            max_steps=options.max_steps,
        )
        directions = curved.space.directions(solved)
        if question.per_layer:
            return torch.stack([layer(name, directions) for name in train.forms])
        return query.along(train, directions, memory_budget=budget)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        tiles = [positions[at : at + step] for at in range(0, len(positions), step)]
        return torch.cat([some(tile) for tile in tiles], -2)

    return Scorer(score)


def _by_kernel(at: CheckpointView, damping: float, tolerance: float) -> Scorer:
    """With F = G^T G / N, g_q (F + damping)^-1 G^T = g_q G^T (G G^T / N + damping)^-1: a kernel."""
    train, question = at.train(), at.question
    kernel = WeightedKernel(
        train,
        torch.full((len(train),), 1 / len(train)),
        damping,
        compute=question.compute,
        memory_budget=question.memory_budget,
        report=question.report,
    )
    return solved_scores(at, kernel, torch.ones(len(train)), of="loss", tolerance=tolerance)


INFLUENCE = Method(
    "influence",
    "query gradient x (curvature + damping)^-1 x training gradient",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "tens of passes over the training data for each query, small models only; for the Fisher "
    "matrix what kernel costs",
    exact=True,
    reference="Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017",
    prepare=_prepare_influence,
    options=InfluenceOptions,
    layered=True,
)


@dataclass(frozen=True, slots=True)
class ArnoldiOptions(CurvatureOptions):
    """What `arnoldi` can be told."""

    rank: int = 50
    """How many eigenvectors are kept, those with the largest eigenvalues."""
    iterations: int = 100
    """Products with the curvature, from which the eigenvectors are found."""
    seed: int = 0
    """Of the first vector."""


def _prepare_arnoldi(at: CheckpointView, options: ArnoldiOptions) -> Scorer:
    if not 1 <= options.rank <= options.iterations:
        raise AttributionError(
            "arnoldi needs a rank of at least 1 and no fewer iterations",
            found=f"rank={options.rank}, iterations={options.iterations}",
            fix="twice as many iterations as eigenvectors are usual",
        )
    curved = curvature(at, options)
    question, size = at.question, curved.space.size
    need = 8 * size * (min(options.iterations, size) + options.rank)
    if question.memory_budget is not None and need > parse_bytes(question.memory_budget):
        raise BudgetError(
            f"{options.iterations} vectors of {size} numbers do not fit in the memory budget",
            found=str(question.memory_budget),
            expected=f"at least {format_bytes(need)}",
            fix="pass fewer iterations=, fewer layers=, or a larger memory_budget=",
        )
    start = _random.normals(size, "arnoldi", options.seed).double()
    found = lanczos(
        lambda v: curved.product(v.unsqueeze(0))[0],
        start,
        iterations=options.iterations,
        rank=options.rank,
    )
    directions = curved.space.directions(found.vectors)
    train, asked = (
        query.along(side, directions, memory_budget=question.memory_budget).double()
        for side in (at.train(), at.queries())
    )
    weighed = train / (found.values + curved.damping).unsqueeze(1)
    chosen = asked[:, question.positions]

    def score(begin: int, stop: int) -> Tensor:
        return (chosen[:, begin:stop].t() @ weighed).float()

    return Scorer(score, approximate=f"the {len(found.values)} directions of most curvature")


ARNOLDI = Method(
    "arnoldi",
    "query gradient x (curvature + damping)^-1 x training gradient, along the top eigenvectors of "
    "the curvature",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "a pass over the training data for each iteration, then rank products a pair",
    exact=False,
    reference="Schioppa et al., Scaling Up Influence Functions, 2022",
    prepare=_prepare_arnoldi,
    options=ArnoldiOptions,
)
