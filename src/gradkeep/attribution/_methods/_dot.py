"""`dot`: inner products of loss gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.attribution._method import Method, NoOptions, Scorer
from gradkeep.attribution._products import products

if TYPE_CHECKING:
    from gradkeep.attribution._question import CheckpointView


def _prepare(at: CheckpointView, options: NoOptions) -> Scorer:
    return products(at, "loss")


METHOD = Method(
    "dot",
    "inner product of the loss gradients",
    "gradients of both splits at one checkpoint",
    "Q x N products",
    exact=True,
    reference="Charpiat et al., Input Similarity from the Neural Network Perspective, 2019",
    prepare=_prepare,
    over="one",
    layered=True,
)
