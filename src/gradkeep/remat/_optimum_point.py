"""One point of the curve of optima: the least time that any schedule of a recorded step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.remat._optimal import optimal
from gradkeep.remat._schedule import Graph

if TYPE_CHECKING:
    from gradkeep.remat._program import Program

SMALL_ENOUGH = 36
"""Operators, aliases collapsed: with more the integer program seldom ends within a minute."""


@dataclass(frozen=True, slots=True)
class OptimumPoint:
    """What the integer program says about a budget."""

    status: Literal["ok", "oom", "unproven", "too large"]
    operators: int
    """Of the graph, aliases collapsed."""
    overhead: float | None = None
    """Time by the time of running everything once; of the best schedule found."""
    peak: int = 0
    """Bytes, constants included."""
    message: str = ""


def optimum_point(program: Program, budget: int, *, time_limit: float) -> OptimumPoint:
    """The optimum within a budget that counts constants too.

    >>> from gradkeep.remat import chain
    >>> optimum_point(chain(6, size=1, cost=1), 9, time_limit=10).status
    'ok'
    """
    graph = Graph.of(program)
    count = len(graph)
    if count > SMALL_ENOUGH:
        told = f"{count} operators are too many for the integer program, at most {SMALL_ENOUGH}"
        return OptimumPoint("too large", count, message=told)
    room = budget - graph.constant_bytes
    if room < graph.bottleneck:
        least = graph.bottleneck + graph.constant_bytes
        return OptimumPoint("oom", count, message=f"no schedule takes fewer than {least} bytes")
    found = optimal(graph, budget=room, time_limit=time_limit)
    if found.schedule is None:
        unknown = found.status == "time limit"
        return OptimumPoint("unproven" if unknown else "oom", count, message=found.status)
    overhead = found.schedule.compute / graph.compute if graph.compute else 1.0
    peak = found.schedule.peak + graph.constant_bytes
    if found.gap > 0:
        told = f"stopped after {time_limit:g} s, at most {found.gap:.1%} above the optimum"
        return OptimumPoint("unproven", count, overhead, peak, told)
    return OptimumPoint("ok", count, overhead, peak)
