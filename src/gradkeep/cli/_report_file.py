"""The report of an error of gradkeep itself: where it was and which versions met, but no data."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from gradkeep import __version__
from gradkeep._display import head_and_tail
from gradkeep._surroundings import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KEPT = 20
"""So many reports stay; older ones go."""
_PACKAGES = ("torch", "numpy", "typer", "rich", "safetensors", "duckdb", "pyarrow", "pandas")


def write_report(error: BaseException, command: Sequence[str]) -> str | None:
    """Write the report into the user's cache folder, or else the one for temporary files.

    It holds the command's name without its arguments, versions, and the traceback: files, lines
    and functions. Values of variables, arguments, the environment and rows are not in it; the
    error's own message is, cut to a line. Gives the path, or None if neither folder takes it.
    """
    text = _report(error, command)
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"report-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.txt"
            path.write_text(text, errors="backslashreplace")
            for old in sorted(folder.glob("report-*.txt"))[:-_KEPT]:
                old.unlink(missing_ok=True)
        except OSError:  # a full disk, no permission
            continue
        return str(path)
    return None


def place_of(error: BaseException) -> str:
    """The innermost place in gradkeep that the error passed, as file:line."""
    package = str(Path(__file__).parent.parent)
    place = "an unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(package):
            place = f"{os.path.relpath(file, package)}:{line}"
    return place


def _folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # nobody's home
        yield cache_folder() / "reports"
    yield Path(tempfile.gettempdir()) / "gradkeep-reports"


def _report(error: BaseException, command: Sequence[str]) -> str:
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    lines = [
        f"gradkeep {__version__}",
        f"command: gradkeep {' '.join(command)}",
        f"python {platform.python_version()}, {platform.platform()}",
        ", ".join(versions),
        "",
        *_traceback(error),
    ]
    text = head_and_tail("\n".join(lines))
    home = os.path.expanduser("~")
    return (text.replace(home, "~") if len(home) > 1 else text) + "\n"


def _traceback(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        stack = traceback.extract_tb(one.__traceback__)
        yield "Traceback (most recent call last):"
        yield "".join(stack.format()).rstrip()
        yield f"{type(one).__module__}.{type(one).__name__}: {_message(one)}"
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if one is not None:
            yield "\nbecause of, or while dealing with:\n"


def _message(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:
        return "(its message cannot be shown)"


def _version(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
