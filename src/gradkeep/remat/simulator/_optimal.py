"""Find the cheapest schedule within a budget by integer programming, with a proven bound.

Stage t ends with the first run of node t; before that any earlier node may run again, in the order
of numbers; with more `rounds` it may do so several times. One more stage at the end brings back
dropped outputs. R[t, i]: node i runs in stage t. S[t, i]: its result is in memory when stage t begins.
F[t, i, k]: node i is dropped after node k ran in stage t. After Jain et al., Checkmate (2020).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._environment import install_hint
from gradkeep.errors import MissingExtraError, RematError
from gradkeep.remat.simulator._schedule import Action, Graph, Schedule, keep_all, validate_schedule

if TYPE_CHECKING:
    from gradkeep.remat.simulator._program import Program

_MAX_OPERATORS = 200


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best schedule of the integer program, and a bound for all schedules.

    Attributes:
        status: `"optimal"`, `"time limit"` or `"infeasible"`.
        schedule: The best schedule, or None.
        bound: Lower bound of the cost of any schedule of this form.
        gap: (cost - bound) / cost; 0 when the schedule is proven to be optimal.
    """

    status: Literal["optimal", "time limit", "infeasible"]
    schedule: Schedule | None
    bound: float
    gap: float


@_arguments.checked(RematError)
def optimal(graph: Graph, *, budget: int, time_limit: float = 60.0, rounds: int = 1) -> Optimum:
    """Find the schedule with the least recomputation within a budget.

    Exact among schedules that run a node at most `rounds` times between two first runs, which is
    seldom a limit; if nothing fits, up to two more rounds are tried. Cost: grows steeply; 25 nodes take
    seconds.

    Args:
        graph: The graph to schedule.
        budget: Bytes, constants not counted.
        time_limit: Seconds after which the search stops with the best schedule so far and a proven gap.
        rounds: How often a node may run between two first runs.

    Returns:
        The best schedule and its bound.

    Raises:
        RematError: If the graph is too large, or no schedule fits the budget.
        MissingExtraError: If scipy is not installed.
    """
    if len(graph) > _MAX_OPERATORS:
        raise RematError(
            "the graph is too large for the integer program",
            code="remat.graph_too_large",
            found=f"{len(graph)} operators",
            expected=f"at most {_MAX_OPERATORS}",
            fix="Use a heuristic, or a smaller model of the same architecture.",
        )
    if budget < graph.bottleneck:
        raise RematError(
            "no schedule fits the budget",
            code="remat.budget_too_small",
            found=f"{budget} bytes",
            expected=f"at least {graph.bottleneck} bytes (plus {graph.constant_bytes} of constants)",
        )
    plain = keep_all(graph)
    if plain.peak <= budget:
        return Optimum("optimal", plain, plain.compute, 0.0)
    end = time.monotonic() + time_limit
    optimum = _IntegerProgram(graph, budget, rounds).solve(time_limit)
    for more in (rounds + 1, rounds + 2):
        if optimum.status != "infeasible":
            break
        optimum = _IntegerProgram(graph, budget, more).solve(max(1.0, end - time.monotonic()))
    return optimum


@dataclass
class _IntegerProgram:
    graph: Graph
    budget: int
    rounds: int
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    names: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def solve(self, time_limit: float) -> Optimum:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise MissingExtraError(
                "the integer program needs scipy", fix=install_hint("remat")
            ) from error
        self._declare()
        self._dependencies()
        self._memory()
        count = len(self.names)
        costs = [self.graph.costs[name[2]] if name[0] == "R" else 0 for name in self.names]
        shape = (len(self.lower), count)
        matrix = coo_array((self.values, (self.rows, self.columns)), shape=shape).tocsr()
        result = milp(
            costs,
            integrality=[name[0] != "U" for name in self.names],
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, self.lower, self.upper),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            ended: Literal["infeasible", "time limit"] = (
                "infeasible" if result.status == 2 else "time limit"
            )
            bound = getattr(result, "mip_dual_bound", None)
            return Optimum(ended, None, self.graph.compute if bound is None else bound, 1.0)
        schedule = self._schedule(np.round(result.x).astype(int))
        bound = min(schedule.compute, float(result.mip_dual_bound))
        # Costs are integers: a bound less than 1 below the cost proves it.
        proven = schedule.compute - bound < 1 - 1e-6 or result.status == 0
        gap = 0.0 if proven else (schedule.compute - bound) / schedule.compute
        return Optimum(
            "optimal" if proven else "time limit",
            schedule,
            schedule.compute if proven else bound,
            gap,
        )

    def _variable(self, *name: Any) -> int:
        return self.names.setdefault(name, len(self.names))

    def _constraint(
        self, terms: list[tuple[int, float]], low: float = -np.inf, high: float = np.inf
    ) -> None:
        row = len(self.lower)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(low)
        self.upper.append(high)

    def _declare(self) -> None:
        for stage in self._stages():
            new = self._new(stage)
            for node in self._nodes(stage):
                self._variable("R", stage, node)
            for node in range(new):
                self._variable("S", stage, node)
            if self._ends(stage) and new < len(self.graph):
                self._constraint([(self._variable("R", stage, new), 1)], 1, 1)

    def _stages(self) -> range:
        return range((len(self.graph) + 1) * self.rounds)

    def _new(self, stage: int) -> int:
        """Return the node whose first run ends a stage."""
        return stage // self.rounds

    def _ends(self, stage: int) -> bool:
        """Return True in the round in which the new node runs."""
        return stage % self.rounds == self.rounds - 1

    def _nodes(self, stage: int) -> range:
        """Return the nodes that may run in a stage."""
        return range(min(self._new(stage) + self._ends(stage), len(self.graph)))

    def _dependencies(self) -> None:
        graph, last = self.graph, self._stages()[-1]
        for stage in self._stages():
            for node in self._nodes(stage):
                runs = self._variable("R", stage, node)
                for parent in graph.parents[node]:
                    self._constraint([(runs, 1.0), *self._have(stage, parent, -1.0)], high=0)
                if node < self._new(stage):
                    # Running a node whose result is in memory is never needed, and would count twice.
                    stays = self._variable("S", stage, node)
                    self._constraint([(runs, 1.0), (stays, 1.0)], high=1)
            for node in range(self._new(stage)):
                stays = self._variable("S", stage, node)
                self._constraint([(stays, 1.0), *self._have(stage - 1, node, -1.0)], high=0)
        for node in graph.outputs:
            self._constraint(self._have(last, node, 1.0), low=1)

    def _have(self, stage: int, node: int, factor: float) -> list[tuple[int, float]]:
        """Return the variables of which one must be 1 for the node to be in memory in or after a stage."""
        names = (("R", stage, node), ("S", stage, node))
        return [(self.names[name], factor) for name in names if name in self.names]

    def _memory(self) -> None:
        """Constrain the bytes after each run of each stage, in units of the budget."""
        graph = self.graph
        children = graph.children
        for stage in self._stages():
            before = [
                (self._variable("S", stage, node), graph.sizes[node] / self.budget)
                for node in range(self._new(stage))
            ]
            for node in self._nodes(stage):
                runs = self._variable("R", stage, node)
                used = self._variable("U", stage, node)
                before = [*before, (runs, graph.sizes[node] / self.budget)]
                self._constraint([(used, -1.0), *before], 0, 0)
                before = [(used, 1.0)]
                for dropped in (*graph.parents[node], node):
                    drop = self._drop(stage, dropped, node, children[dropped])
                    if drop is not None:
                        before.append((drop, -graph.sizes[dropped] / self.budget))

    def _drop(self, stage: int, node: int, after: int, children: tuple[int, ...]) -> int | None:
        """Return F: 1 only if `after` ran, no later node of the stage reads the node, and it is not kept."""
        last = self._stages()[-1]
        if stage == last and node in self.graph.outputs:
            return None
        drop = self._variable("F", stage, node, after)
        self._constraint([(drop, 1.0), (self._variable("R", stage, after), -1.0)], high=0)
        if stage < last:
            self._constraint([(drop, 1.0), (self._variable("S", stage + 1, node), 1.0)], high=1)
        for child in children:
            if after < child and child in self._nodes(stage):
                self._constraint([(drop, 1.0), (self._variable("R", stage, child), 1.0)], high=1)
        # It cannot be dropped twice, nor if it is not in memory.
        if after > node:
            self._constraint([(drop, 1.0), *self._have(stage, node, -1.0)], high=0)
        return drop

    def _schedule(self, solution: Any) -> Schedule:
        graph = self.graph
        in_memory: set[int] = set()
        actions: list[Action] = []

        def chosen(*name: Any) -> bool:
            return name in self.names and bool(solution[self.names[name]])

        for stage in self._stages():
            for node in self._nodes(stage):
                if chosen("R", stage, node) and node not in in_memory:
                    actions.append(Action("run", node))
                    in_memory.add(node)
                    for old in sorted({*graph.parents[node], node} & in_memory):
                        if chosen("F", stage, old, node):
                            actions.append(Action("drop", old))
                            in_memory.remove(old)
            if stage + 1 in self._stages():
                for old in sorted(in_memory):
                    if not chosen("S", stage + 1, old):
                        actions.append(Action("drop", old))
                        in_memory.remove(old)
        return validate_schedule(graph, actions)


MAX_SWEEP_OPERATORS = 36
"""Operators, aliases collapsed: with more the integer program seldom ends within a minute."""


@dataclass(frozen=True, slots=True)
class OptimumPoint:
    """Result of the integer program for a budget."""

    status: Literal["ok", "oom", "unproven", "too large"]
    operators: int
    """Operators of the graph, aliases collapsed."""
    overhead: float | None = None
    """Time of the best schedule divided by the time of running everything once."""
    peak: int = 0
    """Bytes, constants included."""
    message: str = ""


def optimum_point(program: Program, budget: int, *, time_limit: float) -> OptimumPoint:
    """Find the optimum within a budget that includes constants.

    >>> from gradkeep.remat import chain
    >>> optimum_point(chain(6, size=1, cost=1), 9, time_limit=10).status
    'ok'
    """
    graph = Graph.of(program)
    count = len(graph)
    if count > MAX_SWEEP_OPERATORS:
        message = (
            f"{count} operators are too many for the integer program, at most {MAX_SWEEP_OPERATORS}"
        )
        return OptimumPoint("too large", count, message=message)
    free_bytes = budget - graph.constant_bytes
    if free_bytes < graph.bottleneck:
        least = graph.bottleneck + graph.constant_bytes
        return OptimumPoint("oom", count, message=f"no schedule takes fewer than {least} bytes")
    optimum = optimal(graph, budget=free_bytes, time_limit=time_limit)
    if optimum.schedule is None:
        unknown = optimum.status == "time limit"
        return OptimumPoint("unproven" if unknown else "oom", count, message=optimum.status)
    overhead = optimum.schedule.compute / graph.compute if graph.compute else 1.0
    peak = optimum.schedule.peak + graph.constant_bytes
    if optimum.gap > 0:
        message = f"stopped after {time_limit:g} s, at most {optimum.gap:.1%} above the optimum"
        return OptimumPoint("unproven", count, overhead, peak, message)
    return OptimumPoint("ok", count, overhead, peak)
