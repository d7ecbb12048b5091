"""L1 and elastic net on a matrix in memory: blocks of examples one after the other.

Each block takes a few proximal steps with the curvature of its own part of the matrix, which is
less than the whole one's, and hands the change of the slope on to all others at once. A pass costs
as much as one product with the whole matrix and gets about three times as far as an accelerated
step (`_l1.descend`, which needs nothing but products).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.datamodels._l1 import MARGIN, PATIENCE

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels._l1 import Problem, State

_INNER = 3
_MOMENTUM, _GAIN, _MOST_MOMENTUM = 0.3, 0.01, 0.95
"""Momentum at first, what every further pass adds to it, and its end: many passes mean that columns
depend on each other (fewer models than examples), where more of it saves most of them."""
_SAFETY = 1.0001
_LEAST, _MOST = 32, 256
_PER_MATRIX = 10
_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some consecutive examples: where, the square and the rows of the matrix, its curvature."""

    where: slice
    square: torch.Tensor
    rows: torch.Tensor
    curvature: float


def blocks(matrix: torch.Tensor) -> list[Block]:
    """The matrix in about ten blocks, fewer or more so that none is too small or too large.

    The curvature is the largest eigenvalue: no step can then raise the objective.
    """
    import torch

    p = len(matrix)
    size = min(_MOST, max(_LEAST, -(-p // _PER_MATRIX)))
    found = []
    for start in range(0, p, size):
        where = slice(start, min(p, start + size))
        square = matrix[where, where].contiguous()
        largest = float(torch.linalg.eigvalsh(square)[-1])
        found.append(Block(where, square, matrix[where], max(_SAFETY * largest, 1e-6)))
    return found


def sweep(
    parts: list[Block], problem: Problem, state: State, *, tolerance: float, max_steps: int
) -> torch.Tensor:
    """Move the state to the optimum; the gap `[t]` relative to half of each target's power.

    Stops each target at `tolerance`, all at `max_steps` passes, or when rounding allows no better
    value. Slopes are computed anew at the end, so that the gap is that of the weights and not of
    what was added up on the way.
    """
    import torch

    ids = torch.arange(len(problem.c), device=problem.c.device)
    gap = torch.zeros_like(problem.power)
    wanted = tolerance
    for _ in range(_ROUNDS):
        now = problem.rows(ids)
        x = _passes(parts, now, state.x[ids], state.gx[ids], wanted, max_steps)
        gx = _product(parts, x)
        state.x[ids], state.gx[ids] = x, gx
        gap[ids] = now.gap(x, now.c - gx - now.ridge[:, None] * x)
        ids = (gap > tolerance).nonzero()[:, 0]
        if len(ids) == 0:
            break
        # The passes had a better bound from an earlier point, which this one alone misses by a hair.
        wanted *= 0.7
    return gap


def _product(parts: list[Block], x: torch.Tensor) -> torch.Tensor:
    import torch

    out = torch.zeros_like(x)
    for part in parts:
        out.addmm_(x[:, part.where], part.rows)
    return out


def _passes(
    parts: list[Block],
    problem: Problem,
    x: torch.Tensor,
    gx: torch.Tensor,
    tolerance: float,
    max_steps: int,
) -> torch.Tensor:
    """Passes over all blocks until every target is near enough; the weights `[t, p]`."""
    import torch

    # In units of each target's own penalty all penalties are 1, and shrinking is one plain call.
    unit = torch.where(problem.lam > 0, problem.lam, torch.ones_like(problem.lam))
    problem = problem.in_units(unit)
    slope = (problem.c - gx / unit[:, None]) - problem.ridge[:, None] * (x / unit[:, None])
    x = x / unit[:, None]
    ridge = problem.ridge[:, None] if bool(problem.ridge.any()) else None
    result = x.clone()
    ids = torch.arange(len(x), device=x.device)
    x_before, slope_before = x, slope
    push = torch.zeros_like(problem.power)
    value, bound = torch.full_like(push, torch.inf), torch.full_like(push, -torch.inf)
    stalled = torch.zeros_like(push)
    for _ in range(max_steps):
        new_value, squared, along = problem.value(x, slope)
        new_bound = problem.dual(slope, squared, along).maximum(bound)
        worse = new_value > value
        stalled = torch.where(worse | (new_value == value), stalled + 1, 0 * stalled)
        stalled = torch.where(new_bound > bound, 0 * stalled, stalled)
        # Without momentum a pass cannot rise: what does loses it for one.
        gained = torch.where(push < _MOMENTUM, push + _MOMENTUM / 2, push + _GAIN)
        push = torch.where(worse, 0 * push, gained.clamp_max(_MOST_MOMENTUM))
        value, bound = new_value, new_bound
        running = (problem.relative(value - bound) > tolerance) & (stalled < PATIENCE)
        left = int(running.sum())
        if left == 0:
            break
        if left < MARGIN * len(ids):
            result[ids] = x
            ids, problem = ids[running], problem.rows(running)
            x, slope = x[running], slope[running]
            x_before, slope_before = x_before[running], slope_before[running]
            push, stalled = push[running], stalled[running]
            value, bound = value[running], bound[running]
            ridge = None if ridge is None else ridge[running]
        ahead = (1 + push)[:, None]
        start, start_slope = torch.lerp(x_before, x, ahead), torch.lerp(slope_before, slope, ahead)
        x_before, slope_before = x, slope
        x, slope = start, start_slope
        for part in parts:
            _update(part, ridge, x, slope)
    result[ids] = x
    return result * unit[:, None]


def _update(part: Block, ridge: torch.Tensor | None, x: torch.Tensor, slope: torch.Tensor) -> None:
    """Minimise over one block, nearly, and hand on what that changes; in place."""
    import torch

    here, downhill = x[:, part.where], slope[:, part.where]
    new = _shrunk(part, ridge, here, downhill)
    for _ in range(_INNER - 1):
        change = new - here
        pull = torch.addmm(downhill, change, part.square, alpha=-1)
        new = _shrunk(part, ridge, new, pull if ridge is None else pull - ridge * change)
    change = new - here
    slope.addmm_(change, part.rows, alpha=-1)
    if ridge is not None:
        downhill -= ridge * change
    x[:, part.where] = new


def _shrunk(
    part: Block, ridge: torch.Tensor | None, x: torch.Tensor, pull: torch.Tensor
) -> torch.Tensor:
    """One proximal step for a penalty of 1: x + pull / curvature, shrunk by 1 / curvature."""
    import torch

    if ridge is None:
        length = 1 / part.curvature
        return torch.nn.functional.softshrink(torch.add(x, pull, alpha=length), length)
    lengths = 1 / (part.curvature + ridge)
    u = torch.addcmul(x, pull, lengths)
    return u - torch.clamp(u, -lengths, lengths)
