"""Interface of a place that can hold a store: immutable bytes under names.

Safety rests on `put_if_absent`: it is the only way to write, it never overwrites, and it returns only
when the bytes are as durable as requested.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from gradkeep.errors import ConflictError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

Durability = Literal["full", "process"]
"""`full` survives a power cut, `process` only the death of the process."""

QUARANTINE = "quarantine"
"""Folder of the store to which damaged files are moved."""


class Entry(NamedTuple):
    """One name in a listing.

    Attributes:
        name: Last part of the key.
        size: Bytes; 0 for a folder.
        is_folder: True for a folder.
        modified: Seconds since the epoch; 0 if unknown.
    """

    name: str
    size: int
    is_folder: bool
    modified: float = 0.0


class Readable(ABC):
    """One opened, immutable value.

    Attributes:
        size: Bytes of the value.
        identity: Changes when the bytes under the name are replaced; used to verify once per process.
        settled: True if the value is old enough for `identity` to detect a later change.
    """

    size: int
    identity: tuple[object, ...]
    settled: bool

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Read bytes `[offset, offset + length)`; fewer at the end.

        Args:
            offset: First byte.
            length: Number of bytes.

        Returns:
            The bytes.
        """

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from `offset` on.

        Args:
            buffer: Memory to fill.
            offset: First byte.

        Raises:
            EOFError: The value is too short.
        """

    @abstractmethod
    def map(self, prefetch: Sequence[tuple[int, int]] = ()) -> memoryview:
        """Return the whole value, without a copy if possible.

        Args:
            prefetch: Byte ranges `[start, stop)` that will be read next; a backend that can read ahead does
                so now.

        Returns:
            The bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the handle; maps stay valid."""


class Backend(ABC):
    """Place that can hold a store: a folder, memory, a bucket.

    Subclass it to support another place, and register the subclass with `register_backend`.

    Attributes:
        location: Name of the place in messages.
        remote: True if opening a value is slow enough to open the next one in the background.
    """

    location: str
    remote = False

    @abstractmethod
    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        """Write the joined `parts` under `key`, atomically, and only if the name is free.

        Args:
            key: Name of the value.
            parts: Buffers whose concatenation is the value.
            durability: What the value must survive when this returns.

        Returns:
            True if this call created the value, False if the same bytes were there already.

        Raises:
            ConflictError: The name has other bytes.
            WriteFailedError: The bytes could not be written.
        """

    @abstractmethod
    def open(self, key: str) -> Readable:
        """Open a value.

        Args:
            key: Name of the value.

        Returns:
            A handle; the caller closes it.

        Raises:
            FileNotFoundError: There is no such value.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """List the names directly below a prefix.

        Args:
            prefix: A folder; "" is the root.

        Returns:
            Sorted entries; empty if there is no such folder.
        """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Return True if the name is taken.

        Args:
            key: Name of a value.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        """Delete values; names that do not exist are ignored.

        Args:
            keys: Names of the values.
            durability: What the deletion must survive when this returns.

        Returns:
            Number of values that existed.
        """

    @abstractmethod
    def move_aside(self, key: str) -> str:
        """Move a damaged value to the quarantine, which frees its name.

        Args:
            key: Name of the value.

        Returns:
            Its name in the quarantine.
        """

    @abstractmethod
    def leftovers(self, *, older_than: float) -> Sequence[str]:
        """List unfinished writes of processes that ended, or that are older than a limit.

        Args:
            older_than: Age in seconds.

        Returns:
            Keys of the unfinished writes.
        """

    def ensure_durable(self, keys: Iterable[str]) -> None:
        """Make values that another process may have written survive a power cut.

        That process may have died between writing a name and its fsync. Does nothing in places where every
        visible value is durable.

        Args:
            keys: Names of the values.

        Raises:
            FileNotFoundError: A value does not exist.
        """
        return

    def local_path(self, key: str) -> str | None:
        """Return the file that holds a value, for libraries that need a path.

        Args:
            key: Name of the value.

        Returns:
            The path, or None if the value is not in a file.
        """
        return None

    def describe(self, key: str) -> str:
        """Return the name of a key in messages.

        Args:
            key: Name of a value; "" is the whole place.
        """
        return f"{self.location}/{key}" if key else self.location

    def conflict(self, key: str) -> ConflictError:
        """Return the error for a name that is taken by other bytes.

        Args:
            key: Name of the value.
        """
        return ConflictError(
            "the name is taken by other bytes, which were not overwritten",
            path=self.describe(key),
            fix="Check that both writers use the same model, data and options; "
            "`gradkeep verify` finds out if the value is damaged.",
        )

    def free_aside(self, key: str) -> str:
        """Return a free name in the quarantine.

        Args:
            key: Name of the value that will be moved there.
        """
        first = f"{QUARANTINE}/{key.replace('/', '__')}"
        candidate, number = first, 0
        while self.exists(candidate):
            number += 1
            candidate = f"{first}.{number}"
        return candidate

    def read(self, key: str) -> bytes:
        """Read a whole value.

        Args:
            key: Name of the value.

        Returns:
            Its bytes.

        Raises:
            FileNotFoundError: There is no such value.
        """
        with contextlib.closing(self.open(key)) as opened:
            return opened.read(0, opened.size)

    def same_bytes(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Return True if a value equals the joined `parts`.

        Args:
            key: Name of the value.
            parts: Buffers to compare with.

        Raises:
            FileNotFoundError: There is no such value.
        """
        with contextlib.closing(self.open(key)) as opened:
            if opened.size != sum(len(flat(part)) for part in parts):
                return False
            at = 0
            for part in parts:
                view = flat(part)
                for start in range(0, len(view), 4 << 20):
                    piece = view[start : start + (4 << 20)]
                    if opened.read(at, len(piece)) != piece:
                        return False
                    at += len(piece)
            return True


def flat(part: Any) -> memoryview:
    """Return a buffer as plain bytes, without a copy."""
    view = memoryview(part)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Memory(Backend):
    """Values in a dictionary; thread-safe, lost when the process ends."""

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
        entries: dict[str, Entry] = {}
        with self._lock:
            items = list(self._values.items())
        for key, value in items:
            if key.startswith(start):
                name, slash, _ = key[len(start) :].partition("/")
                size = 0 if slash else len(value)
                entries[name] = Entry(name, size, is_folder=bool(slash))
        return sorted(entries.values(), key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        return key in self._values

    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        with self._lock:
            return sum(self._values.pop(key, None) is not None for key in list(keys))

    def move_aside(self, key: str) -> str:
        target = self.free_aside(key)
        with self._lock:
            self._values[target] = self._values.pop(key)
        return target

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        return ()


class InMemory(Readable):
    """A value that is a bytes object."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.size = len(value)
        self.identity = (id(value), len(value))
        # Other bytes can get the same address later: trust it only for this handle.
        self.settled = False

    def read(self, offset: int, length: int) -> bytes:
        return self._value[offset : offset + length]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        piece = self._value[offset : offset + len(buffer)]
        if len(piece) != len(buffer):
            raise EOFError(offset)
        buffer[:] = piece

    def map(self, prefetch: Sequence[tuple[int, int]] = ()) -> memoryview:
        return memoryview(self._value)

    def close(self) -> None:
        """Do nothing: there is no handle to close."""


ENTRY_POINTS = "gradkeep.backends"
"""Group of entry points in which installed packages register schemes."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def folder_of_url(url: str) -> Backend:
    """Return the folder of a `file://` URL, like any other folder: links in it are not followed.

    >>> folder_of_url("file:///data/my%20runs").root
    '/data/my runs'
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.strip("/") or "\0" in path:
        raise StoreError(
            "the URL does not name a folder",
            code="store.invalid_url",
            path=url,
            fix="Write file:///path/to/folder, with three slashes, or the plain path.",
        )
    return _open_folder(path)


def _open_folder(path: str) -> Backend:
    from gradkeep.store.backends._disk import LocalDisk

    return LocalDisk(path)


def _open_bucket(url: str) -> Backend:
    from gradkeep.store.backends._bucket import Bucket

    return Bucket(url)


BUCKETS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "memory")
_factories: dict[str, Callable[[str], Backend]] = dict.fromkeys(BUCKETS, _open_bucket)
_factories["file"] = folder_of_url


def register_backend(scheme: str, factory: Callable[[str], Backend]) -> None:
    """Make `gk.open("scheme://...")` and every command use `factory(url)`.

    Registering the same factory again does nothing. To make a scheme known to commands, an installed
    package declares the factory as an entry point named after the scheme in the group
    `gradkeep.backends`; it is loaded when such a URL is opened.

    Args:
        scheme: Scheme of the URL, without `://`.
        factory: Function that takes the URL and returns a `Backend`.

    Raises:
        StoreError: The scheme is invalid or has another factory.

    Example:
        >>> import gradkeep as gk
        >>> backends = {"memo://a": gk.store.Memory()}
        >>> gk.store.register_backend("memo", backends.__getitem__)
        >>> gk.open("memo://a").uuid == gk.open("memo://a", create=False).uuid
        True
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
        raise StoreError(
            "invalid URL scheme",
            code="store.invalid_scheme",
            found=repr(scheme),
            expected="lowercase letters, digits, + . or -, starting with a letter, without ://",
        )
    if not callable(factory):
        raise StoreError(
            f"the factory for {scheme}:// is not callable",
            code="store.invalid_factory",
            found=repr(factory),
            expected="a function that returns a Backend",
        )
    known = _factories.get(scheme)
    if known is not None and known != factory:
        raise StoreError(
            f"the scheme {scheme}:// is already registered",
            code="store.scheme_taken",
            found=_name(known),
            fix="Use another scheme, or pass the backend itself to gk.open.",
        )
    _factories[scheme] = factory


def backend_for(path: str | os.PathLike[str] | Backend) -> Backend:
    """Return the backend for a path or URL; a backend is returned unchanged."""
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return _open_folder(text)
    backend = _factory(scheme, text)(text)
    if not isinstance(backend, Backend):
        raise StoreError(
            f"the factory for {scheme}:// did not return a gradkeep.store.Backend",
            code="store.not_a_backend",
            path=text,
            found=type(backend).__name__,
        )
    return backend


def _factory(scheme: str, url: str) -> Callable[[str], Backend]:
    if scheme not in _factories:
        from importlib.metadata import entry_points  # slow to import, seldom needed

        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            register_backend(scheme, point.load())
    if scheme not in _factories:
        raise StoreError(
            f"no backend is registered for {scheme}://",
            code="store.unknown_scheme",
            path=url,
            expected=", ".join(f"{name}://" for name in sorted(_factories)) + " or a folder",
            fix=f'Call gk.store.register_backend("{scheme}", factory); for commands, declare an entry '
            f"point {scheme!r} in the group {ENTRY_POINTS!r}.",
        )
    return _factories[scheme]


def _name(factory: Callable[[str], Backend]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"
