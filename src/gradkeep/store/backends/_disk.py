"""Store in a folder: temporary file, fsync, link, fsync of the folder.

`link(2)` is the commit: it is atomic, and unlike `rename(2)` it fails when the name is taken. So
there is one winner per name on every POSIX filesystem, without a lock.

Symbolic links inside a store are neither created nor followed, so that a store from an untrusted
source cannot make gradkeep read, change or delete files outside of its folder. The path of the store
itself may contain links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import time
from typing import TYPE_CHECKING

from gradkeep.errors import DamagedError, ReadOnlyError, StoreError, WriteFailedError
from gradkeep.store.backends._backend import QUARANTINE, Backend, Durability, Entry, Readable, flat
from gradkeep.store.backends._plain_file import (
    PlainFile,
    Syscalls,
    link_in_place,
    open_plain,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TEMP = ".tmp-"
_HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"
_ONE_WRITE = 1 << 26
_OUTSIDE = re.compile(r"/\.{0,2}/|\0")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalDisk(Backend):
    """Folder on a local or shared POSIX filesystem.

    Args:
        path: The folder.
        syscalls: System calls for writing; tests inject faults here.
    """

    def __init__(self, path: str | os.PathLike[str], *, syscalls: Syscalls | None = None) -> None:
        self.root = os.path.abspath(os.fspath(path))
        self.location = os.fspath(path)
        self._calls = Syscalls() if syscalls is None else syscalls
        self._known_folders: set[str] = set()
        self._checked_at: dict[str, float] = {}

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        target = self._inside(key)
        try:
            if os.path.lexists(target):
                return self._accept_existing(key, parts, durability=durability)
            folder = os.path.dirname(target)
            self._ensure_folder(folder, durability=durability)
            created = self._write_and_link(folder, target, parts, durability=durability)
            if not created:
                return self._accept_existing(key, parts, durability=durability)
            if durability == "full":
                self._calls.sync_folder(folder)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise self._refusal(error, key) from error
        return True

    def _write_and_link(
        self,
        folder: str,
        target: str,
        parts: Sequence[bytes | memoryview],
        *,
        durability: Durability,
    ) -> bool:
        name = f"{_TEMP}{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"
        temp = os.path.join(folder, name)
        fd = self._calls.create(temp)
        try:
            try:
                for view in _few_buffers(parts):
                    self._write_all(fd, view)
                if durability == "full":
                    self._calls.sync(fd)
            finally:
                self._calls.close(fd)
            return self._commit(temp, target)
        finally:
            # After link the temporary name is a second name of the committed file. If unlink fails
            # too, `gc` removes it; the first error is the one that is raised.
            with contextlib.suppress(FileNotFoundError):
                self._calls.unlink(temp)

    def _write_all(self, fd: int, view: memoryview) -> None:
        while view:
            written = self._calls.write(fd, view[:_ONE_WRITE])
            view = view[written:]

    def _commit(self, temp: str, target: str) -> bool:
        try:
            self._calls.link(temp, target)
        except FileExistsError:
            # Over NFS the reply to a successful link can be lost; the retry then fails with "exists".
            return os.stat(temp).st_nlink == 2 and _same_file(temp, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._commit_without_links(temp, target)
        return True

    def _commit_without_links(self, temp: str, target: str) -> bool:
        try:
            self._calls.rename_no_replace(temp, target)
        except FileExistsError:
            return False
        except OSError as error:
            raise WriteFailedError(
                "the filesystem supports neither hard links nor rename without replacing",
                code="store.no_atomic_create",
                path=target,
                found=os.strerror(error.errno or 0),
                fix="Put the store on another filesystem and copy it here afterwards.",
            ) from error
        return True

    def _accept_existing(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        try:
            if not self.same_bytes(key, parts):
                raise self.conflict(key)
            if durability == "full":
                # The other writer may not have reached its own fsync yet.
                self._make_durable([key])
        except FileNotFoundError:
            # Deleted meanwhile, as leases and packed rows are: the name is free.
            return self.put_if_absent(key, parts, durability=durability)
        return False

    def ensure_durable(self, keys: Iterable[str]) -> None:
        try:
            self._make_durable(list(keys))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refusal(error, "") from error

    def _make_durable(self, keys: Sequence[str]) -> None:
        folders = sorted({os.path.dirname(self._inside(key)) for key in keys})
        for folder in folders:
            self._ensure_folder(folder, durability="full")
        for key in keys:
            fd, _ = open_plain(self._path(key))
            try:
                self._calls.sync(fd)
            finally:
                self._calls.close(fd)
        for folder in folders:
            self._calls.sync_folder(folder)

    def _ensure_folder(self, folder: str, *, durability: Durability) -> None:
        """Create the folder and make the whole chain of names up to the root durable once."""
        if folder in self._known_folders or (durability == "process" and os.path.isdir(folder)):
            return
        parent = os.path.dirname(folder)
        if folder != self.root:
            self._ensure_folder(parent, durability=durability)
        elif not os.path.isdir(parent):
            self._ensure_outer(parent)
        try:
            self._calls.make_folder(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        if durability == "full":
            # Also if it existed: the process that created it may have died before this call.
            try:
                self._calls.sync_folder(parent)
            except PermissionError:
                if folder != self.root:
                    raise
            self._known_folders.add(folder)

    def _ensure_outer(self, folder: str) -> None:
        if not os.path.isdir(folder):
            self._ensure_outer(os.path.dirname(folder))
            try:
                self._calls.make_folder(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise
            self._calls.sync_folder(os.path.dirname(folder))

    def open(self, key: str) -> Readable:
        # Thousands of rows are read from one folder: check it for links at most every 50 ms. Writes
        # and deletions check each time.
        folder, now = key.rpartition("/")[0], time.monotonic()
        if now - self._checked_at.get(folder, -1.0) > 0.05:
            self._inside(key)
            self._checked_at = {folder: now}
        return PlainFile(self._path(key))

    def list(self, prefix: str) -> list[Entry]:
        path = self._inside(f"{prefix}/any") if prefix else f"{self.root}/any"
        try:
            with os.scandir(os.path.dirname(path)) as items:
                return sorted(_entries(items), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(os.path.dirname(path), error) from error

    def exists(self, key: str) -> bool:
        return os.path.lexists(self._inside(key))

    def delete(self, keys: Iterable[str], *, durability: Durability) -> int:
        folders: set[str] = set()
        removed = 0
        for key in keys:
            path = self._path(key)
            folder = os.path.dirname(path)
            if folder not in folders:
                self._inside(key)
                folders.add(folder)
            try:
                self._calls.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._refusal(error, key) from error
            removed += 1
        if durability == "full":
            # Also for names that did not exist: their remover may have died before this call.
            for folder in filter(os.path.isdir, sorted(folders)):
                try:
                    self._calls.sync_folder(folder)
                except OSError as error:
                    raise self._refusal(error, folder) from error
        return removed

    def move_aside(self, key: str) -> str:
        target = self.free_aside(key)
        self._inside(key)
        try:
            self._ensure_folder(self._path(QUARANTINE), durability="full")
            self._calls.rename(self._path(key), self._path(target))
            # The new name first: a power cut may leave two names, but never none.
            self._calls.sync_folder(self._path(QUARANTINE))
            self._calls.sync_folder(os.path.dirname(self._path(key)))
        except OSError as error:
            raise self._refusal(error, key) from error
        return target

    def leftovers(self, *, older_than: float) -> Sequence[str]:
        now = time.time()
        keys = []
        for folder, _, names in os.walk(self.root):
            for name in names:
                if not name.startswith(_TEMP):
                    continue
                path = os.path.join(folder, name)
                try:
                    age = now - os.lstat(path).st_mtime
                except FileNotFoundError:
                    continue
                if age >= older_than or _writer_is_gone(name):
                    keys.append(os.path.relpath(path, self.root))
        return sorted(keys)

    def local_path(self, key: str) -> str | None:
        return self._path(key)

    def _path(self, key: str) -> str:
        if not key:
            return self.root
        if _OUTSIDE.search(f"/{key}/"):
            raise DamagedError(
                "a name points outside of the store",
                code="store.outside",
                path=self.location,
                found=ascii(key)[:200],
                fix="Check the source of this store: gradkeep writes no such names.",
            )
        return f"{self.root}/{key}"

    def _inside(self, key: str) -> str:
        """Return the path of a key after checking that no folder on the way to it is a link."""
        path = self._path(key)
        at = key.find("/")
        while at >= 0:
            folder = f"{self.root}/{key[:at]}"
            try:
                if stat.S_ISLNK(os.lstat(folder).st_mode):
                    raise link_in_place(folder)
            except (FileNotFoundError, NotADirectoryError):
                break  # nothing exists below it either
            except OSError as error:
                raise unreadable(folder, error) from error
            at = key.find("/", at + 1)
        return path

    def _refusal(self, error: OSError, key: str) -> WriteFailedError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kind, code, message = WriteFailedError, None, "the write failed and was undone"
        fix = "Check the disk, then run again: the work resumes."
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            kind, message = ReadOnlyError, "the store is not writable"
            fix = "Check the permissions, or copy the store to a writable place."
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            code, message = "store.disk_full", "the disk is full; the write was undone"
            fix = (
                "Free some space (`gradkeep gc` removes unneeded versions) and run again: "
                "the work resumes after the last acknowledged rows."
            )
        return kind(message, code=code, path=self.describe(key), found=reason, fix=fix)


def _entries(items: Iterator[os.DirEntry[str]]) -> Iterator[Entry]:
    for item in items:
        if item.name.startswith(_TEMP):
            continue
        # A link is listed as a file, whatever its target; opening it raises the error.
        if item.is_dir(follow_symlinks=False):
            yield Entry(item.name, 0, is_folder=True)
            continue
        try:
            status = item.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # deleted since the listing began
        yield Entry(item.name, status.st_size, False, status.st_mtime)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False  # removed meanwhile


def _few_buffers(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """Join small neighbors, so that a small file is one write and a large buffer is not copied."""
    small: list[memoryview] = []
    gathered = 0
    for part in parts:
        view = flat(part)
        if gathered + len(view) > _SMALL_BYTES:
            if small:
                yield memoryview(b"".join(small))
                small, gathered = [], 0
            if len(view) > _SMALL_BYTES:
                yield view
                continue
        small.append(view)
        gathered += len(view)
    if small:
        yield memoryview(b"".join(small))


_SMALL_BYTES = 1 << 18


def _writer_is_gone(name: str) -> bool:
    host, _, rest = name.removeprefix(_TEMP).rpartition("-")[0].rpartition("-")
    if host != _HOST or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
