"""`dot`, `cos`, `tracin`, `self`: inner products of loss gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep import query
from gradkeep.attribution._question import Method, NoOptions, Scorer
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query._gradients import GradientOf
    from gradkeep.query._planner import QueryPlan


def _prepare_dot(at: CheckpointView, options: NoOptions) -> Scorer:
    return products(at, "loss")


DOT = Method(
    "dot",
    "inner product of the loss gradients",
    "gradients of both splits at one checkpoint",
    "Q x N products",
    exact=True,
    reference="Charpiat et al., Input Similarity from the Neural Network Perspective, 2019",
    prepare=_prepare_dot,
    over="one",
    layered=True,
)


def _prepare_cos(at: CheckpointView, options: NoOptions) -> Scorer:
    return cosines(at)


def cosines(at: CheckpointView) -> Scorer:
    """Build a scorer of cosines `[b, N]` of loss gradients, or of their coordinates."""
    question = at.question
    queries, train = at.queries(), at.train()

    def score(start: int, stop: int) -> Tensor:
        return query.cosine(
            queries,
            train,
            ids=queries.ids[question.positions[start:stop]],
            compute=question.compute,
            memory_budget=question.memory_budget,
        ).values

    return Scorer(score)


COS = Method(
    "cos",
    "cosine of the angle between the loss gradients",
    "gradients of both splits at one checkpoint",
    "Q x N products",
    exact=True,
    reference="Barshan et al., RelatIF, 2020",
    prepare=_prepare_cos,
    over="one",
)


@dataclass(frozen=True, slots=True)
class TracinOptions:
    """Options of `tracin`."""

    lrs: Sequence[float] | None = None
    """One learning rate per checkpoint; by default those of the captures."""


def _prepare_tracin(at: CheckpointView, options: TracinOptions) -> Scorer:
    checkpoints = at.question.checkpoints
    if options.lrs is not None and len(options.lrs) != len(checkpoints):
        raise AttributionError(
            "tracin needs one learning rate per checkpoint",
            code="attribute.wrong_lrs",
            found=f"{len(options.lrs)} learning rates for {len(checkpoints)} checkpoints",
        )
    lr = at.place.lr if options.lrs is None else options.lrs[checkpoints.index(at.place)]
    if lr is None:
        raise AttributionError(
            f"tracin needs the learning rate at checkpoint {str(at.place)!r}",
            code="attribute.no_lr",
            fix="Pass lrs=, or capture with gk.Weights(source, lr=...).",
        )
    return products(at, "loss", weight=float(lr))


TRACIN = Method(
    "tracin",
    "sum over checkpoints of learning rate x inner product of the loss gradients",
    "gradients of both splits at several checkpoints, with learning rates",
    "C x Q x N products",
    exact=True,
    reference="Pruthi et al., Estimating Training Data Influence by Tracing Gradient Descent, 2020",
    prepare=_prepare_tracin,
    over="sum",
    options=TracinOptions,
    layered=True,
)


def _prepare_self(at: CheckpointView, options: NoOptions) -> Scorer:
    train = at.train()
    if at.question.per_layer:
        parts = train.norms(per_layer=True).double().square().float().T.unsqueeze(1)
    else:
        parts = train.norms().double().square().float().unsqueeze(0)

    def score(start: int, stop: int) -> Tensor:
        return parts

    return Scorer(score)


SELF = Method(
    "self",
    "squared length of a row's own loss gradient, summed over checkpoints",
    "gradients of the training split",
    "reads the kept norms",
    exact=True,
    reference="Pruthi et al., 2020 (self-influence)",
    prepare=_prepare_self,
    over="sum",
    about_queries=False,
    layered=True,
)


def products(at: CheckpointView, of: GradientOf, *, weight: float = 1.0) -> Scorer:
    """Build a scorer of products `[b, N]` of gradients, or `[L, b, N]` per layer."""
    question = at.question
    queries, train = at.queries(of), at.train(of)

    plans: list[QueryPlan] = []

    def score(start: int, stop: int) -> Tensor:
        result = query.dot(
            queries,
            train,
            weights=[weight],
            ids=queries.ids[question.positions[start:stop]],
            compute=question.compute,
            memory_budget=question.memory_budget,
            per_layer=question.per_layer,
        )
        plans[:] = [result.plan]
        if not question.per_layer:
            return result.values
        assert result.per_layer is not None
        return result.per_layer

    return Scorer(score, plan=lambda: plans[0] if plans else None)
