"""Store in a folder: temporary file, fsync, link, fsync of the folder.

`link(2)` is the commit: it is atomic, and unlike `rename(2)` it fails when the name is taken. So
there is one winner per name on every POSIX filesystem, without a lock.

Symbolic links inside a store are neither created nor followed, so that a store from an untrusted
source cannot make gradkeep read, change or delete files outside of its folder. The path of the store
itself may contain links.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING

from gradkeep.errors import DamagedError, ReadOnlyError, StoreError, WriteFailedError
from gradkeep.store.backends._backend import QUARANTINE, Backend, Durability, Entry, Readable, flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TEMP = ".tmp-"
_HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"
_OUTSIDE = re.compile(r"/\.{0,2}/|\0")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Syscalls:
    """System calls for writing; subclass to inject faults."""

    def create(self, path: str) -> int:
        """Open a new file for writing; fail if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        """Write the beginning of `data`; return the number of bytes written."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Make a file's bytes survive a power cut."""
        if sys.platform == "darwin":
            import fcntl

            # Plain fsync on macOS stops at the drive's cache.
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Create a hard link; fail if the name is taken."""
        os.link(source, target)

    def rename_no_replace(self, source: str, target: str) -> None:
        """Rename, failing if the target exists: for filesystems without hard links."""
        libc = ctypes.CDLL(None, use_errno=True)
        old, new = os.fsencode(source), os.fsencode(target)
        if sys.platform == "darwin":
            failed = libc.renamex_np(old, new, 4)
        elif hasattr(libc, "renameat2"):
            here = -100  # AT_FDCWD: relative to the current folder
            failed = libc.renameat2(here, old, here, new, 1)
        else:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), target)

    def rename(self, source: str, target: str) -> None:
        """Move a damaged file to the quarantine."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Create one folder."""
        os.mkdir(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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
            written = self._calls.write(fd, view[: 64 << 20])  # Linux writes at most 2 GiB at once
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


class PlainFile(Readable):
    """One opened file."""

    _fd = -1  # until it is open, and after it was closed

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd, status = open_plain(path)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        # Timestamps come in ticks of some milliseconds: a change within the same tick as the last
        # one would go unnoticed, so a file counts as settled only a little later.
        self.settled = time.time() - status.st_mtime > 0.1

    def read(self, offset: int, length: int) -> bytes:
        pieces = []
        while length > 0:
            try:
                piece = os.pread(self._fd, length, offset)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            try:
                count = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if count == 0:
                raise EOFError(offset)
            if count == len(buffer):
                return
            buffer = buffer[count:]
            offset += count

    def map(self, prefetch: Sequence[tuple[int, int]] = ()) -> memoryview:
        if self.size == 0:
            return memoryview(b"")
        # A private mapping: torch can take it without a warning, and a write to it by mistake
        # never reaches the file.
        try:
            mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file was truncated meanwhile
            raise unreadable(self._path, error) from error
        for start, stop in prefetch:
            # Prefetch only ranges that are not in the page cache yet.
            if stop > start and not (self._in_memory(start) and self._in_memory(stop - 1)):
                os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_WILLNEED)
        return memoryview(mapped)

    def _in_memory(self, offset: int) -> bool:
        """Return True if a byte is in the page cache, or if the system cannot tell."""
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        try:
            os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def open_plain(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file; return its descriptor and status. Anything else there is damage."""
    try:
        # O_NONBLOCK: do not wait for the other end of a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except OSError as error:
        if os.path.islink(path):
            raise link_in_place(path) from error
        raise unreadable(path, error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise DamagedError(f"{what} in place of a file", code="store.not_a_file", path=path)
    return fd, status


def link_in_place(path: str) -> DamagedError:
    """Return the error for a link in place of a file or folder."""
    try:
        target = os.readlink(path)
    except OSError:
        target = "?"
    kind = "a link" if os.path.exists(path) else "a broken link"
    return DamagedError(
        f"{kind} in place of a file or folder; links inside a store are not followed",
        code="store.link",
        path=path,
        found=f"a link to {ascii(target)[:200]}",
        fix="Replace it by the file itself (git-annex: `git annex unlock`; DVC: `dvc config "
        "cache.type copy`, then `dvc checkout --relink`), or copy the store with `cp -rL`.",
    )


def unreadable(path: str, error: Exception) -> StoreError:
    """Return the error for a file that the system cannot read."""
    reason = getattr(error, "strerror", None) or str(error)
    return StoreError(
        "the file cannot be read",
        code="store.unreadable",
        path=path,
        found=reason,
        fix="Check the permissions and the disk, then run again.",
    )


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
    most = 256 << 10
    small: list[memoryview] = []
    gathered = 0
    for part in parts:
        view = flat(part)
        if gathered + len(view) > most:
            if small:
                yield memoryview(b"".join(small))
                small, gathered = [], 0
            if len(view) > most:
                yield view
                continue
        small.append(view)
        gathered += len(view)
    if small:
        yield memoryview(b"".join(small))


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
