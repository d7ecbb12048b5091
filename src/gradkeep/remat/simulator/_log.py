"""Logs of one training step: JSON lines, one instruction each, readable by the original simulator.

Every value is a string, lists are lists of strings. A CALL is followed by one MEMORY and one ALIAS
line per result; a CONSTANT by one MEMORY line.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import _annotations
from gradkeep.errors import LogError, RematError
from gradkeep.remat.simulator._program import CONSTANT, Op, Program, ProgramStep, StepKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OutputCondition = Literal["rematerialize", "preallocate"]

_FIELDS: dict[str, tuple[tuple[str, type], ...]] = {
    "ANNOTATE": (("ANNOTATION", str),),
    "CONSTANT": (("NAME", str),),
    "MEMORY": (("NAME", str), ("MEMORY", int)),
    "CALL": (("NAME", str), ("RESULT", list), ("ARGS", list), ("TIME", int)),
    "ALIAS": (("NAME", str), ("ALIAS", int)),
    "MUTATE": (("NAME", str), ("ARGS", list), ("MUTATE", list), ("TIME", int)),
    "COPY": (("DST", str), ("SRC", str)),
    "COPY_FROM": (("DST", str), ("SRC", str)),
    "RELEASE": (("NAME", str),),
}


@_annotations.checked(RematError)
def read_log(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    outputs: OutputCondition = "rematerialize",
    from_start: bool = True,
) -> Program:
    """Read a log into a program; O(lines).

    Everything before the annotation START is dropped (`from_start`). Names still referenced at the
    end are outputs: pinned at the end, or only counted (`outputs="preallocate"`). A mutation makes
    a new storage of the same size (copy on write). A malformed line raises `LogError` with its
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
            raise LogError("the log cannot be read", path=path, found=str(error)) from error
        return _LogReader(str(path), outputs).read(text.splitlines(), from_start=from_start)
    return _LogReader("log", outputs).read(source, from_start=from_start)


@dataclass(frozen=True, slots=True)
class _LogLine:
    number: int
    instruction: str
    values: dict[str, Any]


@dataclass(slots=True)
class _LogReader:
    path: str
    outputs: OutputCondition
    ops: list[Op] = field(default_factory=list)
    steps: list[ProgramStep] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    storage_sizes: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    """For every tensor the first tensor of its storage."""
    bound: dict[str, int] = field(default_factory=dict)
    """Which tensor a name means now."""
    references: list[int] = field(default_factory=list)
    storage_references: list[int] = field(default_factory=list)
    """The same for whole storages, at the number of their first tensor."""
    backward: bool = False
    ignored_releases: int = 0

    def read(self, lines: Iterable[str], *, from_start: bool) -> Program:
        rows = list(self._parsed(lines))
        if from_start:
            rows = self._after_start(rows)
        stream = iter(rows)
        for line in stream:
            self._take(line, stream)
        output_bytes = self._end()
        return Program(
            tuple(self.ops),
            tuple(self.steps),
            tuple(self.names),
            self.ignored_releases,
            output_bytes,
        )

    def _parsed(self, lines: Iterable[str]) -> Iterator[_LogLine]:
        try:
            given = enumerate(lines, 1)
        except TypeError:
            raise self._wrong(1, "no lines", type(lines).__name__) from None
        for number, text in given:
            if not isinstance(text, str):
                raise self._wrong(number, "not a line of text", repr(text)[:60])
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise self._wrong(number, "not JSON", f"{text[:60]!r} ({error})") from error
            if not isinstance(values, dict) or "INSTRUCTION" not in values:
                raise self._wrong(number, "no INSTRUCTION", repr(text[:60]))
            name = values["INSTRUCTION"]
            if name not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise self._wrong(number, "unknown instruction", repr(name), f"one of {known}")
            yield _LogLine(number, name, self._typed(number, name, values))

    def _typed(self, number: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
        typed: dict[str, Any] = {}
        for key, kind in _FIELDS[name]:
            if key not in values:
                raise self._wrong(number, f"{name} without {key}", repr(values)[:80])
            value = values[key]
            if kind is int:
                try:
                    value = int(value)
                except (TypeError, ValueError) as error:
                    what = f"{key} of {name} is not a whole number"
                    raise self._wrong(number, what, repr(value)) from error
            elif not isinstance(value, kind):
                raise self._wrong(number, f"{key} of {name} is not a {kind.__name__}", repr(value))
            typed[key] = value
        return typed

    def _after_start(self, rows: list[_LogLine]) -> list[_LogLine]:
        for at, line in enumerate(rows):
            if line.instruction == "ANNOTATE" and line.values["ANNOTATION"] == "START":
                return rows[at + 1 :]
        raise LogError(
            "the log has no annotation START",
            path=self.path,
            fix="it may be cut off; to read it from the first line, pass from_start=False",
        )

    def _take(self, line: _LogLine, stream: Iterator[_LogLine]) -> None:
        match line.instruction:
            case "CONSTANT":
                self._constant(line, stream)
            case "CALL":
                self._call(line, stream)
            case "MUTATE":
                self._mutate(line)
            case "COPY":
                self._copy(line)
            case "COPY_FROM":
                self._copy_from(line)
            case "RELEASE":
                self._release(line)
            case "ANNOTATE":
                self.backward |= line.values["ANNOTATION"] == "BACKWARD"
            case other:
                raise self._wrong(line.number, f"{other} that belongs to no CALL or CONSTANT", "")

    def _constant(self, line: _LogLine, stream: Iterator[_LogLine]) -> None:
        name = line.values["NAME"]
        if name in self.bound:
            raise self._wrong(line.number, "a constant that exists already", repr(name))
        size = self._following(line, stream, "MEMORY", name)["MEMORY"]
        results = self._run(CONSTANT, 0, (), (size,), (-1,), (name,))
        self.steps.append(ProgramStep(StepKind.PIN, results[0]))
        self._bind(name, results[0])

    def _call(self, line: _LogLine, stream: Iterator[_LogLine]) -> None:
        values, args = line.values, self._arguments(line)
        sizes, aliases = [], []
        for name in values["RESULT"]:
            size = self._following(line, stream, "MEMORY", name)["MEMORY"]
            alias = self._following(line, stream, "ALIAS", name)["ALIAS"]
            if not -1 <= alias < len(args):
                found, expected = f"ALIAS {alias} of {name}", f"-1 to {len(args) - 1}"
                raise self._wrong(line.number, "an alias of no argument", found, expected)
            if name in self.bound:
                raise self._wrong(line.number, "a result that exists already", repr(name))
            if alias >= 0 and size not in (0, self.storage_sizes[args[alias]]):
                found = f"{size} bytes for {name!r}"
                expected = f"{self.storage_sizes[args[alias]]} bytes, as the storage it shares has"
                raise self._wrong(line.number, "an alias of another size", found, expected)
            sizes.append(0 if alias >= 0 else size)
            aliases.append(alias)
        self.backward |= "backward" in values["NAME"]
        results = self._run(
            values["NAME"], values["TIME"], args, tuple(sizes), tuple(aliases), values["RESULT"]
        )
        for name, number in zip(values["RESULT"], results, strict=True):
            self._bind(name, number)

    def _mutate(self, line: _LogLine) -> None:
        values, args = line.values, self._arguments(line)
        indices = self._indices(line, len(args))
        self.backward |= "backward" in values["NAME"]
        sizes = tuple(self.storage_sizes[args[at]] for at in indices)
        names = [self.names[args[at]] + "$" for at in indices]
        results = self._run(values["NAME"], values["TIME"], args, sizes, (-1,) * len(sizes), names)
        for at, number in zip(indices, results, strict=True):
            name = values["ARGS"][at]
            old = self.bound[name]
            self._bind(name, number)
            self._let_go(old)

    def _copy(self, line: _LogLine) -> None:
        source = self._known(line, line.values["SRC"])
        if line.values["DST"] in self.bound:
            raise self._wrong(line.number, "a copy to a name that exists", line.values["DST"])
        self.bound[line.values["DST"]] = source
        self._hold(source)
        self.steps.append(ProgramStep(StepKind.GET, source))

    def _copy_from(self, line: _LogLine) -> None:
        old, source = (self._known(line, line.values[key]) for key in ("DST", "SRC"))
        self.bound[line.values["DST"]] = source
        self._let_go(old)
        self._hold(source)
        self.steps.append(ProgramStep(StepKind.GET, source))

    def _release(self, line: _LogLine) -> None:
        name = line.values["NAME"]
        if name not in self.bound:
            self.ignored_releases += 1
            return
        number = self.bound[name]
        if self.storage_references[self.roots[number]] <= 0:
            raise self._wrong(line.number, "a release of a storage without references", repr(name))
        self._let_go(number)

    def _run(
        self,
        name: str,
        cost: int,
        args: tuple[int, ...],
        sizes: tuple[int, ...],
        aliases: tuple[int, ...],
        names: Iterable[str],
    ) -> tuple[int, ...]:
        results = []
        for text, size, alias in zip(names, sizes, aliases, strict=True):
            number = len(self.names)
            self.names.append(text)
            self.storage_sizes.append(size if alias < 0 else self.storage_sizes[args[alias]])
            self.roots.append(number if alias < 0 else self.roots[args[alias]])
            self.references.append(0)
            self.storage_references.append(0)
            results.append(number)
        self.steps.append(ProgramStep(StepKind.RUN, len(self.ops)))
        op = Op(name, cost, args, tuple(results), sizes, aliases, self.backward)
        self.ops.append(op)
        return op.results

    def _bind(self, name: str, number: int) -> None:
        self.bound[name] = number
        self._hold(number)

    def _hold(self, number: int) -> None:
        self.references[number] += 1
        self.storage_references[self.roots[number]] += 1

    def _let_go(self, number: int) -> None:
        self.references[number] -= 1
        self.storage_references[self.roots[number]] -= 1
        self.steps.append(ProgramStep(StepKind.RELEASE, number))

    def _end(self) -> int:
        """What is still referenced is an output."""
        counted: set[int] = set()
        output_bytes = 0
        for number in self.bound.values():
            if self.references[number] <= 0:
                continue
            if self.outputs == "rematerialize":
                self.steps.append(ProgramStep(StepKind.PIN, number))
            elif self.roots[number] not in counted:
                counted.add(self.roots[number])
                output_bytes += self.storage_sizes[number]
        return output_bytes

    def _following(
        self, line: _LogLine, stream: Iterator[_LogLine], instruction: str, name: str
    ) -> dict[str, Any]:
        after = next(stream, None)
        expected = f"{instruction} of {name!r} after line {line.number}"
        if after is None:
            raise self._wrong(line.number, "the log ends too early", "the end", expected)
        if (after.instruction, after.values.get("NAME")) != (instruction, name):
            found = f"{after.instruction} of {after.values.get('NAME')!r}"
            raise self._wrong(after.number, "another line was expected", found, expected)
        if instruction == "MEMORY" and after.values["MEMORY"] < 0:
            raise self._wrong(after.number, "a negative size", str(after.values["MEMORY"]))
        return after.values

    def _arguments(self, line: _LogLine) -> tuple[int, ...]:
        if line.values["TIME"] < 0:
            raise self._wrong(line.number, "a negative TIME", str(line.values["TIME"]))
        return tuple(self._known(line, name) for name in line.values["ARGS"])

    def _indices(self, line: _LogLine, count: int) -> list[int]:
        indices = []
        for value in line.values["MUTATE"]:
            if not str(value).isdigit() or int(value) >= count:
                found, expected = repr(value), f"argument indices 0 to {count - 1}"
                raise self._wrong(line.number, "a mutation of no argument", found, expected)
            indices.append(int(value))
        return indices

    def _known(self, line: _LogLine, name: str) -> int:
        if name not in self.bound:
            raise self._wrong(line.number, "a tensor that no line before defines", repr(name))
        return self.bound[name]

    def _wrong(self, number: int, what: str, found: str, expected: str | None = None) -> LogError:
        return LogError(
            f"line {number}: {what}",
            path=self.path,
            found=found or None,
            expected=expected,
            fix="record the step again, or cut the log at the line before",
        )
