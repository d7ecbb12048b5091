"""`cos`: cosines between loss gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep import query
from gradkeep.attribution._method import Method, NoOptions, Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


def _prepare(at: CheckpointView, options: NoOptions) -> Scorer:
    question = at.question
    asked, train = at.queries(), at.train()

    def score(start: int, stop: int) -> Tensor:
        return query.cosine(
            asked,
            train,
            ids=asked.ids[question.positions[start:stop]],
            compute=question.compute,
            memory_budget=question.memory_budget,
        ).values

    return Scorer(score)


METHOD = Method(
    "cos",
    "cosine of the angle between the loss gradients",
    "gradients of both splits at one checkpoint",
    "Q x N products",
    exact=True,
    reference="Barshan et al., RelatIF, 2020",
    prepare=_prepare,
    over="one",
)
