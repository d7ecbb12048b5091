"""A store in memory: for tests, and for work that need not outlive the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gradkeep.errors import Conflict
from gradkeep.store.backends._backend import Backend, Durability, Entry, Readable, flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
            raise Conflict(
                "the name is taken by other bytes; nothing was overwritten",
                path=self.describe(key),
                expected="the same bytes, or a free name",
            )
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
