"""What a place must offer to hold a store: immutable bytes under names.

The whole safety argument rests on `put_if_absent`: it is the only way bytes enter, it never
overwrites, and it returns only when the bytes are as durable as was asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

Durability = Literal["full", "process"]
"""`full` survives a power cut, `process` only the death of the process."""

QUARANTINE = "quarantine"
"""Where damaged files are moved, inside the store."""


class Entry(NamedTuple):
    """One name in a listing."""

    name: str
    """The last part of the key."""
    size: int
    """Bytes; 0 for a folder."""
    is_folder: bool
    modified: float = 0.0
    """Seconds since the epoch, where the place knows."""


class Readable(ABC):
    """One opened, immutable value."""

    size: int
    identity: tuple[object, ...]
    """Changes when the bytes under the name were replaced; used to verify once per process."""
    settled: bool
    """Whether the value is old enough for `identity` to notice a later change."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)`; fewer at the end."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; raises EOFError when the value is too short."""

    @abstractmethod
    def map(self, soon: Sequence[tuple[int, int]] = ()) -> memoryview:
        """The whole value, without a copy where the place allows it.

        The byte ranges `[start, stop)` in `soon` are about to be read: a place that can read ahead
        does it now.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the handle; maps stay valid."""


class Backend(ABC):
    """A place for a store: a folder, memory, a bucket."""

    location: str
    """How messages name the place."""
    remote = False
    """Whether opening a value takes so long that the next one is worth opening meanwhile."""

    @abstractmethod
    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        """Put the joined `parts` under `key`, atomically and only if the name is free.

        True if this call created it, False if the very same bytes were there already;
        raises `Conflict` if other bytes were, `WriteFailed` if the place refused.
        """

    @abstractmethod
    def open(self, key: str) -> Readable:
        """Open a value; FileNotFoundError if there is none."""

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """The names directly below `prefix`, sorted; empty if there is no such folder."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the name is taken."""

    @abstractmethod
    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        """Remove the names, those already gone included; returns how many were there."""

    @abstractmethod
    def move_aside(self, key: str) -> str:
        """Move a damaged value to the quarantine, so that its name is free again."""

    @abstractmethod
    def leftovers(self, *, older_than: float) -> Sequence[str]:
        """Keys of unfinished writes whose writer is gone, or is older than so many seconds."""

    def ensure_durable(self, keys: Iterable[str]) -> None:
        """Make values that another process may have put survive a power cut, like our own.

        It may have died, or be about to, between the name and its fsync. FileNotFoundError if one
        is gone. Nothing to do in places where a value that can be seen is durable.
        """
        return

    def local_path(self, key: str) -> str | None:
        """The file that holds `key`, for libraries that want a path; None if there is no file."""
        return None

    def describe(self, key: str) -> str:
        """How messages name a key of this place."""
        return f"{self.location}/{key}" if key else self.location

    def free_aside(self, key: str) -> str:
        """A name in the quarantine for a value that is to be moved there."""
        first = f"{QUARANTINE}/{key.replace('/', '__')}"
        aside, number = first, 0
        while self.exists(aside):
            number += 1
            aside = f"{first}.{number}"
        return aside

    def read(self, key: str) -> bytes:
        """The whole value, as bytes."""
        opened = self.open(key)
        try:
            return opened.read(0, opened.size)
        finally:
            opened.close()

    def same_bytes(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Whether the value under `key` is exactly the joined `parts`."""
        opened = self.open(key)
        try:
            if opened.size != sum(len(flat(part)) for part in parts):
                return False
            at = 0
            for part in parts:
                view = flat(part)
                for start in range(0, len(view), _COMPARE_BYTES):
                    piece = view[start : start + _COMPARE_BYTES]
                    if opened.read(at, len(piece)) != piece:
                        return False
                    at += len(piece)
            return True
        finally:
            opened.close()


_COMPARE_BYTES = 1 << 22


def flat(part: Any) -> memoryview:
    """A buffer as plain bytes, without a copy."""
    view = memoryview(part)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
