"""What a recorder notes down, and the lines that it becomes.

Noting must be cheap, for it happens at every operator: tensors are numbers until the log is written,
and a release is nothing but the number.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gradkeep.errors import RematError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Call(NamedTuple):
    """An operator that ran."""

    name: str
    args: tuple[int, ...]
    results: tuple[tuple[int, int, int], ...]
    """Number, bytes and alias index of each result."""


class Mutation(NamedTuple):
    """An operator that changed whole storages in place; they keep their numbers."""

    name: str
    args: tuple[int, ...]
    changed: tuple[int, ...]
    """Positions among the arguments."""


class Constant(NamedTuple):
    """A storage that was there before."""

    number: int
    size: int


BACKWARD = "BACKWARD"

Event = Call | Mutation | Constant | int | str
"""What happened; a number is a release, the string is the begin of the backward pass."""


@dataclass(slots=True)
class Notes:
    """One run of a step."""

    events: list[Event] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """Nanoseconds, one for every `Call` and `Mutation`."""

    def least(self, other: Notes) -> Notes:
        """These notes with the smaller of both times, or the other's if it did something else."""
        if self.events != other.events:
            return other
        pairs = zip(self.times, other.times, strict=True)
        return Notes(self.events, [min(pair) for pair in pairs])

    def write(self, path: Path) -> None:
        """Write the log; a reader sees all of it or nothing."""
        lines = [_line("ANNOTATE", ANNOTATION="START"), *self._lines()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text("\n".join(lines) + "\n")
            temporary.replace(path)
        except OSError as error:
            raise RematError("the log cannot be written", path=path, found=str(error)) from error

    def _lines(self) -> Iterator[str]:
        times = iter(self.times)
        for event in self.events:
            if isinstance(event, int):
                yield _line("RELEASE", NAME=f"x{event}")
            elif isinstance(event, Call):
                yield from _call(event, next(times))
            elif isinstance(event, Mutation):
                args = [f"x{number}" for number in event.args]
                # The one list of numbers in the format: the original uses them as they are.
                changed = list(event.changed)
                spent = str(next(times))
                yield _line("MUTATE", NAME=event.name, ARGS=args, MUTATE=changed, TIME=spent)
            elif isinstance(event, Constant):
                yield _line("CONSTANT", NAME=f"x{event.number}")
                yield _line("MEMORY", NAME=f"x{event.number}", MEMORY=str(event.size))
            else:
                yield _line("ANNOTATE", ANNOTATION=event)


def _call(event: Call, spent: int) -> Iterator[str]:
    names = [f"x{number}" for number, _, _ in event.results]
    args = [f"x{number}" for number in event.args]
    yield _line("CALL", NAME=event.name, RESULT=names, ARGS=args, TIME=str(spent))
    for number, size, alias in event.results:
        yield _line("MEMORY", NAME=f"x{number}", MEMORY=str(size))
        yield _line("ALIAS", NAME=f"x{number}", ALIAS=str(alias))


def _line(instruction: str, **values: Any) -> str:
    return json.dumps({"INSTRUCTION": instruction, **values})
