"""`label-match`: whether a training row has the query's label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._columns import column
from gradkeep.attribution._method import Method, NoOptions, Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


def _prepare(at: CheckpointView, options: NoOptions) -> Scorer:
    train = column(at.train_block, "label", method="label-match")
    asked = column(at.query_block, "label", method="label-match")[at.question.positions]

    def score(start: int, stop: int) -> Tensor:
        return (asked[start:stop, None] == train).float()

    return Scorer(score)


METHOD = Method(
    "label-match",
    "1 where the labels are equal, else 0",
    "labels of both splits",
    "Q x N comparisons",
    exact=True,
    reference="the baseline that knows nothing but labels",
    prepare=_prepare,
)
