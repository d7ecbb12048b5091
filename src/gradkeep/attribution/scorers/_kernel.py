"""`kernel`: the weighted kernel, our default."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gradkeep.attribution._kernel_weights import KernelWeight, LossSlopes, ScoreTarget, loss_slopes
from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._row_features import features
from gradkeep.attribution._sketch_agreement import sketch_agreement
from gradkeep.attribution._solve import by_features, mean_square, relative_damping
from gradkeep.attribution.kernels._choice import WAYS, KernelWay
from gradkeep.attribution.kernels._weighted import WeightedKernel
from gradkeep.attribution.projections._projection import Projection
from gradkeep.attribution.scorers._solved_scores import solved_scores
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel` can be told."""

    damping: float | Literal["auto"] = 1.0
    """Times the mean diagonal of the weighted kernel; "auto": chosen by subset outcomes."""
    weight: KernelWeight = "q"
    """What rows weigh in the curvature."""
    q: Any = None
    """1 - p of every training row `[N]`; by default the mean over the checkpoints."""
    solver: KernelWay | Literal["auto"] = "auto"
    """"cholesky" of the kernel, "parameters" for that among the parameters, "cg" for block conjugate
    gradients on factors; "auto": the fastest that fits into the memory budget. All are exact."""
    tolerance: float = 1e-4
    """The relative residual that conjugate gradients stop at."""
    dim: int | None = None
    """Use projections to so many numbers, which is not exact; None or 0: no projection."""
    seed: int = 0
    """Of the projection."""
    target: ScoreTarget = "loss"
    """Score the query's loss (positive lowers it), or on request its output (positive raises it)."""


def _pool_kernel(question: AttributionQuestion, options: KernelOptions) -> LossSlopes:
    if options.solver not in ("auto", *WAYS):
        raise AttributionError(
            f"no solver {options.solver!r}", expected=", ".join(map(repr, ("auto", *WAYS)))
        )
    if not 0 < options.tolerance < 1:
        raise AttributionError(
            "conjugate gradients need a tolerance between 0 and 1", found=options.tolerance
        )
    if options.dim is not None and options.dim < 0:
        raise AttributionError(
            "projections have some numbers", found=f"dim={options.dim}", fix="leave dim out"
        )
    return loss_slopes(question, options.weight, q=options.q, target=options.target)


def _prepare_kernel(at: CheckpointView, options: KernelOptions) -> Scorer:
    found: LossSlopes = at.pooled
    return _projected(at, options, found) if options.dim else _exact(at, options, found)


def _exact(at: CheckpointView, options: KernelOptions, found: LossSlopes) -> Scorer:
    question, train = at.question, at.train(found.of)
    diagonal = float((train.norms().double().square() * found.weight).mean())
    kernel = WeightedKernel(
        train,
        found.weight,
        relative_damping(options.damping, diagonal, what="damping"),
        compute=question.compute,
        memory_budget=question.memory_budget,
        report=question.report,
    )
    wish = None if options.solver == "auto" else options.solver
    solved = solved_scores(
        at, kernel, found.pull, of=found.of, tolerance=options.tolerance, wish=wish
    )

    def score(start: int, stop: int) -> Tensor:
        return found.about_queries(solved.score(start, stop), start, stop)

    return dataclasses.replace(solved, score=score)


def _projected(at: CheckpointView, options: KernelOptions, found: LossSlopes) -> Scorer:
    assert options.dim
    projection = Projection(dim=options.dim, seed=options.seed)
    x, g = features(at, found.of, projection)
    damping = relative_damping(options.damping, mean_square(x, found.weight), what="damping")
    solve = by_features(x, weight=found.weight, pull=found.pull, damping=damping)

    def score(start: int, stop: int) -> Tensor:
        return found.about_queries(solve(g[start:stop]), start, stop)

    agreement = sketch_agreement(at, found, x, g, damping)
    return Scorer(
        score, approximate=f"gradients projected to {projection.dim} numbers, {agreement}"
    )


KERNEL = Method(
    "kernel",
    "inner product of output gradients through the inverse of their damped, weighted kernel",
    "gradients of both splits; several checkpoints, also from the middle of training, are better",
    "per checkpoint the least of N^3 / 3 + Q N^2, N P^2 + Q N P, and some 6 products of the kernel "
    "with Q vectors; with dim=k N k^2 + Q N k",
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
