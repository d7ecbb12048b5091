"""Open regular files without following links or waiting for pipes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import time
from typing import TYPE_CHECKING

from gradkeep.errors import DamagedError, StoreError
from gradkeep.store.backends._backend import Readable

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        raise DamagedError(
            f"{what} in place of a file",
            code="store.not_a_file",
            path=path,
            fix="Move it aside with `gradkeep verify STORE --repair`, then run the work again.",
        )
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


_AT_FDCWD = -100


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
            failed = libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, 1)
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
