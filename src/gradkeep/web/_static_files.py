"""The files of the page: read once, by names that are known, so that no request names a path."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

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
