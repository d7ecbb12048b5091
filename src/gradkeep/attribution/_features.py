"""Projected gradients of both sides of a question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._projections import project
from gradkeep.errors import BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._projections import Projection
    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import GradientOf


def features(at: CheckpointView, of: GradientOf, projection: Projection) -> tuple[Tensor, Tensor]:
    """Projections of the training rows `[N, k]` and of the queries `[Q, k]`.

    Other checkpoints get other projections, so that their errors average out.
    """
    question = at.question
    train, asked = at.train(of), at.queries(of)
    need = 4 * projection.dim * (len(train) + len(asked) + 2 * projection.dim)
    budget = question.memory_budget
    if budget is not None and need > parse_bytes(budget):
        raise BudgetError(
            f"projections to {projection.dim} numbers do not fit in the memory budget",
            found=str(budget),
            expected=f"at least {format_bytes(need)}",
            fix="pass a smaller dim=, or a larger memory_budget=",
        )
    number = question.places.index(at.place)
    x = project(train, projection, model=number, memory_budget=budget)
    g = project(asked, projection, model=number, memory_budget=budget)
    return x, g[question.positions]
