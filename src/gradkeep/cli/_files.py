"""Paths that the user names: files and folders that can be read or written."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gradkeep._arguments import shown

if TYPE_CHECKING:
    from gradkeep.errors import GradkeepError


LARGEST = 2**31 - 1
"""The largest count that a command takes: of rows to show, tries to make, models to train."""
MOST_WORKERS = 1024
"""More processes than this on one machine are a slip of the finger."""
LONGEST = 10 * 365 * 86400.0
"""Seconds: what is meant to take longer needs no limit."""
_LARGEST_TEXT = 16 << 20


def finite(value: float | None) -> float | None:
    """Refuse NaN and infinity, which every comparison with a range lets pass.

    >>> finite(0.5)
    0.5
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def input_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """A path that can be read as a file: no folder, no pipe, no device, and permitted."""
    facts = _facts(path, error=error)
    if facts is None:
        raise error("the file cannot be read: there is no such file", path=_named(path))
    if stat.S_ISDIR(facts.st_mode):
        raise error("the file cannot be read: this is a folder", path=_named(path))
    if not stat.S_ISREG(facts.st_mode):
        raise error("the file cannot be read: this is a pipe or a device", path=_named(path))
    if not os.access(path, os.R_OK):
        raise error("the file cannot be read: permission denied", path=_named(path))
    return Path(path)


def input_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """A path that is a folder which may be looked into."""
    facts = _facts(path, error=error)
    if facts is None:
        raise error("there is no such folder", path=_named(path))
    if not stat.S_ISDIR(facts.st_mode):
        raise error("this is no folder", path=_named(path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise error("the folder cannot be read: permission denied", path=_named(path))
    return Path(path)


def output_file(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """A path that a file can be written to, seen before the work begins and not after it."""
    facts = _facts(path, error=error)
    if facts is not None and not stat.S_ISREG(facts.st_mode):
        kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "a pipe or a device"
        raise error(f"nothing can be written there: this is {kind}", path=_named(path))
    if facts is None and os.path.islink(path):
        raise error("nothing can be written there: this is a link to nowhere", path=_named(path))
    parent = Path(path).parent
    above = _facts(parent, error=error)
    if above is None or not stat.S_ISDIR(above.st_mode):
        raise error("nothing can be written there: there is no such folder", path=_named(parent))
    if not os.access(parent if facts is None else path, os.W_OK):
        raise error("nothing can be written there: permission denied", path=_named(path))
    return Path(path)


def output_folder(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> Path:
    """A path that is a folder, or where one can be made."""
    facts = _facts(path, error=error)
    if facts is None and os.path.islink(path):
        raise error("nothing can be written there: this is a link to nowhere", path=_named(path))
    above = Path(os.path.abspath(path))
    while facts is None and above != above.parent:
        above = above.parent
        facts = _facts(above, error=error)
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        raise error("nothing can be written there: this is no folder", path=_named(above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise error("nothing can be written there: permission denied", path=_named(above))
    return Path(path)


def input_text(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> str:
    """The text in a file that is meant for people: UTF-8, and no larger than one can be."""
    file = input_file(path, error=error)
    with open(file, "rb") as opened:
        content = opened.read(_LARGEST_TEXT + 1)
    if len(content) > _LARGEST_TEXT:
        expected = f"at most {_LARGEST_TEXT >> 20} MiB"
        raise error("the file is too large to be this", path=_named(path), expected=expected)
    try:
        text = content.decode()
    except UnicodeDecodeError as problem:
        raise error(
            "the file is not text", path=_named(path), found=str(problem), expected="UTF-8"
        ) from None
    if "\0" in text:
        raise error("the file is not text", path=_named(path), found="a NUL", expected="UTF-8")
    return text


def _facts(path: str | os.PathLike[str], *, error: type[GradkeepError]) -> os.stat_result | None:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise error("this is no path", found=shown(text))
    try:
        return os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:  # a name too long, links in a circle, no permission
        said = problem.strerror or type(problem).__name__
        raise error(f"the path cannot be followed: {said}", path=_named(path)) from None


def _named(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-100:]}"
