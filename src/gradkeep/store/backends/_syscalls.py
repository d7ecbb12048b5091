"""The few system calls through which a folder-backed store changes.

They stand behind one small class so that tests can kill the process, fail, or lose power at each
of them; nothing else in the package writes to a store's folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_NO_REPLACE = 1  # RENAME_NOREPLACE of renameat2(2)
_EXCLUSIVE = 4  # RENAME_EXCL of renamex_np(2) on macOS
_AT_FDCWD = -100


class Syscalls:
    """Real calls; subclass to inject faults."""

    def create(self, path: str) -> int:
        """Open a new file for writing; fails if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes were taken."""
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
        """Give the file a second name; fails if that name is taken."""
        os.link(source, target)

    def rename_no_replace(self, source: str, target: str) -> None:
        """Rename, failing if the target exists: for places without hard links."""
        libc = ctypes.CDLL(None, use_errno=True)
        old, new = os.fsencode(source), os.fsencode(target)
        if sys.platform == "darwin":
            failed = libc.renamex_np(old, new, _EXCLUSIVE)
        elif hasattr(libc, "renameat2"):
            failed = libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NO_REPLACE)
        else:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), target)

    def rename(self, source: str, target: str) -> None:
        """Move a file; used only to move damaged files aside."""
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
