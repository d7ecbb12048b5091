"""`self`: how strongly a training row pulls on itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._method import Method, NoOptions, Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


def _prepare(at: CheckpointView, options: NoOptions) -> Scorer:
    train = at.train()
    if at.question.per_layer:
        parts = train.norms(per_layer=True).double().square().float().T.unsqueeze(1)
    else:
        parts = train.norms().double().square().float().unsqueeze(0)

    def score(start: int, stop: int) -> Tensor:
        return parts

    return Scorer(score)


METHOD = Method(
    "self",
    "squared length of a row's own loss gradient, summed over checkpoints",
    "gradients of the training split",
    "reads the kept norms",
    exact=True,
    reference="Pruthi et al., 2020 (self-influence)",
    prepare=_prepare,
    over="sum",
    about_queries=False,
    layered=True,
)
