"""`similarity`: cosines between embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from gradkeep.attribution._columns import embeddings
from gradkeep.attribution._method import Method, Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class Options:
    """What `similarity` can be told."""

    layer: str | None = None
    """Whose embeddings; by default the last that both splits keep."""


def _prepare(at: CheckpointView, options: Options) -> Scorer:
    train, asked = (
        functional.normalize(values, dim=1, eps=1e-30)
        for values in embeddings(at, options.layer, method="similarity")
    )

    def score(start: int, stop: int) -> Tensor:
        return asked[start:stop] @ train.t()

    return Scorer(score)


METHOD = Method(
    "similarity",
    "cosine of the angle between embeddings; 0 where one is zero",
    "embeddings of both splits: capture(..., embeddings=[layer])",
    "Q x N products of embeddings",
    exact=True,
    reference="Hanawa et al., Evaluation of Similarity-based Explanations, 2021",
    prepare=_prepare,
    options=Options,
)
