"""Ridge for many targets at once, to a proven gap.

    min over w of 1/2 w'Gw - c'w + power/2 + ridge/2 |w|^2

Conjugate gradients, one matrix product per step for all targets. A residual r = c - Gw - ridge w
proves that the value is at most |r|^2 / (2 ridge) above the best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.datamodels.fitting._l1 import MARGIN

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gradkeep.datamodels.fitting._l1 import PenalizedProblem, SolverState

_PATIENCE = 20
"""Steps without a smaller residual of any target after which rounding has won."""


def conjugate(
    times: Callable[[torch.Tensor], torch.Tensor],
    problem: PenalizedProblem,
    state: SolverState,
    *,
    tolerance: float,
    max_steps: int,
) -> torch.Tensor:
    """Move the state to the optimum; the gap `[t]` relative to half of each target's power.

    Costs 2 t p^2 operations a step; about sqrt(largest eigenvalue of G / ridge) steps.
    """
    import torch
    from torch.linalg import vecdot

    ridge, power = problem.ridge, problem.power
    tiny = torch.finfo(power.dtype).tiny
    ids = torch.arange(len(power), device=power.device)
    gap = torch.zeros_like(power)
    x, gx = state.x.clone(), state.gx.clone()
    r = problem.c - gx - ridge[:, None] * x
    d = r
    square = vecdot(r, r)
    best = square
    stalled = 0
    for _ in range(max_steps):
        now = torch.where(power[ids] > 0, square / (ridge[ids] * power[ids]).clamp_min(tiny), 0.0)
        running = now > tolerance
        left = int(running.sum())
        if left == 0 or stalled >= _PATIENCE:
            break
        if left < MARGIN * len(ids):
            state.x[ids], state.gx[ids], gap[ids] = x, gx, now
            ids, x, gx, r, d = ids[running], x[running], gx[running], r[running], d[running]
            square, best = square[running], best[running]
        gd = times(d)
        length = square / vecdot(d, gd + ridge[ids, None] * d).clamp_min(tiny)
        x = torch.addcmul(x, d, length[:, None])
        gx = torch.addcmul(gx, gd, length[:, None])
        # From x, not by the usual recurrence: its rounding would let the residual look too small.
        r = problem.c[ids] - gx - ridge[ids, None] * x
        new = vecdot(r, r)
        d = torch.addcmul(r, d, (new / square.clamp_min(tiny))[:, None])
        stalled = 0 if bool((new < best).any()) else stalled + 1
        square, best = new, torch.minimum(best, new)
    now = torch.where(power[ids] > 0, square / (ridge[ids] * power[ids]).clamp_min(tiny), 0.0)
    state.x[ids], state.gx[ids], gap[ids] = x, gx, now
    return gap
