"""`loss`: how well a training row is fitted, by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._columns import column
from gradkeep.attribution._method import Method, NoOptions, Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


def _prepare(at: CheckpointView, options: NoOptions) -> Scorer:
    # Rows that stay badly fitted are the ones with wrong labels: they harm, so the sign.
    scores = -column(at.train_block, "loss", method="loss").float().unsqueeze(0)

    def score(start: int, stop: int) -> Tensor:
        return scores

    return Scorer(score)


METHOD = Method(
    "loss",
    "minus a row's own loss: the worst fitted rows score lowest",
    "losses of the training split",
    "reads one number a row",
    exact=True,
    reference="the baseline for wrong labels, strongest in the middle of training",
    prepare=_prepare,
    about_queries=False,
)
