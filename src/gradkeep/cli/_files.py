"""Paths and numbers on the command line, validated before the work begins."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from gradkeep._arguments import short_repr

if TYPE_CHECKING:
    from gradkeep.errors import GradkeepError


_MAX_TEXT_BYTES = 16 << 20


def input_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a readable regular file."""
    status = _stat(path, error=error)
    if status is None:
        raise error("cannot read the file: there is no such file", path=_short(path))
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise error(f"cannot read the file: this is {kind}", path=_short(path))
    if not os.access(path, os.R_OK):
        raise error("cannot read the file: permission denied", path=_short(path))
    return Path(path)


def input_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a readable folder."""
    status = _stat(path, error=error)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise error("there is no such folder", path=_short(path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise error("cannot read the folder: permission denied", path=_short(path))
    return Path(path)


def output_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return a path that a file can be written to."""
    status, parent = _stat(path, error=error), Path(path).parent
    if (status is not None and not stat.S_ISREG(status.st_mode)) or (
        status is None and os.path.islink(path)
    ):
        raise error("cannot write there: this is not a regular file", path=_short(path))
    parent_status = _stat(parent, error=error)
    if parent_status is None or not stat.S_ISDIR(parent_status.st_mode):
        raise error("cannot write there: there is no such folder", path=_short(parent))
    if not os.access(parent if status is None else path, os.W_OK):
        raise error("cannot write there: permission denied", path=_short(path))
    return Path(path)


def output_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """Return the path of a folder that exists or can be created."""
    status = _stat(path, error=error)
    existing = Path(os.path.abspath(path))
    while status is None and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
        status = _stat(existing, error=error)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise error("cannot write there: this is not a folder", path=_short(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise error("cannot write there: permission denied", path=_short(existing))
    return Path(path)


def input_text(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> str:
    """Read a UTF-8 text file of at most 16 MiB."""
    with open(input_file(path, error=error), "rb") as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        limit = f"at most {_MAX_TEXT_BYTES >> 20} MiB"
        raise error("the file is too large", path=_short(path), expected=limit)
    try:
        text = content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"the file is not UTF-8 text: {problem}", path=_short(path)) from None
    if "\0" in text:
        raise error("the file is not UTF-8 text: it contains NUL", path=_short(path))
    return text


def _stat(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> os.stat_result | None:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise error("invalid path", found=short_repr(text))
    try:
        return os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:  # a name too long, links in a circle, no permission
        reason = problem.strerror or type(problem).__name__
        raise error(f"cannot access the path: {reason}", path=_short(path)) from None


def _short(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-100:]}"
