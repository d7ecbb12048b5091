"""`arnoldi`: influence along the directions in which the loss is curved most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep import query
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._curvature import CurvatureOptions, curvature, lanczos
from gradkeep.attribution._method import Method, Scorer
from gradkeep.attribution._projections import _random
from gradkeep.errors import AttributionError, BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class Options(CurvatureOptions):
    """What `arnoldi` can be told."""

    rank: int = 50
    """How many eigenvectors are kept, those with the largest eigenvalues."""
    iterations: int = 100
    """Products with the curvature, from which the eigenvectors are found."""
    seed: int = 0
    """Of the first vector."""


def _prepare(at: CheckpointView, options: Options) -> Scorer:
    if not 1 <= options.rank <= options.iterations:
        raise AttributionError(
            "arnoldi needs a rank of at least 1 and no fewer iterations",
            found=f"rank={options.rank}, iterations={options.iterations}",
            fix="twice as many iterations as eigenvectors are usual",
        )
    curved = curvature(at, options)
    question, size = at.question, curved.space.size
    need = 8 * size * (min(options.iterations, size) + options.rank)
    if question.memory_budget is not None and need > parse_bytes(question.memory_budget):
        raise BudgetError(
            f"{options.iterations} vectors of {size} numbers do not fit in the memory budget",
            found=str(question.memory_budget),
            expected=f"at least {format_bytes(need)}",
            fix="pass fewer iterations=, fewer layers=, or a larger memory_budget=",
        )
    start = _random.normals(size, "arnoldi", options.seed).double()
    found = lanczos(
        lambda v: curved.product(v.unsqueeze(0))[0],
        start,
        iterations=options.iterations,
        rank=options.rank,
    )
    directions = curved.space.directions(found.vectors)
    train, asked = (
        query.along(side, directions, memory_budget=question.memory_budget).double()
        for side in (at.train(), at.queries())
    )
    weighed = train / (found.values + curved.damping).unsqueeze(1)
    chosen = asked[:, question.positions]

    def score(begin: int, stop: int) -> Tensor:
        return (chosen[:, begin:stop].t() @ weighed).float()

    return Scorer(score, approximate=f"the {len(found.values)} directions of most curvature")


METHOD = Method(
    "arnoldi",
    "query gradient x (curvature + damping)^-1 x training gradient, along the top eigenvectors of "
    "the curvature",
    "gradients of both splits; model= and data= for the Hessian or the Gauss-Newton matrix",
    "a pass over the training data for each iteration, then rank products a pair",
    exact=False,
    reference="Schioppa et al., Scaling Up Influence Functions, 2022",
    prepare=_prepare,
    options=Options,
)
