"""L1 and elastic net for many targets at once, to a proven gap.

    min over w of 1/2 w'Gw - c'w + power/2 + lam |w|_1 + ridge/2 |w|^2

Accelerated proximal gradient steps, with one matrix product per step for all targets. The
momentum's gradient follows from the last two products, so that the same product also gives the
primal and dual values of the new point: the gap is known after every step, and a target stops as
soon as its own is small enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_SLACK = 1.001
_SAFETY = 1.05
MARGIN = 0.7
"""Stopped targets are dropped when so few are left: a smaller product pays for the copying."""
PATIENCE = 25
"""Steps without a better value or bound after which rounding has won."""


@dataclass(slots=True, eq=False)
class State:
    """Where the targets are: weights `x [t, p]`, their products `gx` with G, and the
    `curvature [t]` that each target has met, kept from one penalty to the next."""

    x: torch.Tensor
    gx: torch.Tensor
    curvature: torch.Tensor

    def rows(self, which: torch.Tensor) -> State:
        """Some of the targets."""
        return State(self.x[which], self.gx[which], self.curvature[which])


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Targets `c [t, p]` with their power and penalties `[t]`."""

    c: torch.Tensor
    power: torch.Tensor
    lam: torch.Tensor
    ridge: torch.Tensor

    def rows(self, which: torch.Tensor) -> Problem:
        """Some of the targets."""
        return Problem(self.c[which], self.power[which], self.lam[which], self.ridge[which])

    def in_units(self, unit: torch.Tensor) -> Problem:
        """The same for weights and targets divided by `unit [t]`."""
        return Problem(self.c / unit[:, None], self.power / unit**2, self.lam / unit, self.ridge)

    def value(self, x: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The primal value, the squared residual and its product with the target, all `[t]`.

        `slope [t, p]` is c - Gx - ridge x.
        """
        from torch.linalg import vecdot

        explained = vecdot(x, self.c)
        squared = self.power - explained - vecdot(x, slope)
        return squared / 2 + self.lam * x.abs().sum(dim=1), squared, self.power - explained

    def dual(self, slope: torch.Tensor, squared: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        """The dual value at the best feasible multiple of the residual, `[t]`."""
        import torch

        tiny = torch.finfo(squared.dtype).tiny
        most = self.lam / slope.abs().amax(dim=1).clamp_min(tiny)
        # Both ways: a step too far turns the best multiple negative.
        multiple = torch.clamp(along / squared.clamp_min(tiny), -most, most)
        return multiple * along - multiple * multiple * squared / 2

    def relative(self, gap: torch.Tensor) -> torch.Tensor:
        """A gap in parts of half the power, `[t]`; 0 where there is nothing to explain."""
        import torch

        whole = self.power / 2
        tiny = torch.finfo(whole.dtype).tiny
        return torch.where(whole > 0, gap.clamp_min(0) / whole.clamp_min(tiny), 0 * whole)

    def gap(self, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """How far at most x is from the optimum, relative, by its own residual."""
        value, squared, along = self.value(x, slope)
        return self.relative(value - self.dual(slope, squared, along))


def descend(
    times: Callable[[torch.Tensor], torch.Tensor],
    problem: Problem,
    state: State,
    *,
    tolerance: float,
    max_steps: int,
) -> torch.Tensor:
    """Move the state to the optimum; the gap `[t]` relative to half of each target's power.

    `times(x)` is x G. Stops each target at `tolerance`, all at `max_steps`, or when rounding
    allows no better value. Costs 2 t p^2 operations a step.
    """
    import torch

    count = len(problem.c)
    gap = torch.zeros(count, dtype=problem.c.dtype, device=problem.c.device)
    ids = torch.arange(count, device=problem.c.device)
    now, active = problem, state.rows(ids)
    active.gx += now.ridge[:, None] * active.x
    steps = _Steps(now, active)
    taken = 0
    while True:
        running = (steps.gap > tolerance) & (steps.stalled < PATIENCE)
        left = int(running.sum())
        if left == 0 or taken >= max_steps:
            break
        if left < MARGIN * len(ids):
            _put_back(state, ids, now, active)
            gap[ids] = steps.gap
            ids, now, active = ids[running], now.rows(running), active.rows(running)
            steps = steps.rows(running, now)
        steps.step(times, active)
        taken += 1
    _put_back(state, ids, now, active)
    gap[ids] = steps.gap
    return gap


def _put_back(state: State, ids: torch.Tensor, problem: Problem, active: State) -> None:
    state.x[ids], state.curvature[ids] = active.x, active.curvature
    state.gx[ids] = active.gx - problem.ridge[:, None] * active.x


class _Steps:
    """The momentum, restarts and bounds of running targets."""

    def __init__(self, problem: Problem, state: State) -> None:
        import torch

        self.problem = problem
        self.before, self.product_before = state.x, state.gx
        self.speed = torch.ones_like(problem.power)
        slope = problem.c - state.gx
        self.value, squared, along = problem.value(state.x, slope)
        self.bound = problem.dual(slope, squared, along)
        self.stalled = torch.zeros_like(problem.power)
        self.gap = problem.relative(self.value - self.bound)

    def rows(self, which: torch.Tensor, problem: Problem) -> _Steps:
        """The same for some targets."""
        kept = object.__new__(_Steps)
        kept.problem = problem
        for name in ("before", "product_before", "speed", "value", "bound", "stalled", "gap"):
            setattr(kept, name, getattr(self, name)[which])
        return kept

    def step(self, times: Callable[[torch.Tensor], torch.Tensor], state: State) -> None:
        """One step of all running targets."""
        import torch
        from torch.linalg import vecdot

        problem, steep = self.problem, state.curvature
        faster = (1 + torch.sqrt(1 + 4 * self.speed * self.speed)) / 2
        ahead = ((1 - self.speed) / faster)[:, None]
        z = torch.lerp(state.x, self.before, ahead)
        gz = torch.lerp(state.gx, self.product_before, ahead)
        u = torch.addcmul(z, problem.c - gz, (1 / steep)[:, None])
        width = (problem.lam / steep)[:, None]
        x = u - torch.clamp(u, -width, width)
        gx = torch.addcmul(times(x), x, problem.ridge[:, None])
        moved = x - z
        length, bent = vecdot(moved, moved), vecdot(moved, gx - gz)
        slope = problem.c - gx
        value, squared, along = problem.value(x, slope)
        bound = torch.maximum(self.bound, problem.dual(slope, squared, along))

        # Too long a step shows as more curvature along it than was assumed: shorten the next ones.
        tiny = torch.finfo(length.dtype).tiny
        short = bent > _SLACK * steep * length
        met = torch.maximum(steep, _SAFETY * bent / length.clamp_min(tiny))
        state.curvature = torch.where(short, met, steep)
        # After a restart the step is plain descent; only rounding or a long step lets it rise.
        worse = (value > self.value) & ((self.speed > 1) | short)
        restart = worse | (vecdot(moved, x - state.x) < 0)
        better = (value < self.value) | (bound > self.bound)
        self.stalled = torch.where(better, 0 * self.stalled, self.stalled + 1)
        self.speed = torch.where(restart, torch.ones_like(faster), faster)
        self.before, self.product_before = state.x, state.gx
        if bool(worse.any()):
            keep = worse[:, None]
            x, gx = torch.where(keep, state.x, x), torch.where(keep, state.gx, gx)
            value = torch.where(worse, self.value, value)
        state.x, state.gx = x, gx
        self.value, self.bound = value, bound
        self.gap = problem.relative(self.value - self.bound)
