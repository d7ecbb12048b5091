"""A recorded training step as data: operators, tensors and the order of events."""

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
"""Name of the operators that represent inputs and parameters."""


class StepKind(IntEnum):
    """Kind of a program step."""

    RUN = 0
    """Run an operator for the first time."""
    GET = 1
    """Add one outside reference to a tensor."""
    PIN = 2
    """Bring a tensor back if it was evicted, and keep it until the end."""
    RELEASE = 3
    """Remove one outside reference to a tensor."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator with a cost: `results = name(args)`."""

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
        """Return True if it represents an input or a parameter."""
        return not self.args and self.name == CONSTANT


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One event: `kind` applied to the operator or tensor with number `index`."""

    kind: StepKind
    index: int


@dataclass(frozen=True)
class Program:
    """A recorded training step: its operators, and when references are added and released.

    Attributes:
        ops: Operators, numbered in order.
        steps: Events in the order in which they happen.
        tensors: Name of every tensor.
        ignored_releases: Number of releases of names that the log never defined.
        output_bytes: Bytes reserved for outputs, if they are preallocated instead of pinned at the end.
    """

    ops: tuple[Op, ...]
    steps: tuple[ProgramStep, ...]
    tensors: tuple[str, ...]
    ignored_releases: int = 0
    output_bytes: int = 0

    @cached_property
    def compute(self) -> int:
        """Cost of running every operator once."""
        return sum(op.cost for op in self.ops)

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes of inputs and parameters."""
        return sum(sum(op.sizes) for op in self.ops if op.is_constant)

    @cached_property
    def own_sizes(self) -> tuple[int, ...]:
        """Bytes that each tensor adds to memory; 0 for aliases."""
        sizes = [0] * len(self.tensors)
        for op in self.ops:
            for number, size in zip(op.results, op.sizes, strict=True):
                sizes[number] = size
        return tuple(sizes)

    @cached_property
    def bottleneck_bytes(self) -> int:
        """Largest sum of the inputs and outputs of one operator: a lower bound of every budget."""
        own = self.own_sizes
        needs = (sum(op.sizes) + sum(own[number] for number in op.args) for op in self.ops)
        return max(needs, default=0)

    def without_releases(self) -> Program:
        """Return the same program without any release of a reference."""
        steps = tuple(step for step in self.steps if step.kind is not StepKind.RELEASE)
        return Program(self.ops, steps, self.tensors, self.ignored_releases, self.output_bytes)


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, newline="")
    temporary.replace(path)


@_arguments.checked(RematError)
def chain(length: int, *, size: int = 1, cost: int = 1) -> Program:
    """Build a chain of forward operators followed by their backward operators.

    Backward operator i reads the gradient so far and the i-th activation.

    Args:
        length: Number of forward operators.
        size: Bytes of every tensor.
        cost: Time of every operator.

    Returns:
        A program of `2 * length + 1` operators, the input included.

    Example:
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
    """A line of a log; the tag of the class is the instruction."""


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
    """Read a log into a program. Cost: O(lines).

    A mutation makes a new storage of the same size (copy on write).

    Args:
        source: Path of a log, or its lines.
        outputs: How to treat names that are still referenced at the end: `"rematerialize"` pins them at
            the end, `"preallocate"` only counts their bytes (`Program.output_bytes`).
        from_start: Skip everything before the annotation START.

    Returns:
        The recorded program.

    Raises:
        RematError: If the log cannot be read or a line is malformed; the message names the line.

    Example:
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
            raise RematError(
                "the log cannot be read",
                code="remat.log_unreadable",
                path=path,
                found=str(error),
            ) from error
        return _LogReader(str(path)).read(text.splitlines(), outputs, from_start=from_start)
    return _LogReader("log").read(source, outputs, from_start=from_start)


class _LogReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        """Number of the line that was read last."""
        self.ops: list[Op] = []
        self.steps: list[ProgramStep] = []
        self.names: list[str] = []
        self.storage_sizes: list[int] = []
        """Bytes of the storage of every tensor."""
        self.roots: list[int] = []
        """First tensor of the storage of every tensor."""
        self.bound: dict[str, int] = {}
        """Tensor that each name currently refers to."""
        self.references: list[int] = []
        self.storage_references: list[int] = []
        """References per storage, indexed by the number of its first tensor."""
        self.backward = False
        self.ignored_releases = 0

    def read(self, lines: Iterable[str], outputs: OutputCondition, *, from_start: bool) -> Program:
        self.rows = self._parsed(lines)
        start = _Annotate("START")
        if from_start and all(row != start for row in self.rows):
            raise RematError(
                "the log has no annotation START",
                code="remat.log_without_start",
                path=self.path,
                fix="Check that it is complete, or pass from_start=False to read it from the first line.",
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
                    raise self._error("orphan", "MEMORY or ALIAS without a CALL or CONSTANT")
        output_bytes = self._end(outputs)
        names = tuple(self.names)
        return Program(
            tuple(self.ops), tuple(self.steps), names, self.ignored_releases, output_bytes
        )

    def _parsed(self, lines: Iterable[str]) -> Iterator[_Line]:
        try:
            numbered = enumerate(lines, 1)
        except TypeError:
            raise self._error(
                "not_iterable", "source must be a path or lines", type(lines).__name__
            ) from None
        for self.line, text in numbered:
            if not isinstance(text, str):
                raise self._error("not_text", "the line is not text", repr(text)[:60])
            if not text.strip():
                continue
            try:
                yield _DECODER.decode(text)
            except (ValueError, RecursionError) as error:
                raise self._error(
                    "not_an_instruction", f"not an instruction ({error})", repr(text[:60])
                ) from error

    def _constant(self, row: _Constant) -> None:
        if row.name in self.bound:
            raise self._error("constant_exists", "the constant already exists", repr(row.name))
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
                raise self._error(
                    "alias_position",
                    "ALIAS is not a position of an argument",
                    f"{alias} for {name}",
                )
            if name in self.bound:
                raise self._error("result_exists", "the result already exists", repr(name))
            if alias >= 0 and size not in (0, self.storage_sizes[args[alias]]):
                expected = (
                    f"{self.storage_sizes[args[alias]]} bytes, the size of the shared storage"
                )
                raise self._error(
                    "alias_size", "the alias has another size", f"{size} for {name!r}", expected
                )
            sizes.append(0 if alias >= 0 else size)
            aliases.append(alias)
        results = self._run(row.name, row.time, args, tuple(sizes), tuple(aliases), row.result)
        for name, number in zip(row.result, results, strict=True):
            self._bind(name, number)

    def _mutate(self, row: _Mutate) -> None:
        args = tuple(map(self._lookup, row.args))
        if any(at >= len(args) for at in row.mutate):
            raise self._error(
                "mutate_position", "MUTATE is not a position of an argument", repr(row.mutate)
            )
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
            raise self._error("copy_exists", "the name to copy to already exists", row.dst)
        self._bind(row.dst, source)
        self.steps.append(ProgramStep(StepKind.GET, source))

    def _release(self, row: _Release) -> None:
        number = self.bound.get(row.name)
        if number is None:
            self.ignored_releases += 1
            return
        if self.storage_references[self.roots[number]] <= 0:
            raise self._error(
                "release_unreferenced", "the released storage has no references", repr(row.name)
            )
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
        """Treat everything still referenced as an output; return the bytes of preallocated outputs."""
        still = [number for number in self.bound.values() if self.references[number] > 0]
        if outputs == "rematerialize":
            self.steps += [ProgramStep(StepKind.PIN, number) for number in still]
            return 0
        return sum({self.roots[number]: self.storage_sizes[number] for number in still}.values())

    def _memory_of(self, name: str) -> int:
        """Read the MEMORY line that must follow."""
        row = next(self.rows, None)
        if not isinstance(row, _Memory) or row.name != name:
            raise self._error("unexpected", "unexpected line", repr(row), f"MEMORY of {name!r}")
        return row.memory

    def _alias_of(self, name: str) -> int:
        """Read the ALIAS line that must follow."""
        row = next(self.rows, None)
        if not isinstance(row, _Alias) or row.name != name:
            raise self._error("unexpected", "unexpected line", repr(row), f"ALIAS of {name!r}")
        return row.alias

    def _lookup(self, name: str) -> int:
        if name not in self.bound:
            raise self._error("undefined_tensor", "no earlier line defines the tensor", repr(name))
        return self.bound[name]

    def _error(
        self, reason: str, message: str, details: str = "", expected: str | None = None
    ) -> RematError:
        return RematError(
            f"line {max(self.line, 1)}: {message}",
            code=f"remat.log_{reason}",
            path=self.path,
            found=details or None,
            expected=expected,
            fix="Record the step again, or cut the log off before this line.",
        )
