"""L1 and elastic net for few targets: exact steps among the examples that have weights.

Where `descend_by_blocks` shares its products among many targets, one target alone is done sooner by
solving for its weights with their signs held: a small linear system each time a sign or the set of
weights changes, which along a path of penalties is seldom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels.fitting._l1 import PenalizedProblem, SolverState
    from gradkeep.datamodels.fitting._standardized import Gram

FEW = 2
"""Targets up to which it is the faster way."""
_MOST = 400
"""Weights beyond which a small linear system is not small."""
_ROUNDS, _SOLVES = 30, 200


def solve_by_active_sets(
    gram: Gram, problem: PenalizedProblem, state: SolverState, *, tolerance: float
) -> torch.Tensor | None:
    """Move the state to the optimum; the gap `[t]`, or None if another way has to finish.

    Cost: |A|^3 / 3 operations for each change of the set A of examples with weights, and n |A| for
    each look at all others. The state is the best found, also where it did not reach the tolerance.
    """
    import torch

    for at in range(len(problem.c)):
        one = torch.tensor([at])
        now, here = problem.rows(one), state.rows(one)
        if not _one(gram, now, here, tolerance):
            return None
        state.x[at], state.gx[at] = here.x[0], here.gx[0]
    return problem.gap(state.x, problem.c - state.gx - problem.ridge[:, None] * state.x)


def _one(gram: Gram, problem: PenalizedProblem, state: SolverState, tolerance: float) -> bool:
    """The same for one target; whether its gap is small enough."""
    import torch

    lam, ridge = float(problem.lam[0]), float(problem.ridge[0])
    slope = problem.c - state.gx - problem.ridge[:, None] * state.x
    for _ in range(_ROUNDS):
        if float(problem.gap(state.x, slope)[0]) <= tolerance:
            return True
        inside = (state.x[0] != 0) | (slope[0].abs() > lam)
        ids = inside.nonzero()[:, 0]
        if not 0 < len(ids) <= _MOST:
            return False
        start = state.x[0, ids]
        signs = torch.where(start != 0, start, slope[0, ids]).sign()
        matrix = gram.part(ids)
        matrix.diagonal().add_(ridge)
        x = _with_signs(matrix, problem.c[0, ids], lam, start, signs)
        if x is None:
            return False
        state.x.zero_()
        state.x[0, ids] = x
        state.gx = gram.times_some(x[None], ids)
        slope = problem.c - state.gx - problem.ridge[:, None] * state.x
    return bool(float(problem.gap(state.x, slope)[0]) <= tolerance)


def _with_signs(
    matrix: torch.Tensor, c: torch.Tensor, lam: float, start: torch.Tensor, signs: torch.Tensor
) -> torch.Tensor | None:
    """The least of 1/2 w'Mw - c'w + lam |w| over weights of these signs, or zero; None: no luck.

    From `start`, a step to the solution with all signs held, or to where the first weight is zero,
    which then stays so. Every step lowers the objective.
    """
    import torch

    x, held = start.clone(), torch.arange(len(c))
    right = c - lam * signs
    for _ in range(_SOLVES):
        if not len(held):
            return x
        here = matrix if len(held) == len(c) else matrix[held][:, held]
        factor = torch.linalg.cholesky_ex(here)
        if int(factor.info):
            return None
        wanted = torch.cholesky_solve(right[held, None], factor.L)[:, 0]
        wrong = wanted * signs[held] < 0
        if not bool(wrong.any()):
            x[held] = wanted
            return x
        now = x[held]
        idle = wrong & (now == 0)
        if bool(idle.any()):  # never had a weight, and gets none
            held = held[~idle]
            continue
        share = torch.where(wrong, now / (now - wanted), torch.inf)
        first = share.min()
        stopped = share <= first
        x[held] = torch.where(stopped, 0.0, now + first * (wanted - now))
        held = held[~stopped]
    return None
