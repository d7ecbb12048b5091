"""Bytes of responses: answers as JSON, and the files of the page."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from gradkeep._display import to_json_types

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from gradkeep.errors import GradkeepError


def to_json(answer: Any) -> bytes:
    """The bytes of an answer; what JSON has no number for becomes null."""
    text = json.dumps(
        to_json_types(answer), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    # Half a pair of surrogates, as broken file names have it, is no text.
    return text.encode(errors="replace")


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemView:
    """Why there is no answer, in the parts of a message of gradkeep."""

    kind: str
    what: str
    path: str | None = None
    found: str | None = None
    expected: str | None = None
    fix: str | None = None


def problem_of(error: GradkeepError) -> ProblemView:
    """An error of gradkeep as it is shown in place of an answer."""
    return ProblemView(
        type(error).__name__,
        error.what,
        error.path,
        None if error.found is None else str(error.found).strip()[:2000],
        None if error.expected is None else str(error.expected)[:2000],
        error.fix,
    )


_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page."""

    name: str
    """Below the folder `static`, with slashes."""
    kind: str
    content: bytes


@cache
def static_files() -> dict[str, StaticFile]:
    """All files of the page by name."""
    root = resources.files("gradkeep.web").joinpath("static")
    return {one.name: one for one in _below(root, "")}


def _below(folder: Traversable, prefix: str) -> list[StaticFile]:
    found: list[StaticFile] = []
    for item in sorted(folder.iterdir(), key=lambda one: one.name):
        name = f"{prefix}{item.name}"
        if item.is_dir():
            found += _below(item, f"{name}/")
        elif kind := _KINDS.get(f".{item.name.rpartition('.')[2]}"):
            found.append(StaticFile(name, kind, item.read_bytes()))
    return found


@dataclass(frozen=True, slots=True)
class VendoredFile:
    """A file of another project that the page needs."""

    file: str
    package: str
    version: str
    licence: str
    sha256: str

    def is_intact(self) -> bool:
        """Whether the file is what was taken from the package."""
        there = static_files().get(f"vendor/{self.file}")
        return there is not None and hashlib.sha256(there.content).hexdigest() == self.sha256


def vendored_files() -> list[VendoredFile]:
    """What the manifest says of files of other projects."""
    manifest = json.loads(static_files()["vendor/manifest.json"].content)
    return [VendoredFile(**one) for one in manifest["files"]]
