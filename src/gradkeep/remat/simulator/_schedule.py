"""Schedules over simple graphs: the order of runs and drops, validated by replaying it.

`simplify` rewrites a program into such a graph: no aliases, one result per operator, no constants.
Known schedules: keep everything, Chen's square root rule, Revolve.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from gradkeep import _arguments
from gradkeep.errors import RematError
from gradkeep.remat.simulator._program import Op, Program, ProgramStep, StepKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True)
class Graph:
    """A program as operators with one result each, numbered in the order of their first run.

    Constants are left out: their bytes are always in memory.

    Attributes:
        costs: Time of every node.
        sizes: Bytes of every node's result.
        parents: Nodes that each node reads.
        outputs: Nodes that must be in memory at the end.
        backward: True for nodes of the backward pass.
        constant_bytes: Bytes of the constants of the program.
    """

    costs: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    outputs: frozenset[int]
    backward: tuple[bool, ...]
    constant_bytes: int = 0

    def __len__(self) -> int:
        return len(self.costs)

    @classmethod
    def of(cls, program: Program) -> Graph:
        """Build the graph of a program: collapse aliases, merge results, leave out constants.

        Args:
            program: A recorded step.

        Returns:
            The graph.

        Raises:
            RematError: If an operator makes both aliases and new tensors.
        """
        simple = simplify(program)
        maker = {op.results[0]: number for number, op in enumerate(simple.ops)}
        pins = (step.index for step in simple.steps if step.kind is StepKind.PIN)
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
        """Nodes that read each node."""
        children: list[list[int]] = [[] for _ in self.costs]
        for node, parents in enumerate(self.parents):
            for parent in parents:
                children[parent].append(node)
        return tuple(map(tuple, children))

    @property
    def compute(self) -> int:
        """Cost of running every node once."""
        return sum(self.costs)

    @property
    def bottleneck(self) -> int:
        """Lower bound of the bytes of any schedule: the largest node with its parents, or the outputs."""
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
    """A valid order of actions with its cost and peak."""

    actions: tuple[Action, ...]
    compute: int
    peak: int
    """Bytes, constants not counted."""


@_arguments.checked(RematError)
def validate_schedule(graph: Graph, actions: Iterable[Action]) -> Schedule:
    """Replay actions and return them as a schedule; raise `RematError` if one is impossible.

    Every node must run at least once, first in the order of their numbers; at the end the outputs
    must be in memory.
    """
    schedule = tuple(actions)
    in_memory: set[int] = set()
    memory = peak = compute = frontier = 0
    for action in schedule:
        node = action.node
        if action.what == "drop":
            if node not in in_memory:
                raise RematError(
                    f"node {node} is dropped but not in memory", code="remat.schedule_drop"
                )
            in_memory.remove(node)
            memory -= graph.sizes[node]
            continue
        missing = [parent for parent in graph.parents[node] if parent not in in_memory]
        if missing or node in in_memory or node > frontier:
            raise RematError(
                f"node {node} cannot run at this point",
                code="remat.schedule_run",
                found=f"missing parents {missing}",
            )
        frontier = max(frontier, node + 1)
        in_memory.add(node)
        memory += graph.sizes[node]
        compute += graph.costs[node]
        peak = max(peak, memory)
    if frontier != len(graph) or not graph.outputs <= in_memory:
        raise RematError(
            "the schedule does not finish the program",
            code="remat.schedule_unfinished",
            found=f"{frontier} of {len(graph)} nodes run",
        )
    return Schedule(schedule, compute, peak)


@_arguments.checked(RematError)
def simplify(program: Program) -> Program:
    """Rewrite a program without aliases, multiple results and constants.

    An alias becomes another reference to its source, and the cost of making it is dropped. The results of
    an operator become one tensor of their joint size. Inputs and parameters are left out; their bytes are
    `Program.constant_bytes` of the original.

    Args:
        program: A recorded step.

    Returns:
        An equivalent program with one result per operator.

    Raises:
        RematError: If an operator makes both aliases and new tensors.
    """
    ops: list[Op] = []
    steps: list[ProgramStep] = []
    names: list[str] = []
    tensors: dict[int, int | None] = {}  # old to new; None for constants
    for step in program.steps:
        if step.kind is not StepKind.RUN:
            number = tensors[step.index]
            if number is not None:
                steps.append(ProgramStep(step.kind, number))
            continue
        op = program.ops[step.index]
        shared = [alias >= 0 for alias in op.aliases]
        if any(shared) and not all(shared):
            raise RematError(
                f"{op.name} makes both aliases and new tensors and cannot be collapsed",
                code="remat.mixed_aliases",
            )
        if op.is_constant:
            tensors.update(dict.fromkeys(op.results))
            continue
        if any(shared):
            tensors |= {
                result: tensors[op.args[alias]]
                for result, alias in zip(op.results, op.aliases, strict=True)
            }
        else:
            steps.append(ProgramStep(StepKind.RUN, len(ops)))
            args = tuple(number for old in op.args if (number := tensors[old]) is not None)
            result = len(names)
            tensors.update(dict.fromkeys(op.results, result))
            size = sum(op.sizes)
            ops.append(Op(op.name, op.cost, args, (result,), (size,), (-1,), op.backward))
            names.append("+".join(program.tensors[old] for old in op.results))
        # The merged tensor has as many references as the tensors it replaces.
        extra_results = op.results if any(shared) else op.results[1:]
        held = [number for old in extra_results if (number := tensors[old]) is not None]
        steps += [ProgramStep(StepKind.GET, number) for number in held]
    return dataclasses.replace(program, ops=tuple(ops), steps=tuple(steps), tensors=tuple(names))


@_arguments.checked(RematError)
def keep_all(graph: Graph) -> Schedule:
    """Build the schedule that recomputes nothing and drops each result after its last use.

    Args:
        graph: The graph to schedule.

    Returns:
        The schedule.
    """
    return checkpoint_nodes(graph, range(len(graph)))


@_arguments.checked(RematError)
def checkpoint_nodes(graph: Graph, nodes: Iterable[int]) -> Schedule:
    """Build the schedule that keeps some forward nodes and recomputes the others on demand.

    A recomputed node stays until its last use. With every k-th node kept this is checkpointing in
    segments.
    """
    checkpoints = {*nodes, *graph.outputs}
    last_use = list(range(len(graph)))
    last_forward = list(last_use)
    for node, parents in enumerate(graph.parents):
        for parent in parents:
            last_use[parent] = node
            if not graph.backward[node]:
                last_forward[parent] = node
    in_memory: set[int] = set()
    actions: list[Action] = []

    def bring(node: int) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [parent for parent in graph.parents[top] if parent not in in_memory]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if top not in in_memory:
                actions.append(Action("run", top))
                in_memory.add(top)

    for node in range(len(graph)):
        bring(node)
        for old in sorted(in_memory):
            forward = not graph.backward[node]
            passed = (
                last_forward[old] <= node and old not in checkpoints and not graph.backward[old]
            )
            done = last_use[old] <= node
            if old not in graph.outputs and (done or (forward and passed)):
                in_memory.remove(old)
                actions.append(Action("drop", old))
    for node in sorted(graph.outputs - in_memory):
        bring(node)
    return validate_schedule(graph, actions)


@_arguments.checked(RematError)
def chen(graph: Graph, segments: int | None = None) -> Schedule:
    """Build Chen's schedule: split the forward nodes into segments and keep the nodes between them.

    Args:
        graph: The graph to schedule.
        segments: Number of segments; about the square root of the number of forward nodes by default.

    Returns:
        The schedule.

    Raises:
        RematError: If `segments` is below 1.
    """
    forward = [node for node in range(len(graph)) if not graph.backward[node]]
    count = math.isqrt(max(1, len(forward))) if segments is None else segments
    if count < 1:
        raise RematError(f"segments must be at least 1, got {segments}", code="argument.invalid")
    step = max(1, math.ceil(len(forward) / count))
    return checkpoint_nodes(graph, forward[step - 1 :: step])


@_arguments.checked(RematError)
def revolve(graph: Graph, slots: int) -> Schedule:
    """Build Griewank's schedule for a chain, which is optimal in the number of forward runs.

    cost(l, s) = min over m of cost of advancing m steps + cost(l - m, s - 1) + cost(m, s).

    Args:
        graph: The graph of a chain.
        slots: Number of activations that may be kept.

    Returns:
        The schedule.

    Raises:
        RematError: If the graph is not a chain, or `slots` is below 1.
    """
    forward, backward = _split_chain(graph)
    if slots < 1:
        raise RematError(f"slots must be at least 1, got {slots}", code="argument.invalid")
    prefix = [0]
    for node in forward:
        prefix.append(prefix[-1] + graph.costs[node])

    @cache
    def best(low: int, high: int, free: int) -> tuple[int, int]:
        """Return the least cost of reversing steps low..high-1, and which activation to keep."""
        if high - low <= 1:
            return 0, low
        if free == 0:
            return sum(prefix[stop - 1] - prefix[low] for stop in range(low + 2, high + 1)), low
        return min(
            (
                prefix[middle]
                - prefix[low]
                + best(middle, high, free - 1)[0]
                + best(low, middle, free)[0],
                middle,
            )
            for middle in range(low + 1, high)
        )

    walk = _ChainWalk(graph, forward, backward, best)
    walk.take_back(0, len(backward), slots)
    return validate_schedule(graph, walk.actions)


@dataclass
class _ChainWalk:
    """Walk along a chain forward and backward; `held` are the forward steps whose results are kept."""

    graph: Graph
    forward: list[int]
    backward: list[int]
    best: Callable[[int, int, int], tuple[int, int]]
    actions: list[Action] = field(default_factory=list)
    in_memory: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def advance(self, low: int, high: int) -> None:
        """Compute the result of step high-1 from the latest result at or after step low-1."""
        start = next(
            (at for at in range(high - 1, low - 1, -1) if self.forward[at] in self.in_memory),
            low - 1,
        )
        for at in range(start + 1, high):
            self.run(self.forward[at])
            if at - 1 >= low and at - 1 not in self.held:
                self.drop(self.forward[at - 1])

    def take_back(self, low: int, high: int, free: int) -> None:
        """Run backward steps high-1 down to low; the result of step low-1 is in memory."""
        while high - low > 1:
            middle = self.best(low, high, free)[1]
            if middle == low:
                self.advance(low, high - 1)
                self.back(high - 1)
                self.drop(self.forward[high - 2])
                high -= 1
                continue
            self.advance(low, middle)
            self.held.add(middle - 1)
            self.take_back(middle, high, free - 1)
            self.held.discard(middle - 1)
            self.drop(self.forward[middle - 1])
            high = middle
        self.back(low)

    def back(self, at: int) -> None:
        if at == len(self.forward) - 1:
            self.advance(at, at + 1)  # the backward pass begins with the last result
        node = self.backward[len(self.backward) - 1 - at]
        self.run(node)
        for parent in self.graph.parents[node]:
            if self.graph.backward[parent] or parent == self.forward[-1]:
                self.drop(parent)

    def run(self, node: int) -> None:
        self.actions.append(Action("run", node))
        self.in_memory.add(node)

    def drop(self, node: int) -> None:
        if node in self.in_memory:
            self.in_memory.remove(node)
            self.actions.append(Action("drop", node))


def _split_chain(graph: Graph) -> tuple[list[int], list[int]]:
    forward = [node for node in range(len(graph)) if not graph.backward[node]]
    backward = [node for node in range(len(graph)) if graph.backward[node]]
    straight = len(forward) == len(backward) and all(
        graph.parents[node] == ((forward[at - 1],) if at else ()) for at, node in enumerate(forward)
    )
    for at, node in enumerate(backward):
        gradient = backward[at - 1] if at else forward[-1]
        activation = len(forward) - 2 - at
        expected = {gradient} | ({forward[activation]} if activation >= 0 else set())
        straight = straight and set(graph.parents[node]) == expected
    if not straight:
        raise RematError(
            "the graph is not a chain of forward operators followed by their gradients",
            code="remat.not_a_chain",
            fix="Use chen() or optimal() for other graphs.",
        )
    return forward, backward
