"""What happened to memory, event by event."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import os

    from gradkeep.remat._core import Core, Storage
    from gradkeep.remat._program import Op


@dataclass(frozen=True, slots=True)
class Event:
    """One operator that ran or one storage that was evicted."""

    clock: int
    what: Literal["run", "recompute", "evict"]
    name: str
    memory: int
    """Bytes in memory after the event."""


@dataclass(slots=True)
class Timeline:
    """Collects events while a core runs."""

    events: list[Event] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> None:
        """The events as CSV, one line each, for a picture of bytes over time."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([part.name for part in dataclasses.fields(Event)])
            writer.writerows(dataclasses.astuple(event) for event in self.events)

    def ran(self, core: Core, op: Op, *, again: bool) -> None:
        """An operator ran."""
        what: Literal["run", "recompute"] = "recompute" if again else "run"
        self.events.append(Event(core.clock, what, op.name, core.memory))

    def evicted(self, core: Core, storage: Storage) -> None:
        """A storage left memory."""
        name = storage.tensors[0].op.name
        self.events.append(Event(core.clock, "evict", name, core.memory))
