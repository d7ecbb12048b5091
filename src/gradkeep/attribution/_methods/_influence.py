"""`influence`: the true inverse of the curvature, solved for every query; the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._curvature import CurvatureOptions, conjugate_gradients, curvature
from gradkeep.attribution._fisher._stream import only
from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._products import products
from gradkeep.attribution._solve import dual
from gradkeep.errors import AttributionError
from gradkeep.query import DEFAULT_BUDGET, Directions

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView

_VECTORS = 10
"""Vectors of float64 that a query has while it is solved."""


@dataclass(frozen=True, slots=True)
class Options(CurvatureOptions):
    """What `influence` can be told."""

    tolerance: float = 1e-4
    """The relative residual that each query is solved to."""
    max_steps: int = 1000
    """Of conjugate gradients; an error if they are not enough."""


def _prepare(at: CheckpointView, options: Options) -> Scorer:
    if not 0 < options.tolerance < 1 or options.max_steps < 1:
        raise AttributionError(
            "conjugate gradients need a tolerance between 0 and 1, and some steps",
            found=f"tolerance={options.tolerance}, max_steps={options.max_steps}",
        )
    curved = curvature(at, options)
    question, asked, train = at.question, at.queries(), at.train()
    budget = question.memory_budget
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    if options.curvature == "fisher" and not question.per_layer and 16 * len(train) ** 2 <= limit:
        return _by_kernel(at, curved.damping)
    step = max(1, limit // 4 // (8 * _VECTORS * curved.space.size + 4 * len(train)))

    def layer(name: str, directions: Directions) -> Tensor:
        one = Directions(
            directions.groups,
            {name: directions.layers[name]},
            {name: train.forms[name]},
            directions.weights,
        )
        return query.along(only(train, name), one, memory_budget=budget)

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


def _by_kernel(at: CheckpointView, damping: float) -> Scorer:
    """With F = G^T G / N, g_q (F + damping)^-1 G^T = g_q G^T (G G^T / N + damping)^-1: no solving.

    N^3 / 3 operations once, N^2 a query.
    """
    train, budget = at.train(), at.question.memory_budget
    kernel = query.gram(train, compute=at.question.compute, memory_budget=budget).values
    weight, pull = torch.full((len(train),), 1 / len(train)), torch.ones(len(train))
    solve = dual(kernel, weight=weight, pull=pull, damping=damping)
    asked = products(at, "loss")

    def score(start: int, stop: int) -> Tensor:
        return solve(asked.score(start, stop))

    return Scorer(score, plan=asked.plan)


METHOD = Method(
    "influence",
    "query gradient x (curvature + damping)^-1 x training gradient",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "tens of passes over the training data for each query, small models only; for the Fisher "
    "matrix of few rows N^3 / 3 operations",
    exact=True,
    reference="Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017",
    prepare=_prepare,
    options=Options,
    layered=True,
)
