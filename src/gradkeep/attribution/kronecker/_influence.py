"""Influence: products of training gradients with queries that a curvature was inverted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._method import Scorer
from gradkeep.attribution.kronecker._fisher import bytes_kept
from gradkeep.attribution.kronecker._kept_coordinates import kept_coordinates
from gradkeep.attribution.kronecker._row_parts import dense_rows, only_layer
from gradkeep.attribution.kronecker._single_position import single_position_influence
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.attribution.kronecker._fisher import Damping
    from gradkeep.attribution.kronecker._fit import FisherFit

    Solve = Callable[[str, Tensor], Tensor]
    LayerScores = Callable[[str, list[int]], Tensor]


def influence(at: CheckpointView, fit: FisherFit, damping: Damping) -> Scorer:
    """g_q^T (F + damping)^-1 g_n for all pairs, layer by layer the cheapest of three ways.

    Layers whose training rows are held as coordinates, and linear layers with one position a row,
    are multiplied in eigencoordinates; of others the queries are solved. The matrix of a layer is
    made when its scores are first asked for.
    """
    sides = (at.queries(), at.train())

    def layer_scores(name: str, positions: list[int]) -> Tensor:
        fisher = fit.layer(name)
        left = _left(at, fit.nbytes + bytes_kept(fisher.rows))
        kept = kept_coordinates(name, fisher, damping)
        if kept is not None:
            held = kept
            return in_steps(left, fisher.size, positions, lambda some: held.scores(sides[0], some))
        direct = single_position_influence(name, fisher, damping, *sides)
        if direct is not None:
            one = direct
            return in_steps(
                left, one.kept // 2, positions, lambda some: one.scores(*sides, some, left)
            )
        solved = SolvedQueries(at, lambda _, dense: fisher.solved(dense, damping), left)
        return solved.scores(name, positions)

    def in_steps(
        left: int | None, size: int, positions: list[int], scores: Callable[[list[int]], Tensor]
    ) -> Tensor:
        """Those of so many queries at a time that what is made of them fits."""
        out = torch.empty(len(positions), len(sides[1]))
        step = _queries_at_once(left, size, len(sides[1]))
        for start in range(0, len(positions), step):
            out[start : start + step] = scores(positions[start : start + step])
        return out

    return layer_by_layer(at, layer_scores, fit.approximate, check=fit.check)


class SolvedQueries:
    """Layer after layer some queries are restored and solved, and the training rows pass by."""

    def __init__(self, at: CheckpointView, solve: Solve, memory_budget: int | None) -> None:
        self.asked, self.train = at.queries(), at.train()
        self.solve, self.budget = solve, memory_budget

    def scores(self, name: str, positions: list[int]) -> Tensor:
        """Products `[b, N]` of one layer."""
        form, rows = self.train.forms[name], only_layer(self.train, name)
        out = torch.empty(len(positions), len(rows))
        step = _queries_at_once(self.budget, rows.size, len(rows))
        for start in range(0, len(positions), step):
            some = positions[start : start + step]
            solved = self.solve(name, dense_rows(self.asked, name, some))
            directions = Directions(tuple(some), {name: solved}, {name: form}, rows.weights)
            out[start : start + step] = query.along(rows, directions, memory_budget=self.budget)
        return out


def layer_by_layer(
    at: CheckpointView,
    scores: LayerScores,
    approximate: str | None,
    *,
    check: Callable[[], None] = lambda: None,
) -> Scorer:
    """A scorer that adds the scores `[b, N]` of all layers up, or keeps them apart if asked to.

    Once all layers were asked, `check` may still refuse.
    """
    question, layers = at.question, list(at.train().forms)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        found = [scores(layers[0], positions)]
        for name in layers[1:]:
            one = scores(name, positions)
            if question.per_layer:
                found.append(one)
            else:
                found[0] += one
        check()
        return torch.stack(found) if question.per_layer else found[0]

    return Scorer(score, approximate=approximate)


def _left(at: CheckpointView, kept_coordinates: int) -> int | None:
    """What is left of the byte budget, if there is one."""
    budget = at.question.memory_budget
    return None if budget is None else max(1, parse_bytes(budget) - kept_coordinates)


def _queries_at_once(budget: int | None, size: int, rows: int) -> int:
    """Queries whose restored gradients, four times, and products take a quarter of the budget."""
    limit = DEFAULT_BUDGET if budget is None else budget
    return max(1, limit // 4 // (16 * size + 4 * rows))
