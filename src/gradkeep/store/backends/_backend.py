"""What a place must offer to hold a store: immutable bytes under names.

The whole safety argument rests on `put_if_absent`: it is the only way bytes enter, it never
overwrites, and it returns only when the bytes are as durable as was asked.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradkeep.errors import ConflictError

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
        raises `ConflictError` if other bytes were, `WriteFailedError` if the place refused.
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

    def conflict(self, key: str) -> ConflictError:
        """The error for a name that is taken by other bytes."""
        return ConflictError(
            "the name is taken by other bytes; nothing was overwritten",
            path=self.describe(key),
            fix="check that both writers use the same model, data and options; "
            "`gradkeep verify` tells if the value is damaged",
        )

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
        with contextlib.closing(self.open(key)) as opened:
            return opened.read(0, opened.size)

    def same_bytes(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Whether the value under `key` is exactly the joined `parts`."""
        with contextlib.closing(self.open(key)) as opened:
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


_COMPARE_BYTES = 1 << 22


def flat(part: Any) -> memoryview:
    """A buffer as plain bytes, without a copy."""
    view = memoryview(part)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Memory(Backend):
    """Values in a dictionary; safe for threads, gone with the process."""

    def __init__(self) -> None:
        self.location = "memory:"
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        value = b"".join(flat(part) for part in parts)
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                return True
            present = self._values[key]
        if present != value:
            raise self.conflict(key)
        return False

    def open(self, key: str) -> Readable:
        try:
            return InMemory(self._values[key])
        except KeyError:
            raise FileNotFoundError(key) from None

    def list(self, prefix: str) -> list[Entry]:
        start = f"{prefix}/" if prefix else ""
        found: dict[str, Entry] = {}
        with self._lock:
            items = list(self._values.items())
        for key, value in items:
            if key.startswith(start):
                name, slash, _ = key[len(start) :].partition("/")
                size = 0 if slash else len(value)
                found[name] = Entry(name, size, is_folder=bool(slash))
        return sorted(found.values(), key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        return key in self._values

    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        with self._lock:
            return sum(self._values.pop(key, None) is not None for key in list(keys))

    def move_aside(self, key: str) -> str:
        aside = self.free_aside(key)
        with self._lock:
            self._values[aside] = self._values.pop(key)
        return aside

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        return ()


class InMemory(Readable):
    """A value that is a bytes object."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.size = len(value)
        self.identity = (id(value), len(value))
        # An address can be used again by other bytes: never trust it beyond this handle.
        self.settled = False

    def read(self, offset: int, length: int) -> bytes:
        return self._value[offset : offset + length]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        piece = self._value[offset : offset + len(buffer)]
        if len(piece) != len(buffer):
            raise EOFError(offset)
        buffer[:] = piece

    def map(self, soon: Sequence[tuple[int, int]] = ()) -> memoryview:
        return memoryview(self._value)

    def close(self) -> None:
        """Nothing to let go of."""
