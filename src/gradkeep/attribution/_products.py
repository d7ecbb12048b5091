"""Inner products of the queries of a question with its training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep import query
from gradkeep.attribution._method import Scorer
from gradkeep.query._engine import Engine, Pair

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import At
    from gradkeep.query._gradients import Of


def products(at: At, of: Of, *, weight: float = 1.0) -> Scorer:
    """Products `[b, N]` of the gradients of losses or outputs, or `[L, b, N]` layer by layer."""
    question = at.question
    asked, train = at.queries(of), at.train(of)

    def score(start: int, stop: int) -> Tensor:
        found = query.dot(
            asked,
            train,
            weights=[weight],
            ids=asked.ids[question.positions[start:stop]],
            plan=question.plan,
            memory_budget=question.memory_budget,
            per_layer=question.per_layer,
        )
        if not question.per_layer:
            return found.values
        assert found.per_layer is not None
        return found.per_layer

    count, rows = len(question.positions), len(train)
    engine = Engine(
        [Pair(asked, train)],
        plan=question.plan,
        memory_budget=question.memory_budget,
        answer=4 * count * rows,
        positions=question.positions.tolist(),
    )
    return Scorer(score, plan=engine.plan)
