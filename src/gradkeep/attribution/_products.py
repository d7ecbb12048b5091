"""Inner products of the queries of a question with its training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep import query
from gradkeep.attribution._method import Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import GradientOf, QueryPlan


def products(at: CheckpointView, of: GradientOf, *, weight: float = 1.0) -> Scorer:
    """Products `[b, N]` of the gradients of losses or outputs, or `[L, b, N]` layer by layer."""
    question = at.question
    asked, train = at.queries(of), at.train(of)

    plans: list[QueryPlan] = []

    def score(start: int, stop: int) -> Tensor:
        found = query.dot(
            asked,
            train,
            weights=[weight],
            ids=asked.ids[question.positions[start:stop]],
            compute=question.compute,
            memory_budget=question.memory_budget,
            per_layer=question.per_layer,
        )
        plans[:] = [found.plan]
        if not question.per_layer:
            return found.values
        assert found.per_layer is not None
        return found.per_layer

    return Scorer(score, plan=lambda: plans[0] if plans else None)
