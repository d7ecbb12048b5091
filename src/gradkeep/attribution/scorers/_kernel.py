"""`kernel`: the weighted kernel, the default method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradkeep._ranks import column_correlations
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution._row_features import column, features
from gradkeep.attribution.scorers._gradient_products import products
from gradkeep.curvature._cholesky import ParameterSolver, WeightedKernel
from gradkeep.curvature._conjugate import KERNEL_METHODS, KernelMethod, kernel_solver
from gradkeep.curvature._feature_solvers import by_features, dual, mean_square, relative_damping
from gradkeep.curvature._row_parts import dense_rows
from gradkeep.curvature._sketches import Projection
from gradkeep.errors import AttributionError
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import AttributionQuestion, CheckpointView
    from gradkeep.attribution._row_features import KeptRows
    from gradkeep.query import Gradients
    from gradkeep.query._gradients import GradientOf
    from gradkeep.store import Block


KernelWeight = Literal["q", "q(1-q)", "none"]
ScoreTarget = Literal["loss", "output"]
"""What a score is about: the query's loss (positive lowers it) or its output (positive raises it)."""
WEIGHTS: tuple[KernelWeight, ...] = ("q", "q(1-q)", "none")
LEAST = 1e-12
"""Weights are no smaller: a row that the model is sure of still has a place in the kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSlopes:
    """Per training row: what its loss does along its output."""

    of: GradientOf
    """Whose gradients the kernel is made of."""
    pull: Tensor
    """`[N]`: -d loss / d output, the mean over checkpoints; 1 where losses are all there is"""
    weight: Tensor
    """`[N]`: the weight of the row in the curvature"""
    query_pull: Tensor
    """`[Q]`: what turns a score of the query's output into one of its loss"""

    def about_queries(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """Scores `[..., stop - start, N]` of outputs as scores of the target."""
        return scores * self.query_pull[start:stop, None]


def loss_slopes(
    question: AttributionQuestion,
    weight: KernelWeight,
    *,
    q: Any = None,
    target: ScoreTarget = "loss",
) -> LossSlopes:
    """The pulls and weights of the training rows, from what was kept of them.

    Where loss = log(1 + exp(-output)), q = 1 - p is the pull, and the weight is what was asked
    for. Of other losses of one output, such as squared errors, the weight is 1 (Gauss-Newton).
    Where only losses were kept, their gradients make the kernel, and both are 1. `q [N]` may be
    given, for example the mean over models that did not see the row.

    A score says what a row does to the query's output. Multiplied by -d loss / d output of the
    query, the mean over checkpoints, it says what the row does to the query's loss. Margins are
    left as they are: raising one always lowers its loss. `target="output"` leaves every output so.
    """
    if weight not in WEIGHTS:
        raise AttributionError(f"weight {weight!r}", expected=" or ".join(map(repr, WEIGHTS)))
    places = question.at()
    rows = len(places[0].train_block)
    as_is = torch.ones(len(question.positions))
    if not all(at.has_outputs() for at in places):
        _refuse(q)
        if target == "output":
            raise AttributionError(
                "scores of outputs need captured outputs: these captures keep losses only",
                fix="leave target out",
            )
        return LossSlopes("loss", torch.ones(rows), torch.ones(rows), as_is)
    if not all(_is_margin(at.train_block) for at in places):
        _refuse(q)
        mean = _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if target == "loss":
            pulls = [-column(at.query_block, "slope", method="kernel") for at in places]
            as_is = _mean(pulls)[torch.from_numpy(question.positions)]
        return LossSlopes("output", mean, torch.ones(rows), as_is)
    # Probabilities are averaged, not their logarithms.
    pooled = (
        _mean([-column(at.train_block, "slope", method="kernel") for at in places])
        if q is None
        else _given(q)
    )
    if pooled.shape != (rows,):
        raise AttributionError(
            "q needs one value per training row",
            found=f"shape {list(pooled.shape)}",
            expected=f"[{rows}]",
        )
    by = {"q": pooled, "q(1-q)": pooled * (1 - pooled), "none": torch.ones(rows)}[weight]
    return LossSlopes("output", pooled, by.clamp(min=LEAST), as_is)


def _is_margin(block: Block) -> bool:
    """Tell whether the loss is that of a margin: log(1 + exp(-output))."""
    if "output" not in block.names:  # imported from TRAK, which keeps only the slopes
        slopes = column(block, "slope", method="kernel")
        return bool(((slopes >= -1) & (slopes <= 0)).all())
    outputs = column(block, "output", method="kernel").double()
    expected = torch.nn.functional.softplus(-outputs)
    return torch.allclose(
        column(block, "loss", method="kernel").double(), expected, rtol=1e-3, atol=1e-5
    )


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).double().mean(0).float()


def _given(q: Any) -> Tensor:
    found = torch.as_tensor(np.asarray(q), dtype=torch.float32)
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise AttributionError("q must lie between 0 and 1: it is 1 - p")
    return found


def _refuse(q: Any) -> None:
    if q is not None:
        raise AttributionError(
            "q is about margins, which these captures do not keep",
            fix="capture with gk.Classification(), or leave q out",
        )


def solved_scores(
    at: CheckpointView,
    kernel: WeightedKernel,
    pull: Tensor,
    *,
    of: GradientOf,
    tolerance: float,
    wish: KernelMethod | None = None,
) -> Scorer:
    """pull / s * M^-1 (s k) of the products k of each query with all rows; M and s are the kernel's."""
    question = at.question
    asked = products(at, of)
    parts = len(kernel.train.forms) if question.per_layer else 1
    solver = kernel_solver(
        kernel, parts * len(question.positions), tolerance=tolerance, method=wish
    )
    if isinstance(solver, ParameterSolver):
        return _by_parameters(at, solver, pull, of)
    s = kernel.weight.sqrt()
    after = pull / s

    def score(start: int, stop: int) -> Tensor:
        right = asked.score(start, stop)
        shape = right.shape
        right = right.mul_(s).reshape(-1, len(s)).t().contiguous()
        return (solver.solved(right).t() * after).reshape(shape)

    return Scorer(score, plan=asked.plan, solution=solver.solution)


def _by_parameters(
    at: CheckpointView, solver: ParameterSolver, pull: Tensor, of: GradientOf
) -> Scorer:
    question, asked = at.question, at.queries(of)

    def score(start: int, stop: int) -> Tensor:
        positions = question.positions[start:stop].tolist()
        parts = [dense_rows(asked, name, positions).float() for name in asked.forms]
        if not question.per_layer:
            return solver.along_rows(torch.cat(parts, 1)).mul_(pull)
        # A layer alone is a gradient that is zero elsewhere.
        alone = [
            [part if here == only else torch.zeros_like(part) for here, part in enumerate(parts)]
            for only in range(len(parts))
        ]
        return torch.stack([solver.along_rows(torch.cat(one, 1)).mul_(pull) for one in alone])

    return Scorer(score, solution=solver.solution)


_ROWS, _QUERIES = 1000, 16
"""Training rows and queries that are solved both ways."""


def sketch_agreement(
    at: CheckpointView, found: LossSlopes, x: KeptRows, g: Tensor, damping: float
) -> str:
    """The mean rank correlation of both ways on some rows and queries, in words.

    The damping of some rows is a share of that of all, so that as many directions count as among
    all rows.
    """
    train, asked, question = at.train(found.of), at.queries(found.of), at.question
    draws = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(train), generator=draws)[:_ROWS].sort().values
    places = torch.randperm(len(g), generator=draws)[:_QUERIES].sort().values
    queries = question.positions[places.numpy()].tolist()
    share = damping * len(rows) / len(train)
    weight, pull = found.weight[rows], found.pull[rows]
    some = x.read(rows.numpy())
    scores = []
    for kernel, pairs in (
        (_products(train, train, rows.tolist(), rows), _products(asked, train, queries, rows)),
        (some @ some.T, g[places] @ some.T),
    ):
        solve = dual(kernel, weight=weight, pull=pull, damping=share)
        scores.append(solve(pairs).T.numpy())
    agreement = float(np.nan_to_num(column_correlations(*scores)).mean())
    return f"whose ranks agree {agreement:.2f} with exact ones on {len(rows)} rows and {len(queries)} queries"


def _products(queries: Gradients, train: Gradients, positions: list[int], rows: Tensor) -> Tensor:
    engine = ProductEngine(
        [GradientPair(queries, train)], answer=0, positions=positions, rows=rows.tolist()
    )
    out = torch.empty(len(positions), len(rows))
    for tile in engine.tiles():
        part = tile.values[0]
        here = slice(tile.query_start, tile.query_start + len(part))
        out[here, tile.train_start : tile.train_start + part.shape[1]] = part
    return out


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel` can be told."""

    damping: float | Literal["auto"] = 1.0
    """Times the mean diagonal of the weighted kernel; "auto": chosen by subset outcomes."""
    weight: KernelWeight = "q"
    """What rows weigh in the curvature."""
    q: Any = None
    """1 - p of every training row `[N]`; by default the mean over the checkpoints."""
    solver: KernelMethod | Literal["auto"] = "auto"
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
    if options.solver not in ("auto", *KERNEL_METHODS):
        raise AttributionError(
            f"no solver {options.solver!r}",
            expected=", ".join(map(repr, ("auto", *KERNEL_METHODS))),
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
        relative_damping(options.damping, diagonal, name="damping"),
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
    damping = relative_damping(options.damping, mean_square(x, found.weight), name="damping")
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
