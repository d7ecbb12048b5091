"""`kernel`: the weighted kernel, the default method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradkeep._ranks import column_correlations
from gradkeep.attribution._question import Method, Scorer, column
from gradkeep.attribution._row_features import features
from gradkeep.attribution.scorers._gradient_products import products
from gradkeep.curvature._cholesky import (
    ParameterSolver,
    WeightedKernel,
    by_features,
    dual,
    mean_square,
    relative_damping,
)
from gradkeep.curvature._conjugate import KernelMethod, kernel_solver
from gradkeep.curvature._row_parts import dense_rows
from gradkeep.curvature._sketches import Projection, ProjectionKind
from gradkeep.errors import AttributionError
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView
    from gradkeep.attribution._row_features import RowStorage
    from gradkeep.query import Gradients
    from gradkeep.query._gradients import GradientOf
    from gradkeep.store import Block


KernelWeight = Literal["q", "q(1-q)", "none"]
ScoreTarget = Literal["loss", "output"]
"""Score the query's loss (positive lowers it) or its output (positive raises it)."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSlopes:
    """Derivatives of the losses of training rows with respect to their outputs."""

    of: GradientOf
    """Gradients that the kernel is built of."""
    pull: Tensor
    """`[N]`: -d loss / d output, the mean over checkpoints; 1 if only losses were captured"""
    weight: Tensor
    """`[N]`: weight of the row in the curvature"""
    query_pull: Tensor
    """`[Q]`: factor from a score of the query's output to one of its loss"""

    def about_queries(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """Convert scores `[..., stop - start, N]` of outputs to scores of the target."""
        return scores * self.query_pull[start:stop, None]


def loss_slopes(
    question: AttributionQuestion,
    weight: KernelWeight,
    *,
    q: Any = None,
    target: ScoreTarget = "loss",
) -> LossSlopes:
    """Compute the pulls and weights of the training rows from captured values.

    If loss = log(1 + exp(-output)), q = 1 - p is the pull, and the weight is as requested. For other losses
    of one output, such as squared errors, the weight is 1 (Gauss-Newton). If only losses were captured, their
    gradients make the kernel, and both are 1. `q [N]` can be passed, for example the mean over models that
    did not see the row.

    A score estimates the effect of a row on the query's output. Multiplied by -d loss / d output of the query,
    the mean over checkpoints, it estimates the effect on the query's loss. Scores of margins are not
    multiplied: raising a margin always lowers its loss. `target="output"` multiplies none.
    """
    places = question.at()
    rows = len(places[0].train_block)
    query_pull = torch.ones(len(question.positions))
    if not all(at.has_outputs() for at in places):
        _require_no_q(q)
        if target == "output":
            raise AttributionError(
                "scores of outputs need captured outputs, but the captures hold only losses",
                code="attribute.no_outputs",
                fix="Omit target.",
            )
        return LossSlopes("loss", torch.ones(rows), torch.ones(rows), query_pull)
    if not all(_is_margin(at.train_block) for at in places):
        _require_no_q(q)
        mean = _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if target == "loss":
            pulls = [-column(at.query_block, "slope", method="kernel") for at in places]
            query_pull = _mean(pulls)[torch.from_numpy(question.positions)]
        return LossSlopes("output", mean, torch.ones(rows), query_pull)
    # Probabilities are averaged, not their logarithms.
    pooled = (
        _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if q is None
        else _validate_q(q)
    )
    if pooled.shape != (rows,):
        raise AttributionError(
            "q needs one value per training row",
            code="attribute.wrong_q",
            found=f"shape {list(pooled.shape)}",
            expected=f"[{rows}]",
        )
    by = {"q": pooled, "q(1-q)": pooled * (1 - pooled), "none": torch.ones(rows)}[weight]
    # Rows with a confident prediction stay in the kernel.
    return LossSlopes("output", pooled, by.clamp(min=1e-12), query_pull)


def _is_margin(block: Block) -> bool:
    """Return True if the loss is that of a margin: log(1 + exp(-output))."""
    if "output" not in block.names:  # imported from TRAK, which stores only the slopes
        slopes = column(block, "slope", method="kernel")
        return bool(((slopes >= -1) & (slopes <= 0)).all())
    outputs = column(block, "output", method="kernel").double()
    expected = torch.nn.functional.softplus(-outputs)
    return torch.allclose(
        column(block, "loss", method="kernel").double(), expected, rtol=1e-3, atol=1e-5
    )


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).double().mean(0).float()


def _validate_q(q: Any) -> Tensor:
    values = torch.as_tensor(np.asarray(q), dtype=torch.float32)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise AttributionError("q must be between 0 and 1: it is 1 - p", code="attribute.wrong_q")
    return values


def _require_no_q(q: Any) -> None:
    if q is not None:
        raise AttributionError(
            "q needs margins, which these captures do not hold",
            code="attribute.q_without_margins",
            fix="Capture with gk.Classification(), or omit q.",
        )


def solved_scores(
    at: CheckpointView,
    kernel: WeightedKernel,
    pull: Tensor,
    *,
    of: GradientOf,
    tolerance: float,
    solver_name: KernelMethod | None = None,
) -> Scorer:
    """Score by pull / s * M^-1 (s k), for the products k of each query with all rows; M and s are the kernel's."""
    question = at.question
    query_products = products(at, of)
    parts = len(kernel.train.forms) if question.per_layer else 1
    solver = kernel_solver(
        kernel, parts * len(question.positions), tolerance=tolerance, method=solver_name
    )
    if isinstance(solver, ParameterSolver):
        return _by_parameters(at, solver, pull, of)
    s = kernel.weight.sqrt()
    after = pull / s

    def score(start: int, stop: int) -> Tensor:
        right = query_products.score(start, stop)
        shape = right.shape
        right = right.mul_(s).reshape(-1, len(s)).t().contiguous()
        return (solver.solved(right).t() * after).reshape(shape)

    return Scorer(score, plan=query_products.plan, solution=solver.solution)


def _by_parameters(
    at: CheckpointView, solver: ParameterSolver, pull: Tensor, of: GradientOf
) -> Scorer:
    question, queries = at.question, at.queries(of)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        parts = [dense_rows(queries, name, positions).float() for name in queries.forms]
        if not question.per_layer:
            return solver.along_rows(torch.cat(parts, 1)).mul_(pull)
        # A single layer is a gradient that is zero elsewhere.
        alone = [
            [part if here == only else torch.zeros_like(part) for here, part in enumerate(parts)]
            for only in range(len(parts))
        ]
        return torch.stack([solver.along_rows(torch.cat(one, 1)).mul_(pull) for one in alone])

    return Scorer(score, solution=solver.solution)


def sketch_agreement(
    at: CheckpointView, slopes: LossSlopes, x: RowStorage, g: Tensor, damping: float
) -> str:
    """Describe the mean rank correlation of exact and projected scores on some rows and queries.

    The damping is scaled to the number of rows, so that as many directions count as among all rows.
    """
    train, query_gradients, question = at.train(slopes.of), at.queries(slopes.of), at.question
    draws = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(train), generator=draws)[:1000].sort().values
    places = torch.randperm(len(g), generator=draws)[:16].sort().values
    queries = question.positions[places.numpy()].tolist()
    share = damping * len(rows) / len(train)
    weight, pull = slopes.weight[rows], slopes.pull[rows]
    some = x.read(rows.numpy())
    scores = []
    for kernel, pairs in (
        (
            _products(train, train, rows.tolist(), rows),
            _products(query_gradients, train, queries, rows),
        ),
        (some @ some.T, g[places] @ some.T),
    ):
        solve = dual(kernel, weight=weight, pull=pull, damping=share)
        scores.append(solve(pairs).T.numpy())
    agreement = float(np.nan_to_num(column_correlations(*scores)).mean())
    return f"whose ranks agree {agreement:.2f} with exact ones on {len(rows)} rows and {len(queries)} queries"


def _products(queries: Gradients, train: Gradients, positions: list[int], rows: Tensor) -> Tensor:
    pair = GradientPair(queries, train)
    return ProductEngine([pair], answer=0, positions=positions, rows=rows.tolist()).matrix()


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of `kernel`."""

    damping: float | Literal["auto"] = 1.0
    """Damping relative to the mean diagonal of the weighted kernel; "auto": chosen by subset outcomes."""
    weight: KernelWeight = "q"
    """Weight of rows in the curvature."""
    q: Any = None
    """1 - p of every training row `[N]`; by default the mean over the checkpoints."""
    solver: KernelMethod | Literal["auto"] = "auto"
    """"cholesky" of the kernel, "parameters" for the dual problem in the parameters, "cg" for block conjugate
    gradients on factors; "auto": the fastest that fits into the memory budget. All are exact.
    """
    tolerance: float = 1e-4
    """Relative residual at which conjugate gradients stop."""
    dim: int | None = None
    """Dimension of projected gradients, which is not exact; None or 0: no projection."""
    seed: int = 0
    """Seed of the projection."""
    target: ScoreTarget = "loss"
    """Score the query's loss (positive lowers it) or its output (positive raises it)."""


def _pool_kernel(question: AttributionQuestion, options: KernelOptions) -> LossSlopes:
    if not 0 < options.tolerance < 1:
        raise AttributionError(
            f"tolerance must be between 0 and 1, got {options.tolerance}", code="argument.invalid"
        )
    if options.dim is not None and options.dim < 0:
        raise AttributionError(
            f"dim must be at least 0, got {options.dim}", code="argument.invalid", fix="Omit dim."
        )
    return loss_slopes(question, options.weight, q=options.q, target=options.target)


def _prepare_kernel(at: CheckpointView, options: KernelOptions) -> Scorer:
    slopes: LossSlopes = at.pooled
    return _projected(at, options, slopes) if options.dim else _exact(at, options, slopes)


def _exact(at: CheckpointView, options: KernelOptions, slopes: LossSlopes) -> Scorer:
    question, train = at.question, at.train(slopes.of)
    diagonal = float((train.norms().double().square() * slopes.weight).mean())
    kernel = WeightedKernel(
        train,
        slopes.weight,
        relative_damping(options.damping, diagonal, name="damping"),
        compute=question.compute,
        memory_budget=question.memory_budget,
        report=question.report,
    )
    solver_name = None if options.solver == "auto" else options.solver
    solved = solved_scores(
        at, kernel, slopes.pull, of=slopes.of, tolerance=options.tolerance, solver_name=solver_name
    )

    def score(start: int, stop: int) -> Tensor:
        return slopes.about_queries(solved.score(start, stop), start, stop)

    return dataclasses.replace(solved, score=score)


def _projected(at: CheckpointView, options: KernelOptions, slopes: LossSlopes) -> Scorer:
    assert options.dim
    projection = Projection(dim=options.dim, seed=options.seed)
    x, g = features(at, slopes.of, projection)
    damping = relative_damping(options.damping, mean_square(x, slopes.weight), name="damping")
    solve = by_features(x, weight=slopes.weight, pull=slopes.pull, damping=damping)

    def score(start: int, stop: int) -> Tensor:
        return slopes.about_queries(solve(g[start:stop]), start, stop)

    agreement = sketch_agreement(at, slopes, x, g, damping)
    return Scorer(
        score, approximate=f"gradients projected to {projection.dim} numbers, {agreement}"
    )


KERNEL = Method(
    "kernel",
    "inner product of output gradients through the inverse of their damped, weighted kernel",
    "gradients of both splits; several checkpoints, also from the middle of training, are better",
    "per checkpoint the least of N^3 / 3 + Q N^2, N P^2 + Q N P, and some 10 products of the kernel "
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
