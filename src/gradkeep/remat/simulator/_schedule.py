"""Schedules over simple graphs: what runs and what is dropped, in order, checked by replaying it.

A program becomes such a graph by rewriting: no aliases, one result per operator, no constants.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gradkeep import _annotations
from gradkeep.errors import RematError
from gradkeep.remat.simulator._program import Op, Program, ProgramStep, StepKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


@_annotations.checked(RematError)
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


@dataclass(slots=True)
class _ProgramDraft:
    """A program under construction, and what became of the old one's parts."""

    ops: list[Op] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tensors: dict[int, int] = field(default_factory=dict)
    """Old tensor to new."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Old operator to new."""

    def add(
        self, old: int, op: Op, names: Sequence[str], sizes: tuple[int, ...]
    ) -> tuple[int, ...]:
        results = tuple(range(len(self.names), len(self.names) + len(names)))
        self.names.extend(names)
        self.numbers[old] = len(self.ops)
        args = tuple(self.tensors[number] for number in op.args if number in self.tensors)
        self.ops.append(
            dataclasses.replace(
                op, args=args, results=results, sizes=sizes, aliases=(-1,) * len(sizes)
            )
        )
        return results

    def program(self, source: Program, steps: list[ProgramStep]) -> Program:
        return dataclasses.replace(
            source, ops=tuple(self.ops), steps=tuple(steps), tensors=tuple(self.names)
        )


@_annotations.checked(RematError)
def collapse_aliases(program: Program) -> Program:
    """The same program in which an alias is one more reference to what it is an alias of.

    The cost of making an alias is dropped with it. An operator that makes both aliases and new
    tensors cannot be expressed and raises.
    """
    draft, steps = _ProgramDraft(), list[ProgramStep]()
    for step in program.steps:
        if step.kind is not StepKind.RUN:
            steps.append(ProgramStep(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        shared = [alias >= 0 for alias in op.aliases]
        if any(shared) and not all(shared):
            raise RematError(f"{op.name} makes both aliases and new tensors: cannot collapse it")
        if any(shared):
            for number, alias in zip(op.results, op.aliases, strict=True):
                draft.tensors[number] = draft.tensors[op.args[alias]]
                steps.append(ProgramStep(StepKind.GET, draft.tensors[number]))
            continue
        results = draft.add(step.index, op, [program.tensors[x] for x in op.results], op.sizes)
        draft.tensors.update(zip(op.results, results, strict=True))
        steps.append(ProgramStep(StepKind.RUN, draft.numbers[step.index]))
    return draft.program(program, steps)


@_annotations.checked(RematError)
def merge_tuples(program: Program) -> Program:
    """The same program in which the results of an operator are one tensor of their joint size."""
    draft, steps = _ProgramDraft(), list[ProgramStep]()
    for step in program.steps:
        if step.kind is not StepKind.RUN:
            steps.append(ProgramStep(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        if any(alias >= 0 for alias in op.aliases):
            raise RematError(f"{op.name} makes an alias: collapse aliases first")
        name = "+".join(program.tensors[number] for number in op.results)
        (result,) = draft.add(step.index, op, [name], (sum(op.sizes),))
        draft.tensors.update(dict.fromkeys(op.results, result))
        steps.append(ProgramStep(StepKind.RUN, draft.numbers[step.index]))
        # The merged tensor is held as often as its parts were.
        steps.extend(ProgramStep(StepKind.GET, result) for _ in op.results[1:])
    return draft.program(program, steps)


@_annotations.checked(RematError)
def eliminate_constants(program: Program) -> Program:
    """The same program without inputs and parameters, whose bytes are always there.

    `Program.constant_bytes` of the original tells how many bytes were left out.
    """
    draft, steps = _ProgramDraft(), list[ProgramStep]()
    for step in program.steps:
        if step.kind is not StepKind.RUN:
            if step.index in draft.tensors:
                steps.append(ProgramStep(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        if op.is_constant:
            continue
        if any(alias >= 0 for alias in op.aliases):
            raise RematError(f"{op.name} makes an alias: collapse aliases first")
        results = draft.add(step.index, op, [program.tensors[x] for x in op.results], op.sizes)
        draft.tensors.update(zip(op.results, results, strict=True))
        steps.append(ProgramStep(StepKind.RUN, draft.numbers[step.index]))
    return draft.program(program, steps)


@_annotations.checked(RematError)
def simplify(program: Program) -> Program:
    """All three rewrites, in the order that works."""
    return eliminate_constants(merge_tuples(collapse_aliases(program)))
