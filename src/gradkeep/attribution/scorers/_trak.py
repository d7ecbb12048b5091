"""`trak`: projected output gradients through the inverse of their ridged second moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution._row_features import features
from gradkeep.attribution.scorers._kernel import LossSlopes, ScoreTarget, loss_slopes
from gradkeep.curvature._cholesky import by_features, mean_square, relative_damping
from gradkeep.curvature._sketches import Projection, ProjectionKind
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView


@dataclass(frozen=True, slots=True)
class TrakOptions:
    """Options of `trak`."""

    dim: int = 2048
    """Dimension k of the projected gradients."""
    ridge: float | Literal["auto"] = 1.0
    """Ridge relative to the mean diagonal of the inverted matrix, `[k, k]`, or `[N, N]` if there are fewer rows
    than dimensions; 0: none; "auto": chosen by subset outcomes.
    """
    projection: ProjectionKind = "auto"
    seed: int = 0
    target: ScoreTarget = "loss"
    """Score the query's loss (positive lowers it) or its output (positive raises it)."""


def _pool_trak(question: AttributionQuestion, options: TrakOptions) -> LossSlopes:
    return loss_slopes(question, "none", target=options.target)


def _prepare_trak(at: CheckpointView, options: TrakOptions) -> Scorer:
    slopes: LossSlopes = at.pooled
    projection = Projection(options.projection, options.dim, options.seed)
    x, g = features(at, slopes.of, projection)
    rows, dim = x.count, x.dim
    if options.ridge == 0 and dim >= rows:
        raise AttributionError(
            f"a {dim} x {dim} matrix of {rows} rows is singular and has no inverse without a ridge",
            code="attribute.singular",
            found=f"dim={dim}, ridge=0",
            fix=f"Omit ridge, or pass dim={max(1, rows // 4)}.",
        )
    one = torch.ones(rows)
    trace = mean_square(x, one) * rows
    ridge = 0.0
    if options.ridge != 0:
        ridge = relative_damping(options.ridge, trace / min(rows, dim), name="ridge")
    solve = by_features(x, weight=one, pull=slopes.pull, damping=ridge)

    def score(start: int, stop: int) -> Tensor:
        return slopes.about_queries(solve(g[start:stop]), start, stop)

    return Scorer(score, approximate=f"gradients projected to {dim} numbers")


TRAK = Method(
    "trak",
    "inner product of projected output gradients through the inverse of their ridged second "
    "moment, times 1 - p of the training row",
    "gradients of both splits; the final checkpoints of several runs are better",
    "N k^2 + k^3 / 3 + Q N k per checkpoint",
    exact=False,
    reference="Park et al., TRAK: Attributing Model Behavior at Scale, 2023",
    prepare=_prepare_trak,
    pool=_pool_trak,
    options=TrakOptions,
    tuned="ridge",
    candidates=(0.1, 0.3, 1.0, 3.0, 10.0),
    whitened=True,
)
