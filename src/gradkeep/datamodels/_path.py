"""A path of penalties, each start warm, and which of them predicts left-out models best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep.datamodels._counts import DenseGram
from gradkeep.datamodels._l1 import (
    PenalizedProblem,
    SolverState,
    conjugate,
    descend_by_blocks,
    is_few,
    solve_by_active_sets,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from gradkeep.datamodels._counts import StandardizedRegression
    from gradkeep.datamodels._masks import AnyArray, Masks

Penalty = Literal["l1", "elastic", "ridge", "means"]
_WORTH = 0.6
"""A working set below this part of all examples pays for its own matrix."""


@dataclass(frozen=True, slots=True)
class PathSolver:
    """Solver of a path of penalties, with its stopping rule and the size of working sets."""

    kind: Penalty
    share: float
    tolerance: float
    max_steps: int
    working: int

    def penalties(
        self, standard: StandardizedRegression, fraction: float, natural: float
    ) -> torch.Tensor:
        """`[t]`: a fraction of the least penalty without weights (L1), or of the natural ridge."""
        import torch

        if self.kind == "ridge":
            return torch.full_like(standard.power, fraction * natural)
        return standard.largest * fraction / self.share

    def unit(self, standard: StandardizedRegression) -> AnyArray:
        """`[t]`, what a penalty in standard units is multiplied by to be one in output units."""
        return np.ones_like(standard.spread) if self.kind == "ridge" else standard.spread

    def start(self, standard: StandardizedRegression, x: torch.Tensor | None = None) -> SolverState:
        """No weights, or those of an earlier fit."""
        import torch

        if x is None:
            return SolverState(torch.zeros_like(standard.c), torch.zeros_like(standard.c))
        return SolverState(x.clone(), standard.gram.times(x))

    def solve(
        self,
        standard: StandardizedRegression,
        state: SolverState,
        lam: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """Move the state to the optimum at penalties lam `[t]`, coming from `before`; the gap."""
        if self.kind == "ridge":
            problem = PenalizedProblem(standard.c, standard.power, 0 * lam, lam)
            until: Any = {"tolerance": self.tolerance, "max_steps": self.max_steps}
            return conjugate(standard.gram.times, problem, state, **until)
        problem = PenalizedProblem(
            standard.c, standard.power, lam * self.share, lam * (1 - self.share)
        )
        return self._by_working_sets(standard, state, problem, before * self.share)

    def _by_working_sets(
        self,
        standard: StandardizedRegression,
        state: SolverState,
        problem: PenalizedProblem,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """Solve for the examples that may have weights, then check all others; widen and repeat."""
        if is_few(problem):
            solution = solve_by_active_sets(standard.gram, problem, state, tolerance=self.tolerance)
            if solution is not None:
                return solution
        until: Any = {"tolerance": self.tolerance, "max_steps": self.max_steps}
        most = min(self.working, int(_WORTH * problem.c.shape[1]))
        # The strong rule: gradients move no faster than penalties, but for rare exceptions.
        reach = (2 * problem.lam - before).clamp_min(0)[:, None]
        inside = ((_slope(problem, state).abs() >= reach) | (state.x != 0)).any(dim=0)
        for _ in range(4):
            ids = inside.nonzero()[:, 0]
            if len(ids) > most or len(ids) == 0:
                break
            matrix = DenseGram(standard.gram.part(ids))
            part = SolverState(state.x[:, ids], state.gx[:, ids])
            narrow = PenalizedProblem(problem.c[:, ids], problem.power, problem.lam, problem.ridge)
            descend_by_blocks(matrix, narrow, part, **until)
            state.x[:, ids] = part.x
            state.gx = standard.gram.times_some(part.x, ids)
            gap = problem.gap(state.x, _slope(problem, state))
            if not bool((gap > self.tolerance).any()):
                return gap
            slope = _slope(problem, state).abs()
            wider = inside | ((slope > problem.lam[:, None]) & (gap > self.tolerance)[:, None]).any(
                0
            )
            if bool((wider == inside).all()):
                break
            inside = wider
        return descend_by_blocks(standard.gram, problem, state, **until)


def _slope(problem: PenalizedProblem, state: SolverState) -> torch.Tensor:
    return problem.c - state.gx - problem.ridge[:, None] * state.x


def follow_path(
    solver: PathSolver,
    standard: StandardizedRegression,
    fractions: Sequence[float],
    natural: float,
    visit: Callable[
        [int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None
    ],
) -> None:
    """Solve along the path; `visit(index, ids, lam, w [t', n], gap)` may return which go on."""
    import torch

    ids = torch.arange(len(standard.c), device=standard.c.device)
    state = solver.start(standard)
    before = solver.penalties(standard, 1.0, natural)
    for index, fraction in enumerate(fractions):
        lam = solver.penalties(standard, fraction, natural)
        gap = solver.solve(standard, state, lam, before)
        on = visit(index, ids, lam, state.x, gap)
        before = lam
        if on is not None and not bool(on.all()):
            if not bool(on.any()):
                return
            ids, standard, state, before = ids[on], standard.targets(on), state.rows(on), lam[on]


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyChoice:
    """Selected penalty of each target.

    The index on the path `[t]`, the penalty in output units `[t]`, the weights `[n, t]`, and the predictions for held-out models `[m', t]`.
    """

    index: AnyArray
    lam: AnyArray
    weights: AnyArray
    predicted: AnyArray


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyStep:
    """Result of one penalty of a path, for the targets that were still on it.

    Errors are in squared units of the outputs, those of training of the models that were fitted;
    norms are of weights for standardised columns, as the penalty sees them.
    """

    index: int
    """The place on the path; -1 for the last fit, of all models at the chosen penalties."""
    targets: AnyArray
    """`[t']`, which targets"""
    lam: AnyArray
    """`[t']`, the penalties in output units"""
    train_error: AnyArray
    """`[t']`, mean squares"""
    held_out_error: AnyArray
    """`[t']`, mean squares; NaN where none were left out"""
    norm: AnyArray
    """`[t']`, sums of absolute weights"""
    nonzero: AnyArray
    """`[t']`, how many weights are not 0"""
    gap: AnyArray
    """`[t']`, how far from the optimum at most, in parts of half the output's variance"""


def step_of(
    standard: StandardizedRegression,
    w: torch.Tensor,
    index: int,
    targets: AnyArray,
    lam: AnyArray,
    held_out_error: AnyArray,
    gap: torch.Tensor,
) -> PenaltyStep:
    """The step of weights w `[t', n]`; one product with the matrix."""
    fitted = (w * (standard.gram.times(w) - 2 * standard.c)).sum(1) + standard.power
    norm = w.abs().sum(1).double().cpu().numpy() * standard.spread
    return PenaltyStep(
        index,
        targets,
        lam,
        fitted.clamp_min(0).double().cpu().numpy() * standard.spread**2,
        held_out_error,
        norm,
        (w != 0).sum(1).cpu().numpy(),
        gap.double().cpu().numpy(),
    )


def predict(masks: Masks, weights: AnyArray, bias: AnyArray) -> AnyArray:
    """Mask . weights + bias for all models, float64 `[m, t]`."""
    out = np.empty((len(masks), weights.shape[1]))
    for start, rows in masks.blocks(1024):
        out[start : start + len(rows)] = rows.astype(weights.dtype) @ weights
    out += bias
    return out


def predictor(masks: Masks) -> Callable[[AnyArray, AnyArray], AnyArray]:
    """`predict` of the same models for one penalty after the other: few are unpacked once."""
    if 4 * len(masks) * masks.num_examples > 16 << 20:  # bytes of unpacked masks
        return lambda weights, bias: predict(masks, weights, bias)
    rows = masks.dense(0, len(masks)).astype(np.float32)
    return lambda weights, bias: (rows @ weights).astype(np.float64) + bias


def choose_on_rows(
    solver: PathSolver,
    standard: StandardizedRegression,
    fractions: Sequence[float],
    natural: float,
    masks: Masks,
    outputs: AnyArray,
    *,
    together: bool,
    progress: Callable[[], None],
    each_penalty: Callable[[PenaltyStep], None] | None = None,
    first: int = 0,
) -> PenaltyChoice:
    """The penalty of each target (or, `together`, the one of all) with the least error on rows.

    Keeps only the best weights so far, and lets a target go once its error keeps rising.
    `each_penalty` is called with each step; targets are numbered from `first`.
    """
    count, n = standard.c.shape
    best = PenaltyChoice(
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros((n, count), np.float32),
        np.zeros((len(masks), count), np.float32),
    )
    least, predicted_by = np.full(count, np.inf), predictor(masks)

    def visit(
        index: int, ids: torch.Tensor, lam: torch.Tensor, w: torch.Tensor, gap: torch.Tensor
    ) -> torch.Tensor | None:
        import torch

        here = ids.cpu().numpy()
        now = standard if len(here) == count else standard.targets(ids)
        weights, bias = now.in_mask_units(w)
        predicted = predicted_by(weights.astype(np.float32), bias)
        squares = ((predicted - outputs[:, here]) ** 2).mean(axis=0, dtype=np.float64)
        penalty = lam.double().cpu().numpy() * solver.unit(now)
        if each_penalty is not None:
            each_penalty(step_of(now, w, index, first + here, penalty, squares, gap))
        error = squares / now.spread**2
        if together:
            error = np.full_like(error, error.mean())
        better = error < least[here]
        won = here[better]
        least[won], best.index[won] = error[better], index
        best.lam[won] = penalty[better]
        best.weights[:, won], best.predicted[:, won] = weights[:, better], predicted[:, better]
        progress()
        # A target leaves the path after so many penalties that predict worse than its best.
        return torch.from_numpy(index - best.index[here] < 4).to(ids.device)

    follow_path(solver, standard, fractions, natural, visit)
    return best


def predict_path(
    solver: PathSolver,
    standard: StandardizedRegression,
    fractions: Sequence[float],
    natural: float,
    masks: Masks,
    *,
    progress: Callable[[], None],
) -> AnyArray:
    """Predict the outputs of models with every penalty of a path, float32 `[penalties, m', t]`."""
    predictions = np.empty((len(fractions), len(masks), len(standard.c)), np.float32)
    predicted_by = predictor(masks)

    def visit(index: int, ids: torch.Tensor, lam: torch.Tensor, w: torch.Tensor, _: object) -> None:
        weights, bias = standard.in_mask_units(w)
        predictions[index] = predicted_by(weights.astype(np.float32), bias)
        progress()

    follow_path(solver, standard, fractions, natural, visit)
    return predictions
