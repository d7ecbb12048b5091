"""Append-only log of decisions about rows, one small file each.

A decision is a document of its own, put under the next free number of its split. Two concurrent
decisions are both kept, in one order, and a killed process loses nothing that was acknowledged. An
undo is a further decision that names the one it cancels; nothing is removed from the log.
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
    malformed_document,
    parse_record,
    read_bytes,
    to_bytes,
)
from gradkeep.store._keys import DECISIONS, validate_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradkeep.store.backends._backend import Backend, Durability


@dataclass(frozen=True, slots=True)
class Decision:
    """Record a person's decision about the label of one row.

    Attributes:
        split: Split of the row.
        row: Id of the row.
        action: `accept` (the label is right), `relabel` (the label is wrong and should be `label`, if
            known) or `undo` (cancel the decision with the number `of`).
        label: The right label.
        before: Label at the time of the decision.
        of: Number of the decision that an undo cancels.
        number: Position in the log of its split; assigned when the decision is recorded.
        time: Time of recording, in seconds since the epoch.
    """

    split: str
    row: int
    action: Literal["accept", "relabel", "undo"]
    label: int | None = None
    before: int | None = None
    of: int | None = None
    number: int = -1
    time: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, StoreError)
        validate_name("split", self.split)
        wholes = (self.row, self.label, self.before, self.of)
        if any(whole is not None and not -(2**63) <= whole < 2**63 for whole in wholes):
            raise StoreError(
                "a number of a decision is too large",
                code="store.invalid_decision",
                expected="a signed 64-bit integer",
            )
        if (self.action == "undo") != (self.of is not None):
            raise StoreError(
                "`of` must be set for action 'undo' and for no other", code="store.invalid_decision"
            )


def append_decision(backend: Backend, decision: Decision, *, durability: Durability) -> Decision:
    """Append a decision to the log of its split; return it with its number and time."""
    number = _next_number(backend, decision.split)
    while True:
        numbered = dataclasses.replace(decision, number=number, time=time.time())
        fields = {**dataclasses.asdict(numbered), "token": secrets.token_hex(8)}
        try:
            backend.put_if_absent(
                decision_key(numbered.split, number),
                [to_bytes(fields)],
                durability=durability,
            )
        except ConflictError:  # another process took this number
            number += 1
            continue
        return numbered


def read_decisions(backend: Backend, split: str, *, start: int = 0) -> list[Decision]:
    """Read the decisions about a split in order, from `start` on; a gap is damage."""
    count = _next_number(backend, validate_name("split", split))
    decisions = []
    for number in range(start, count):
        key = decision_key(split, number)
        try:
            decisions.append(read_decision(backend, key))
        except FileNotFoundError:
            raise DamagedError(
                "a decision is missing, but later ones exist",
                code="store.missing_decision",
                path=backend.describe(key),
            ) from None
    return decisions


def read_decision(backend: Backend, key: str) -> Decision:
    """Read one decision."""
    path = backend.describe(key)
    fields = from_bytes(read_bytes(backend, key, most=SMALL_DOCUMENT), path=path)
    if not isinstance(fields.pop("token", None), str):  # makes equal decisions differ
        raise malformed_document(path, "no token")
    return parse_record(Decision, fields, path=path)


def current_decisions(decisions: Iterable[Decision]) -> dict[int, Decision]:
    """Return the last decision about each row that was not undone, by row id.

    >>> log = [Decision("train", 7, "accept", number=0), Decision("train", 7, "undo", of=0, number=1)]
    >>> current_decisions(log[:1])[7].action, current_decisions(log)
    ('accept', {})
    """
    stacks: dict[int, list[Decision]] = {}
    for decision in decisions:
        stack = stacks.setdefault(decision.row, [])
        if decision.action == "undo":
            stack[:] = [other for other in stack if other.number != decision.of]
        else:
            stack.append(decision)
    return {row: stack[-1] for row, stack in stacks.items() if stack}


def decision_key(split: str, number: int) -> str:
    return f"{DECISIONS}/{split}/{number:06d}.json"


def _next_number(backend: Backend, split: str) -> int:
    names = (entry.name.removesuffix(".json") for entry in backend.list(f"{DECISIONS}/{split}"))
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)
