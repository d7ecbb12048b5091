"""`tracin`: inner products along training, weighed by the learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._products import products
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class Options:
    """What `tracin` can be told."""

    lrs: Sequence[float] | None = None
    """One learning rate per checkpoint; by default those it was captured with."""


def _prepare(at: CheckpointView, options: Options) -> Scorer:
    places = at.question.places
    if options.lrs is not None and len(options.lrs) != len(places):
        raise AttributionError(
            "one learning rate per checkpoint is needed",
            found=f"{len(options.lrs)} for {len(places)} checkpoints",
        )
    lr = at.place.lr if options.lrs is None else options.lrs[places.index(at.place)]
    if lr is None:
        raise AttributionError(
            f"tracin needs the learning rate at checkpoint {str(at.place)!r}",
            fix="pass lrs=, or capture with gk.Weights(source, lr=...)",
        )
    return products(at, "loss", weight=float(lr))


METHOD = Method(
    "tracin",
    "sum over checkpoints of learning rate x inner product of the loss gradients",
    "gradients of both splits at several checkpoints, with learning rates",
    "C x Q x N products",
    exact=True,
    reference="Pruthi et al., Estimating Training Data Influence by Tracing Gradient Descent, 2020",
    prepare=_prepare,
    over="sum",
    options=Options,
    layered=True,
)
