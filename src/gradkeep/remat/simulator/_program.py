"""A recorded training step as data: operators, tensors, and the order in which things happen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from gradkeep import _arguments
from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        steps = tuple(step for step in self.steps if step.kind is not StepKind.RELEASE)
        return Program(self.ops, steps, self.tensors, self.ignored_releases, self.output_bytes)


def replace_file(path: Path, text: str) -> None:
    """Write a file: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, newline="")
    temporary.replace(path)


@_arguments.checked(RematError)
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


OutputCondition = Literal["rematerialize", "preallocate"]

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, tag_field="INSTRUCTION", rename="upper"):
    """A line of a log; the name of the class is the instruction."""


class _Annotate(_Line, tag="ANNOTATE"):
    annotation: str


class _Constant(_Line, tag="CONSTANT"):
    name: str


class _Memory(_Line, tag="MEMORY"):
    name: str
    memory: _Size


class _Alias(_Line, tag="ALIAS"):
    name: str
    alias: Annotated[int, msgspec.Meta(ge=-1)]


class _Call(_Line, tag="CALL"):
    name: str
    result: list[str]
    args: list[str]
    time: _Size


class _Mutate(_Line, tag="MUTATE"):
    name: str
    args: list[str]
    mutate: list[_Size]
    time: _Size


class _Copy(_Line, tag="COPY"):
    dst: str
    src: str


class _CopyFrom(_Line, tag="COPY_FROM"):
    dst: str
    src: str


class _Release(_Line, tag="RELEASE"):
    name: str


# Numbers may be written as text, as the original does.
_DECODER = msgspec.json.Decoder(
    _Annotate | _Constant | _Memory | _Alias | _Call | _Mutate | _Copy | _CopyFrom | _Release,
    strict=False,
)


@_arguments.checked(RematError)
def read_log(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    outputs: OutputCondition = "rematerialize",
    from_start: bool = True,
) -> Program:
    """Read a log into a program; O(lines).

    Everything before the annotation START is dropped (`from_start`). Names still referenced at the
    end are outputs: pinned at the end, or only counted (`outputs="preallocate"`). A mutation makes
    a new storage of the same size (copy on write). A malformed line raises `RematError` with its
    number.

    >>> lines = ['{"INSTRUCTION": "CONSTANT", "NAME": "x"}',
    ...          '{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"}']
    >>> read_log(lines, from_start=False).constant_bytes
    8
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RematError("the log cannot be read", path=path, found=str(error)) from error
        return _LogReader(str(path)).read(text.splitlines(), outputs, from_start=from_start)
    return _LogReader("log").read(source, outputs, from_start=from_start)


class _LogReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        """The number of the line that was read last."""
        self.ops: list[Op] = []
        self.steps: list[ProgramStep] = []
        self.names: list[str] = []
        self.storage_sizes: list[int] = []
        """For every tensor the bytes of its storage."""
        self.roots: list[int] = []
        """For every tensor the first tensor of its storage."""
        self.bound: dict[str, int] = {}
        """Which tensor a name means now."""
        self.references: list[int] = []
        self.storage_references: list[int] = []
        """The same for whole storages, at the number of their first tensor."""
        self.backward = False
        self.ignored_releases = 0

    def read(self, lines: Iterable[str], outputs: OutputCondition, *, from_start: bool) -> Program:
        self.rows = self._parsed(lines)
        start = _Annotate("START")
        if from_start and all(row != start for row in self.rows):
            raise RematError(
                "the log has no annotation START",
                path=self.path,
                fix="it may be cut off; to read it from the first line, pass from_start=False",
            )
        for row in self.rows:
            match row:
                case _Annotate():
                    self.backward |= row.annotation == "BACKWARD"
                case _Constant():
                    self._constant(row)
                case _Call():
                    self._call(row)
                case _Mutate():
                    self._mutate(row)
                case _Copy() | _CopyFrom():
                    self._copy(row)
                case _Release():
                    self._release(row)
                case _:
                    raise self._error("MEMORY or ALIAS that belongs to no CALL or CONSTANT")
        output_bytes = self._end(outputs)
        names = tuple(self.names)
        return Program(
            tuple(self.ops), tuple(self.steps), names, self.ignored_releases, output_bytes
        )

    def _parsed(self, lines: Iterable[str]) -> Iterator[_Line]:
        try:
            numbered = enumerate(lines, 1)
        except TypeError:
            raise self._error("no lines", type(lines).__name__) from None
        for self.line, text in numbered:
            if not isinstance(text, str):
                raise self._error("not a line of text", repr(text)[:60])
            if not text.strip():
                continue
            try:
                yield _DECODER.decode(text)
            except (ValueError, RecursionError) as error:
                raise self._error(f"not an instruction: {error}", repr(text[:60])) from error

    def _constant(self, row: _Constant) -> None:
        if row.name in self.bound:
            raise self._error("a constant that exists already", repr(row.name))
        size = self._memory_of(row.name)
        (number,) = self._run(CONSTANT, 0, (), (size,), (-1,), (row.name,))
        self.steps.append(ProgramStep(StepKind.PIN, number))
        self._bind(row.name, number)

    def _call(self, row: _Call) -> None:
        args = tuple(map(self._lookup, row.args))
        sizes, aliases = [], []
        for name in row.result:
            size, alias = self._memory_of(name), self._alias_of(name)
            if alias >= len(args):
                raise self._error("an alias of no argument", f"ALIAS {alias} of {name}")
            if name in self.bound:
                raise self._error("a result that exists already", repr(name))
            if alias >= 0 and size not in (0, self.storage_sizes[args[alias]]):
                expected = f"{self.storage_sizes[args[alias]]} bytes, as the storage it shares has"
                raise self._error("an alias of another size", f"{size} for {name!r}", expected)
            sizes.append(0 if alias >= 0 else size)
            aliases.append(alias)
        results = self._run(row.name, row.time, args, tuple(sizes), tuple(aliases), row.result)
        for name, number in zip(row.result, results, strict=True):
            self._bind(name, number)

    def _mutate(self, row: _Mutate) -> None:
        args = tuple(map(self._lookup, row.args))
        if any(at >= len(args) for at in row.mutate):
            raise self._error("a mutation of no argument", repr(row.mutate))
        sizes = tuple(self.storage_sizes[args[at]] for at in row.mutate)
        names = [self.names[args[at]] + "$" for at in row.mutate]
        results = self._run(row.name, row.time, args, sizes, (-1,) * len(sizes), names)
        for at, number in zip(row.mutate, results, strict=True):
            old = self.bound[row.args[at]]
            self._bind(row.args[at], number)
            self._release_reference(old)

    def _copy(self, row: _Copy | _CopyFrom) -> None:
        source = self._lookup(row.src)
        if isinstance(row, _CopyFrom):
            self._release_reference(self._lookup(row.dst))
        elif row.dst in self.bound:
            raise self._error("a copy to a name that exists", row.dst)
        self._bind(row.dst, source)
        self.steps.append(ProgramStep(StepKind.GET, source))

    def _release(self, row: _Release) -> None:
        number = self.bound.get(row.name)
        if number is None:
            self.ignored_releases += 1
            return
        if self.storage_references[self.roots[number]] <= 0:
            raise self._error("a release of a storage without references", repr(row.name))
        self._release_reference(number)

    def _run(
        self,
        name: str,
        cost: int,
        args: tuple[int, ...],
        sizes: tuple[int, ...],
        aliases: tuple[int, ...],
        names: Iterable[str],
    ) -> tuple[int, ...]:
        self.backward |= "backward" in name
        results = tuple(range(len(self.names), len(self.names) + len(sizes)))
        for number, size, alias in zip(results, sizes, aliases, strict=True):
            self.storage_sizes.append(size if alias < 0 else self.storage_sizes[args[alias]])
            self.roots.append(number if alias < 0 else self.roots[args[alias]])
            self.references.append(0)
            self.storage_references.append(0)
        self.names += names
        self.steps.append(ProgramStep(StepKind.RUN, len(self.ops)))
        self.ops.append(Op(name, cost, args, results, sizes, aliases, self.backward))
        return results

    def _bind(self, name: str, number: int) -> None:
        self.bound[name] = number
        self.references[number] += 1
        self.storage_references[self.roots[number]] += 1

    def _release_reference(self, number: int) -> None:
        self.references[number] -= 1
        self.storage_references[self.roots[number]] -= 1
        self.steps.append(ProgramStep(StepKind.RELEASE, number))

    def _end(self, outputs: OutputCondition) -> int:
        """What is still referenced is an output; bytes of those that are preallocated."""
        still = [number for number in self.bound.values() if self.references[number] > 0]
        if outputs == "rematerialize":
            self.steps += [ProgramStep(StepKind.PIN, number) for number in still]
            return 0
        return sum({self.roots[number]: self.storage_sizes[number] for number in still}.values())

    def _memory_of(self, name: str) -> int:
        """The bytes in the line that must come next."""
        row = next(self.rows, None)
        if not isinstance(row, _Memory) or row.name != name:
            raise self._error("another line was expected", repr(row), f"MEMORY of {name!r}")
        return row.memory

    def _alias_of(self, name: str) -> int:
        """The alias in the line that must come next."""
        row = next(self.rows, None)
        if not isinstance(row, _Alias) or row.name != name:
            raise self._error("another line was expected", repr(row), f"ALIAS of {name!r}")
        return row.alias

    def _lookup(self, name: str) -> int:
        if name not in self.bound:
            raise self._error("a tensor that no line before defines", repr(name))
        return self.bound[name]

    def _error(self, what: str, details: str = "", expected: str | None = None) -> RematError:
        return RematError(
            f"line {max(self.line, 1)}: {what}",
            path=self.path,
            found=details or None,
            expected=expected,
            fix="record the step again, or cut the log at the line before",
        )
