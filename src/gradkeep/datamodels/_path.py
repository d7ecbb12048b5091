"""A path of penalties, from one that leaves nothing down to the smallest, each start warm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from gradkeep.datamodels._blocks import blocks, sweep
from gradkeep.datamodels._l1 import Problem, State, descend
from gradkeep.datamodels._ridge import conjugate
from gradkeep.datamodels._standard import DenseGram

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._standard import Standard

Kind = Literal["l1", "elastic", "ridge", "means"]
_FIRST_CURVATURE = 1.2
"""Columns have variance 1, so no target's curvature is below 1; what is met is remembered."""
_WORTH = 0.6
"""A working set below this part of all examples pays for its own matrix."""
_ROUNDS = 4


class _Until(TypedDict):
    tolerance: float
    max_steps: int


@dataclass(frozen=True, slots=True)
class Solver:
    """How a penalty is minimised: its kind, the share of L1 in an elastic net, when to stop, and
    how many examples a working set may have in memory."""

    kind: Kind
    share: float
    tolerance: float
    max_steps: int
    working: int

    def penalties(self, standard: Standard, fraction: float, natural: float) -> torch.Tensor:
        """`[t]`: a fraction of the least penalty without weights (L1), or of the natural ridge."""
        import torch

        if self.kind == "ridge":
            return torch.full_like(standard.power, fraction * natural)
        return standard.largest * fraction / self.share

    def unit(self, standard: Standard) -> AnyArray:
        """`[t]`, what a penalty in standard units is multiplied by to be one in output units."""
        return np.ones_like(standard.spread) if self.kind == "ridge" else standard.spread

    def start(self, standard: Standard, x: torch.Tensor | None = None) -> State:
        """No weights, or those of an earlier fit."""
        import torch

        first = torch.full_like(standard.power, _FIRST_CURVATURE)
        if x is None:
            return State(torch.zeros_like(standard.c), torch.zeros_like(standard.c), first)
        return State(x.clone(), standard.gram.times(x), first)

    def solve(
        self, standard: Standard, state: State, lam: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Move the state to the optimum at penalties lam `[t]`, coming from `before`; the gap."""
        if self.kind == "ridge":
            problem = Problem(standard.c, standard.power, 0 * lam, lam)
            return conjugate(standard.gram.times, problem, state, **self._until)
        problem = Problem(standard.c, standard.power, lam * self.share, lam * (1 - self.share))
        return self._by_working_sets(standard, state, problem, before * self.share)

    @property
    def _until(self) -> _Until:
        return {"tolerance": self.tolerance, "max_steps": self.max_steps}

    def _by_working_sets(
        self, standard: Standard, state: State, problem: Problem, before: torch.Tensor
    ) -> torch.Tensor:
        """Solve for the examples that may have weights, then check all others; widen and repeat."""
        all_examples = problem.c.shape[1]
        most = min(self.working, int(_WORTH * all_examples))
        # The strong rule: gradients move no faster than penalties, but for rare exceptions.
        reach = (2 * problem.lam - before).clamp_min(0)[:, None]
        inside = ((_slope(problem, state).abs() >= reach) | (state.x != 0)).any(dim=0)
        for _ in range(_ROUNDS):
            ids = inside.nonzero()[:, 0]
            if len(ids) > most or len(ids) == 0:
                break
            matrix = standard.gram.part(ids)
            part = State(state.x[:, ids], state.gx[:, ids], state.curvature)
            narrow = Problem(problem.c[:, ids], problem.power, problem.lam, problem.ridge)
            sweep(blocks(matrix), narrow, part, **self._until)
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
        if isinstance(standard.gram, DenseGram):
            return sweep(standard.gram.parts(), problem, state, **self._until)
        return descend(standard.gram.times, problem, state, **self._until)


def _slope(problem: Problem, state: State) -> torch.Tensor:
    return problem.c - state.gx - problem.ridge[:, None] * state.x


def walk(
    solver: Solver,
    standard: Standard,
    fractions: Sequence[float],
    natural: float,
    visit: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None],
) -> None:
    """Solve along the path; `visit(index, ids, lam, w [t', n])` may return which targets go on."""
    import torch

    ids = torch.arange(len(standard.c), device=standard.c.device)
    state = solver.start(standard)
    before = solver.penalties(standard, 1.0, natural)
    for index, fraction in enumerate(fractions):
        lam = solver.penalties(standard, fraction, natural)
        solver.solve(standard, state, lam, before)
        on = visit(index, ids, lam, state.x)
        before = lam
        if on is not None and not bool(on.all()):
            if not bool(on.any()):
                return
            ids, standard, state, before = ids[on], standard.targets(on), state.rows(on), lam[on]
