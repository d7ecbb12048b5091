"""A local cache of what was read from far away: whole values, checked, never more than so many bytes.

Values in a bucket do not change under their name and e-tag, so that a copy on this machine's disk is as
good, if its bytes are. Nothing that a store promises rests on it: a copy that is damaged, missing or
half-written is fetched again, and a disk that is full goes without.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from gradkeep._budgets import parse_bytes
from gradkeep._surroundings import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER, SIZE = "GRADKEEP_CACHE", "GRADKEEP_CACHE_SIZE"
"""The environment says where the cache is (or `off`) and how large it may get."""
_DEFAULT_BYTES = 10 << 30
_DIGEST = 16
"""Bytes of the checksum at the end of each file."""
_SUFFIX = ".value"
_LEFT = 0.9
"""The share of its limit that is left after room was made."""
_FAILURES = 3
"""So many writes that fail end the writing, in this process."""


class ReadCache:
    """A folder of values by name, at most `limit` bytes; the least lately used go first.

    >>> import tempfile
    >>> cache = ReadCache(Path(tempfile.mkdtemp()), 1000)
    >>> bytes(cache.get("one", lambda: b"far away")), bytes(cache.get("one", lambda: b"not asked"))
    (b'far away', b'far away')
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._checked: set[tuple[str, int, int]] = set()
        self._failures = 0
        self._lock = threading.Lock()

    def get(self, name: str, fetch: Callable[[], bytes | bytearray | memoryview]) -> memoryview:
        """The value of that name: from the folder if its bytes are whole, else what `fetch` brings."""
        kept = self.find(name)
        if kept is not None:
            return kept
        value = memoryview(fetch())
        if len(value) + _DIGEST <= self.limit and self._failures < _FAILURES:
            try:
                self._put(name, value)
            except OSError:  # a full disk, a folder that may not be written: go without
                self._failures += 1
                self._make_room(self.limit // 2)
        return value

    def find(self, name: str) -> memoryview | None:
        """The value of that name, mapped, if it is there and whole."""
        path = self.folder / f"{name}{_SUFFIX}"
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= _DIGEST:
                    raise ValueError("cut off")
                mapped = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
                facts = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self._drop(path)
            return None
        value = mapped[: size - _DIGEST]
        seen = (name, facts.st_ino, facts.st_mtime_ns)
        if seen not in self._checked:
            if xxhash.xxh3_128_digest(value) != mapped[size - _DIGEST :]:
                self._drop(path)
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # used now: the last to go
                used = path.stat()
                seen = (name, used.st_ino, used.st_mtime_ns)
            self._checked.add(seen)
        return value

    def _put(self, name: str, value: memoryview) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            try:
                file.write(value)
                file.write(xxhash.xxh3_128_digest(value))
                file.close()
                os.replace(file.name, self.folder / f"{name}{_SUFFIX}")
            except BaseException:
                self._drop(Path(file.name))
                raise
        self._make_room(self.limit)

    def _make_room(self, limit: int) -> None:
        """Remove the least lately used until less than `limit` bytes are there."""
        with self._lock, contextlib.suppress(OSError):
            found = []
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, facts.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            if total <= limit:
                return
            for _, size, path in sorted(found):
                if total <= _LEFT * limit:
                    break
                self._drop(Path(path))
                total -= size

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def cache_of_environment() -> ReadCache | None:
    """The cache that the environment names; by default 10 GiB below the user's cache folder."""
    said = os.environ.get(FOLDER, "")
    if said.lower() in ("off", "0", "no", "none"):
        return None
    folder = Path(said).expanduser() if said else cache_folder() / "values"
    size = os.environ.get(SIZE)
    limit = _DEFAULT_BYTES if not size else parse_bytes(size)
    return ReadCache(folder, limit)
