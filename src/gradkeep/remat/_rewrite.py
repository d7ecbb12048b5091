"""Programs made simpler for the optimum: no aliases, one result per operator, no constants."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradkeep.errors import RematError
from gradkeep.remat._program import Kind, Op, Program, Step

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class _Draft:
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

    def program(self, source: Program, steps: list[Step]) -> Program:
        return dataclasses.replace(
            source, ops=tuple(self.ops), steps=tuple(steps), tensors=tuple(self.names)
        )


def collapse_aliases(program: Program) -> Program:
    """The same program in which an alias is one more reference to what it is an alias of.

    The cost of making an alias is dropped with it. An operator that makes both aliases and new
    tensors cannot be expressed and raises.
    """
    draft, steps = _Draft(), list[Step]()
    for step in program.steps:
        if step.kind is not Kind.RUN:
            steps.append(Step(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        shared = [alias >= 0 for alias in op.aliases]
        if any(shared) and not all(shared):
            raise RematError(f"{op.name} makes both aliases and new tensors: cannot collapse it")
        if any(shared):
            for number, alias in zip(op.results, op.aliases, strict=True):
                draft.tensors[number] = draft.tensors[op.args[alias]]
                steps.append(Step(Kind.GET, draft.tensors[number]))
            continue
        results = draft.add(step.index, op, [program.tensors[x] for x in op.results], op.sizes)
        draft.tensors.update(zip(op.results, results, strict=True))
        steps.append(Step(Kind.RUN, draft.numbers[step.index]))
    return draft.program(program, steps)


def merge_tuples(program: Program) -> Program:
    """The same program in which the results of an operator are one tensor of their joint size."""
    draft, steps = _Draft(), list[Step]()
    for step in program.steps:
        if step.kind is not Kind.RUN:
            steps.append(Step(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        if any(alias >= 0 for alias in op.aliases):
            raise RematError(f"{op.name} makes an alias: collapse aliases first")
        name = "+".join(program.tensors[number] for number in op.results)
        (result,) = draft.add(step.index, op, [name], (sum(op.sizes),))
        draft.tensors.update(dict.fromkeys(op.results, result))
        steps.append(Step(Kind.RUN, draft.numbers[step.index]))
        # The merged tensor is held as often as its parts were.
        steps.extend(Step(Kind.GET, result) for _ in op.results[1:])
    return draft.program(program, steps)


def eliminate_constants(program: Program) -> Program:
    """The same program without inputs and parameters, whose bytes are always there.

    `Program.constant_bytes` of the original tells how many bytes were left out.
    """
    draft, steps = _Draft(), list[Step]()
    for step in program.steps:
        if step.kind is not Kind.RUN:
            if step.index in draft.tensors:
                steps.append(Step(step.kind, draft.tensors[step.index]))
            continue
        op = program.ops[step.index]
        if op.is_constant:
            continue
        if any(alias >= 0 for alias in op.aliases):
            raise RematError(f"{op.name} makes an alias: collapse aliases first")
        results = draft.add(step.index, op, [program.tensors[x] for x in op.results], op.sizes)
        draft.tensors.update(zip(op.results, results, strict=True))
        steps.append(Step(Kind.RUN, draft.numbers[step.index]))
    return draft.program(program, steps)


def simplify(program: Program) -> Program:
    """All three rewrites, in the order that works."""
    return eliminate_constants(merge_tuples(collapse_aliases(program)))
