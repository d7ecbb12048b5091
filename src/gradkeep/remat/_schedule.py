"""Schedules over simple graphs: what runs and what is dropped, in order, checked by replaying it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep.errors import RematError
from gradkeep.remat._program import Kind
from gradkeep.remat._rewrite import simplify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.remat._program import Program


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators with one result each, numbered in the order in which the program first runs them.

    Constants are left out: their bytes are always there.
    """

    costs: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    outputs: frozenset[int]
    """Nodes that must be in memory at the end."""
    backward: tuple[bool, ...]
    constant_bytes: int = 0

    def __len__(self) -> int:
        return len(self.costs)

    @classmethod
    def of(cls, program: Program) -> Graph:
        """The graph of a program: aliases collapsed, results merged, constants left out."""
        simple = simplify(program)
        maker = {op.results[0]: number for number, op in enumerate(simple.ops)}
        pins = (step.index for step in simple.steps if step.kind is Kind.PIN)
        return cls(
            costs=tuple(op.cost for op in simple.ops),
            sizes=tuple(op.sizes[0] for op in simple.ops),
            parents=tuple(tuple(sorted({maker[x] for x in op.args})) for op in simple.ops),
            outputs=frozenset(maker[number] for number in pins),
            backward=tuple(op.backward for op in simple.ops),
            constant_bytes=program.constant_bytes,
        )

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each node."""
        found: list[list[int]] = [[] for _ in self.costs]
        for node, parents in enumerate(self.parents):
            for parent in parents:
                found[parent].append(node)
        return tuple(map(tuple, found))

    @property
    def compute(self) -> int:
        """The cost of running every node once."""
        return sum(self.costs)

    @property
    def bottleneck(self) -> int:
        """No schedule can do with fewer bytes: the largest node with its parents, or the outputs."""
        steps = (
            size + sum(self.sizes[parent] for parent in parents)
            for size, parents in zip(self.sizes, self.parents, strict=True)
        )
        return max([*steps, sum(self.sizes[node] for node in self.outputs)], default=0)


@dataclass(frozen=True, slots=True)
class Action:
    """Run a node, or drop its result."""

    what: Literal["run", "drop"]
    node: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A valid order of actions, and what it takes."""

    actions: tuple[Action, ...]
    compute: int
    peak: int
    """Bytes, constants not counted."""


def checked(graph: Graph, actions: Iterable[Action]) -> Schedule:
    """Replay actions: raises `RematError` where one is impossible or the program is not done.

    Every node must run at least once, first in the order of their numbers; at the end the outputs
    must be in memory.
    """
    kept = tuple(actions)
    there: set[int] = set()
    memory = peak = compute = frontier = 0
    for action in kept:
        node = action.node
        if action.what == "drop":
            if node not in there:
                raise RematError(f"node {node} is dropped but not in memory")
            there.remove(node)
            memory -= graph.sizes[node]
            continue
        missing = [parent for parent in graph.parents[node] if parent not in there]
        if missing or node in there or node > frontier:
            raise RematError(f"node {node} cannot run here", found=f"missing {missing}")
        frontier = max(frontier, node + 1)
        there.add(node)
        memory += graph.sizes[node]
        compute += graph.costs[node]
        peak = max(peak, memory)
    if frontier != len(graph) or not graph.outputs <= there:
        raise RematError("the schedule does not finish the program", found=f"{frontier} nodes run")
    return Schedule(kept, compute, peak)
