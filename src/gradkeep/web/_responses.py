"""Response bodies: answers and errors as JSON, and the static files of the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from gradkeep._display import to_json_types

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from gradkeep.errors import GradkeepError

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def to_json(answer: Any) -> bytes:
    """Encode an answer as JSON; NaN and infinity become null."""
    text = json.dumps(
        to_json_types(answer), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.encode(errors="replace")  # file names may hold lone surrogates


def problem(kind: str, what: str, **details: str | None) -> dict[str, Any]:
    """Describe why there is no answer, as the page shows it."""
    parts = {"kind": kind, "what": what, "path": None, "found": None, "expected": None, "fix": None}
    return parts | details


def error_problem(error: GradkeepError) -> dict[str, Any]:
    """Describe an error of gradkeep."""
    return problem(
        type(error).__name__,
        error.message,
        path=error.path,
        found=None if error.found is None else str(error.found).strip()[:2000],
        expected=None if error.expected is None else str(error.expected)[:2000],
        fix=error.fix,
    )


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One static file of the page; `name` is its path below the folder `static`."""

    name: str
    media_type: str
    content: bytes


@cache
def static_files() -> dict[str, StaticFile]:
    """Return all static files by name."""
    root = resources.files("gradkeep.web").joinpath("static")
    return {file.name: file for file in _files_below(root, "")}


def _files_below(folder: Traversable, prefix: str) -> list[StaticFile]:
    files: list[StaticFile] = []
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        name = f"{prefix}{item.name}"
        if item.is_dir():
            files += _files_below(item, f"{name}/")
        elif media_type := _MEDIA_TYPES.get(f".{item.name.rpartition('.')[2]}"):
            files.append(StaticFile(name, media_type, item.read_bytes()))
    return files
