"""What happened to memory, event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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

    def ran(self, core: Core, op: Op, *, again: bool) -> None:
        """An operator ran."""
        what: Literal["run", "recompute"] = "recompute" if again else "run"
        self.events.append(Event(core.clock, what, op.name, core.memory))

    def evicted(self, core: Core, storage: Storage) -> None:
        """A storage left memory."""
        name = storage.tensors[0].op.name
        self.events.append(Event(core.clock, "evict", name, core.memory))
