"""A recorded training step as data: operators, tensors, and the order in which things happen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from gradkeep import _annotations
from gradkeep.errors import RematError

CONSTANT = "constant"
"""The name of operators that stand for inputs and parameters."""


class StepKind(IntEnum):
    """What a step does."""

    RUN = 0
    """Run an operator for the first time."""
    GET = 1
    """One more reference to a tensor from outside."""
    PIN = 2
    """Bring a tensor back if need be, and keep it for good."""
    RELEASE = 3
    """One reference from outside less."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: `results = name(args)`, at a cost."""

    name: str
    cost: int
    """Time, in the log's unit (nanoseconds)."""
    args: tuple[int, ...]
    """Numbers of the tensors it reads."""
    results: tuple[int, ...]
    """Numbers of the tensors it makes."""
    sizes: tuple[int, ...]
    """Bytes of each result; 0 for an alias."""
    aliases: tuple[int, ...]
    """For each result the index of the argument whose storage it shares, or -1."""
    backward: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it stands for an input or a parameter."""
        return not self.args and self.name == CONSTANT


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One thing that happens: `kind` to the operator or tensor with number `index`."""

    kind: StepKind
    index: int


@dataclass(frozen=True)
class Program:
    """A whole step of training: what was computed, and when references came and went."""

    ops: tuple[Op, ...]
    steps: tuple[ProgramStep, ...]
    tensors: tuple[str, ...]
    """The name of every tensor."""
    ignored_releases: int = 0
    """Releases of names that the log never defined."""
    output_bytes: int = 0
    """Bytes set aside for outputs, if they are preallocated instead of pinned at the end."""

    @cached_property
    def compute(self) -> int:
        """The cost of running every operator once."""
        return sum(op.cost for op in self.ops)

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes of inputs and parameters."""
        return sum(sum(op.sizes) for op in self.ops if op.is_constant)

    @cached_property
    def own_sizes(self) -> tuple[int, ...]:
        """Bytes that each tensor adds by itself; 0 for aliases."""
        sizes = [0] * len(self.tensors)
        for op in self.ops:
            for number, size in zip(op.results, op.sizes, strict=True):
                sizes[number] = size
        return tuple(sizes)

    @cached_property
    def bottleneck_bytes(self) -> int:
        """The largest sum of one operator's inputs and outputs: no budget below it can work."""
        own = self.own_sizes
        needs = (sum(op.sizes) + sum(own[number] for number in op.args) for op in self.ops)
        return max(needs, default=0)

    def without_releases(self) -> Program:
        """The same program if nothing outside ever let go of a tensor."""
        kept = tuple(step for step in self.steps if step.kind is not StepKind.RELEASE)
        return Program(self.ops, kept, self.tensors, self.ignored_releases, self.output_bytes)


@_annotations.checked(RematError)
def chain(length: int, *, size: int = 1, cost: int = 1) -> Program:
    """A chain of `length` forward operators and their backward ones, all of one size and cost.

    Backward operator i reads the gradient so far and the i-th activation.

    >>> len(chain(3).ops)
    7
    """
    ops = [Op(CONSTANT, 0, (), (0,), (size,), (-1,))]
    steps = [ProgramStep(StepKind.RUN, 0), ProgramStep(StepKind.PIN, 0)]
    names = ["input"]

    def run(name: str, args: tuple[int, ...], *, backward: bool) -> int:
        number = len(names)
        names.append(f"{name}{number}")
        steps.append(ProgramStep(StepKind.RUN, len(ops)))
        ops.append(Op(name, cost, args, (number,), (size,), (-1,), backward))
        return number

    forward = [0]
    for _ in range(length):
        forward.append(run("forward", (forward[-1],), backward=False))
    gradient = forward.pop()
    for activation in reversed(forward):
        after = run("backward", (gradient, activation), backward=True)
        steps.append(ProgramStep(StepKind.RELEASE, gradient))
        if activation:
            steps.append(ProgramStep(StepKind.RELEASE, activation))
        gradient = after
    steps.append(ProgramStep(StepKind.PIN, gradient))
    return Program(tuple(ops), tuple(steps), tuple(names))
