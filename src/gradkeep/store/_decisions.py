"""Decisions of people about rows: a log that only grows, one small file each.

A decision is a document of its own, put under the next free number, so that of two people who
decide at once both are heard, in one order, and a kill loses nothing that was acknowledged. What is
undone stays in the log: an undo is a further decision, which names the one it takes back.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradkeep._arguments import check_fields
from gradkeep.errors import ConflictError, DamagedError, StoreError
from gradkeep.store._document import (
    SMALL_DOCUMENT,
    from_bytes,
    not_ours,
    parse_record,
    read_bytes,
    to_bytes,
)
from gradkeep.store._keys import DECISIONS, checked_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.store.backends._backend import Backend, Durability


@dataclass(frozen=True, slots=True)
class Decision:
    """What a person said about the label of one row.

    `accept`: it is right as it stands. `relabel`: it is wrong, and should be `label`, if that is
    known. `undo`: the decision with the number `of` is taken back.
    """

    split: str
    row: int
    """The row's id."""
    action: Literal["accept", "relabel", "undo"]
    label: int | None = None
    """What the label should be."""
    before: int | None = None
    """The label at the time of the decision."""
    of: int | None = None
    """The number of the decision that is taken back."""
    number: int = -1
    """Its place in the log of its split; given when it is recorded."""
    time: float = 0.0
    """When it was recorded, in seconds since the epoch."""

    def __post_init__(self) -> None:
        check_fields(self, StoreError)
        checked_name("split", self.split)
        wholes = (self.row, self.label, self.before, self.of)
        if any(whole is not None and not -(2**63) <= whole < 2**63 for whole in wholes):
            raise StoreError("a number of a decision is too large", expected="64 bits")
        if (self.action == "undo") != (self.of is not None):
            raise StoreError("an undo, and nothing else, names the decision that it takes back")


def append_decision(backend: Backend, decision: Decision, *, durability: Durability) -> Decision:
    """Put a decision under the next free number of its split; returns it with number and time."""
    number = _next_number(backend, decision.split)
    while True:
        made = dataclasses.replace(decision, number=number, time=time.time())
        fields = {**dataclasses.asdict(made), "token": secrets.token_hex(8)}
        try:
            backend.put_if_absent(
                decision_key(made.split, number),
                [to_bytes(fields)],
                durability=durability,
            )
        except ConflictError:  # somebody else was faster: theirs comes first
            number += 1
            continue
        return made


def read_decisions(backend: Backend, split: str, *, start: int = 0) -> list[Decision]:
    """The decisions about a split from a number on, in order; a gap among them is damage."""
    count = _next_number(backend, checked_name("split", split))
    found = []
    for number in range(start, count):
        key = decision_key(split, number)
        try:
            found.append(read_decision(backend, key))
        except FileNotFoundError:
            raise DamagedError(
                "a decision is missing: the log goes on after it", path=backend.describe(key)
            ) from None
    return found


def read_decision(backend: Backend, key: str) -> Decision:
    """Read one decision."""
    path = backend.describe(key)
    fields = from_bytes(read_bytes(backend, key, most=SMALL_DOCUMENT), path=path)
    if not isinstance(fields.pop("token", None), str):  # tells two equal decisions apart
        raise not_ours(path, "no token")
    return parse_record(Decision, fields, path=path)


def standing(decisions: Iterable[Decision]) -> dict[int, Decision]:
    """The last decision about each row that was not taken back, by the row's id.

    >>> log = [Decision("train", 7, "accept", number=0), Decision("train", 7, "undo", of=0, number=1)]
    >>> standing(log[:1])[7].action, standing(log)
    ('accept', {})
    """
    said: dict[int, list[Decision]] = {}
    for one in decisions:
        stack = said.setdefault(one.row, [])
        if one.action == "undo":
            stack[:] = [other for other in stack if other.number != one.of]
        else:
            stack.append(one)
    return {row: stack[-1] for row, stack in said.items() if stack}


def decision_key(split: str, number: int) -> str:
    """Where a decision lies."""
    return f"{DECISIONS}/{split}/{number:06d}.json"


def _next_number(backend: Backend, split: str) -> int:
    names = (entry.name.removesuffix(".json") for entry in backend.list(f"{DECISIONS}/{split}"))
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)
