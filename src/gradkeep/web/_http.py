"""Parameters of requests with their ranges, and bodies of responses: JSON and static files."""

# Annotations are evaluated at run time by FastAPI: no `from __future__ import annotations` here.

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from gradkeep._display import to_json_types
from gradkeep.errors import GradkeepError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}"
NAME_PATTERN = f"^{_NAME}$"
_SOURCE_PATTERN = f"^(saved|method|fit|study):{_NAME}$"
MAX_ROW = 2**62

Name = Annotated[str, Query(pattern=NAME_PATTERN)]
Row = Annotated[int, Query(ge=-MAX_ROW, le=MAX_ROW)]
Rows = Annotated[list[Annotated[int, Field(ge=-MAX_ROW, le=MAX_ROW)]], Query(max_length=60)]
Count = Annotated[int, Query(ge=1, le=120)]
Start = Annotated[int, Query(ge=0, le=2**31)]
TopK = Annotated[int, Query(ge=1, le=50)]
Source = Annotated[str, Query(pattern=_SOURCE_PATTERN)]
Sources = Annotated[list[Annotated[str, Field(pattern=_SOURCE_PATTERN)]], Query(max_length=2)]
MapSource = Annotated[str, Query(pattern=f"^(gradients|(fit|study):{_NAME})$")]
Clusters = Annotated[int, Query(ge=1, le=24)]
LogName = Annotated[str, Query(max_length=200)]
Search = Annotated[str, Query(max_length=200)]
Ratio = Annotated[float, Query(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Captures:
    """The captures that a request about a query refers to."""

    run: Name = "main"
    queries: Name = "test"
    train: Name = "train"
    name: Name = "main"


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
