"""`kernel`: the weighted kernel, our default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._kernel_weights import KernelWeight, LossSlopes, loss_slopes
from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._row_features import features
from gradkeep.attribution._solve import by_features, dual, mean_square, relative_damping
from gradkeep.attribution.projections import Projection
from gradkeep.attribution.scorers._gradient_products import products

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView

MOST_ROWS = 10_000
"""Of more rows the kernel is not made: their projected gradients stand in for them."""


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel` can be told."""

    damping: float | Literal["auto"] = 1.0
    """Times the mean diagonal of the weighted kernel; "auto": chosen by subset outcomes."""
    weight: KernelWeight = "q"
    """What rows weigh in the curvature."""
    q: Any = None
    """1 - p of every training row `[N]`; by default the mean over the checkpoints."""
    dim: int | None = None
    """Use projections to so many numbers; by default only for more than 10,000 rows."""
    seed: int = 0
    """Of the projection."""


def _pool_kernel(question: AttributionQuestion, options: KernelOptions) -> LossSlopes:
    return loss_slopes(question, options.weight, q=options.q)


def _prepare_kernel(at: CheckpointView, options: KernelOptions) -> Scorer:
    found: LossSlopes = at.pooled
    if options.dim is None and _fits(at):
        return _exact(at, options, found)
    return _projected(at, options, found)


def _exact(at: CheckpointView, options: KernelOptions, found: LossSlopes) -> Scorer:
    question = at.question
    train = at.train(found.of)
    kernel = query.gram(
        train, compute=question.compute, memory_budget=question.memory_budget
    ).values
    diagonal = float((kernel.diagonal().double() * found.weight).mean())
    damping = relative_damping(options.damping, diagonal, what="damping")
    solve = dual(kernel, weight=found.weight, pull=found.pull, damping=damping)
    asked = products(at, found.of)

    def score(start: int, stop: int) -> Tensor:
        return solve(asked.score(start, stop))

    return Scorer(score, plan=asked.plan)


def _projected(at: CheckpointView, options: KernelOptions, found: LossSlopes) -> Scorer:
    projection = Projection(dim=options.dim or 4096, seed=options.seed)
    x, g = features(at, found.of, projection)
    damping = relative_damping(options.damping, mean_square(x, found.weight), what="damping")
    solve = by_features(x, weight=found.weight, pull=found.pull, damping=damping)

    def score(start: int, stop: int) -> Tensor:
        return solve(g[start:stop])

    return Scorer(score, approximate=f"gradients projected to {projection.dim} numbers")


def _fits(at: CheckpointView) -> bool:
    """Whether the kernel can be held twice, as itself and factored."""
    rows, budget = len(at.train_block), at.question.memory_budget
    if at.question.per_layer:
        return True
    limit = None if budget is None else parse_bytes(budget)
    return rows <= MOST_ROWS and (limit is None or 2 * rows * rows * 4 <= limit // 2)


KERNEL = Method(
    "kernel",
    "inner product of output gradients through the inverse of their damped, weighted kernel",
    "gradients of both splits; several checkpoints, also from the middle of training, are better",
    "N^3 / 3 + Q N^2 per checkpoint; above 10,000 rows N k^2 + Q N k",
    exact=True,
    reference="Park et al., TRAK, 2023, with the curvature of the logistic loss as weights",
    prepare=_prepare_kernel,
    pool=_pool_kernel,
    options=KernelOptions,
    tuned="damping",
    candidates=(0.3, 1.0, 3.0, 10.0),
    layered=True,
    whitened=True,
)
