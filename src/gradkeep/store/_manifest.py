"""Numbered manifests: which segments make up a version of a block.

A version is never changed. Sealing, extending, deleting rows and compaction all publish the next
number with `put_if_absent`; who loses a race for a number reads again and tries the next.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.errors import Damaged, MissingRows
from gradkeep.store import _document

if TYPE_CHECKING:
    from gradkeep.store._backend import Backend, Durability

FOLDER = "manifest"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One segment of a version."""

    file: str
    """Its key below the block's folder."""
    rows: int
    bytes: int
    xxh3: str
    """The digest of its header, which holds the digests of its tensors."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a block: its segments, in the order of their rows."""

    version: int
    schema_hash: str
    segments: tuple[SegmentEntry, ...]
    written: tuple[int, ...]
    """The rows of every numbered segment that was ever written, left out since or not."""

    @property
    def next_segment(self) -> int:
        """The first number that was never used: a later segment is work in progress, not waste."""
        return len(self.written)

    @property
    def next_row(self) -> int:
        """How many rows were ever written, those left out since included."""
        return sum(self.written)

    @property
    def rows(self) -> int:
        """Rows of all segments."""
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)


def key(folder: str, version: int) -> str:
    """The name of a version's manifest."""
    return f"{folder}/{FOLDER}/{version:06d}.json"


def versions(backend: Backend, folder: str) -> list[int]:
    """The published versions, oldest first."""
    names = (entry.name.removesuffix(".json") for entry in backend.list(f"{folder}/{FOLDER}"))
    return sorted(int(name) for name in names if name.isdigit())


def load(backend: Backend, folder: str, version: int) -> Manifest:
    """A version's manifest, checked."""
    name = key(folder, version)
    try:
        data = backend.read(name)
    except FileNotFoundError:
        have = ", ".join(map(str, versions(backend, folder))) or "none"
        raise MissingRows(
            f"there is no version {version} of this block",
            path=backend.describe(folder),
            found=f"versions {have}",
            fix="older versions are removed by `gradkeep gc`; open the block without `version=`",
        ) from None
    fields = _document.from_bytes(data, path=backend.describe(name))
    if fields["version"] != version:
        raise Damaged(
            "a manifest under another's name",
            path=backend.describe(name),
            found=f"version {fields['version']}",
            expected=f"version {version}",
        )
    return Manifest(
        version=version,
        schema_hash=fields["schema_hash"],
        segments=tuple(SegmentEntry(**segment) for segment in fields["segments"]),
        written=tuple(fields["written"]),
    )


def latest(backend: Backend, folder: str) -> Manifest | None:
    """The newest version's manifest; None if nothing was published yet."""
    numbers = versions(backend, folder)
    return load(backend, folder, numbers[-1]) if numbers else None


def publish(backend: Backend, folder: str, manifest: Manifest, *, durability: Durability) -> bool:
    """Put the manifest under its number; raises `Conflict` if another one took it."""
    data = _document.to_bytes(dataclasses.asdict(manifest))
    return backend.put_if_absent(key(folder, manifest.version), [data], durability=durability)
