"""L1 and elastic net for few targets: exact steps among the examples that have weights.

Where `descend_by_blocks` shares its products among many targets, one target alone is done sooner by
solving for its weights with their signs held: a small linear system each time a sign or the set of
weights changes, which along a path of penalties is seldom. All else is vectors of one number an
example, on which numpy spends less than torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels.fitting._l1 import Gram, PenalizedProblem, SolverState
    from gradkeep.datamodels.fitting._masks import AnyArray

FEW = 2
"""Targets up to which it is the faster way."""
_ROUNDS, _SOLVES = 30, 200


def solve_by_active_sets(
    gram: Gram, problem: PenalizedProblem, state: SolverState, *, tolerance: float
) -> torch.Tensor | None:
    """Move the state to the optimum; the gap `[t]`, or None if another way has to finish.

    Cost: |A|^3 / 3 operations for each change of the set A of examples with weights, and n |A| for
    each look at all others. The state is the best found, also where it did not reach the tolerance.
    """
    gaps = problem.power.clone()
    for at in range(len(problem.c)):
        solution = _OneTarget(
            gram,
            problem.c[at].numpy(),
            *(float(part[at]) for part in (problem.power, problem.lam, problem.ridge)),
        )
        gap = solution.solve(state.x[at].numpy(), state.gx[at].numpy(), tolerance)
        if gap is None:
            return None
        gaps[at] = gap
    return gaps


@dataclass(frozen=True, slots=True, eq=False)
class _OneTarget:
    """1/2 w'Gw - c'w + power/2 + lam |w| + ridge/2 |w|^2, as `PenalizedProblem` has it of several."""

    gram: Gram
    c: AnyArray
    power: float
    lam: float
    ridge: float

    def gap(self, x: AnyArray, slope: AnyArray) -> float:
        """How far at most x is from the optimum, relative to half the power, by its own residual."""
        tiny = float(np.finfo(self.c.dtype).tiny)
        explained = float(x @ self.c)
        squared, along = self.power - explained - float(x @ slope), self.power - explained
        value = squared / 2 + self.lam * float(np.abs(x).sum())
        most = self.lam / max(tiny, float(np.abs(slope).max()))
        # Both ways: a step too far turns the best multiple negative.
        multiple = min(most, max(-most, along / max(tiny, squared)))
        bound = multiple * along - multiple * multiple * squared / 2
        return max(0.0, value - bound) / max(tiny, self.power / 2) if self.power > 0 else 0.0

    def solve(self, x: AnyArray, gx: AnyArray, tolerance: float) -> float | None:
        """Move x and its product gx, in place; the gap, or None if it is not small enough."""
        import torch

        slope = self.c - gx - self.ridge * x
        for _ in range(_ROUNDS):
            gap = self.gap(x, slope)
            if gap <= tolerance:
                return gap
            ids = np.flatnonzero((x != 0) | (np.abs(slope) > self.lam))
            # Weights beyond which a small linear system is not small.
            if not 0 < len(ids) <= 400:
                return None
            start = x[ids]
            signs = np.sign(np.where(start != 0, start, slope[ids]))
            where = torch.from_numpy(ids)
            matrix = self.gram.part(where)
            matrix.diagonal().add_(self.ridge)
            right = self.c[ids] - self.lam * signs
            solution = _with_signs(matrix, right, start, signs, together=True)
            if solution is not None and not self._lower(matrix, right, start, signs, solution):
                solution = _with_signs(matrix, right, start, signs, together=False)
            if solution is None:
                return None
            x[:] = 0
            x[ids] = solution
            gx[:] = self.gram.times_some(torch.from_numpy(solution)[None], where)[0].numpy()
            slope = self.c - gx - self.ridge * x
        gap = self.gap(x, slope)
        return gap if gap <= tolerance else None

    @staticmethod
    def _lower(
        matrix: torch.Tensor, right: AnyArray, start: AnyArray, signs: AnyArray, solution: AnyArray
    ) -> bool:
        """Return True if the objective is no higher than at the start, which guarantees termination."""
        here = matrix.numpy()

        def value(x: AnyArray) -> float:
            return float(x @ (here @ x) / 2 - x @ right)

        return value(solution) <= value(start)


def _with_signs(
    matrix: torch.Tensor, right: AnyArray, start: AnyArray, signs: AnyArray, *, together: bool
) -> AnyArray | None:
    """The least of 1/2 w'Mw - right'w over weights of these signs, or zero; None: no luck.

    A step to the solution with all signs held. Where that has wrong ones, all of those become zero
    and stay so (`together`, which is done in few steps but may leave weights out that belong there);
    or the step goes on to where the first one is zero, so that every step lowers the objective.
    """
    import torch

    x, held = start.copy(), np.arange(len(right))
    for _ in range(_SOLVES):
        if not len(held):
            return x
        here = matrix
        if len(held) < len(right):
            where = torch.from_numpy(held)
            here = matrix.index_select(0, where).index_select(1, where)
        factor = torch.linalg.cholesky_ex(here)
        if int(factor.info):
            return None
        column = torch.from_numpy(right[held])[:, None]
        solution: Any = torch.cholesky_solve(column, factor.L)[:, 0].numpy()
        wrong = solution * signs[held] < 0
        if not wrong.any():
            x[held] = solution
            return x
        now = x[held]
        # What never had a weight gets none.
        stopped = wrong if together else wrong & (now == 0)
        if not stopped.any():
            share = np.full_like(now, np.inf)
            np.divide(now, now - solution, out=share, where=wrong)
            first = share.min()
            stopped = share <= first
            x[held] = np.where(stopped, 0, now + first * (solution - now))
        x[held[stopped]] = 0
        held = held[~stopped]
    return None
