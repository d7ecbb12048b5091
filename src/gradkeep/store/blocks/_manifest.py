"""Versions of a block: read, seal and drop rows of numbered manifests.

A manifest lists the segments of a version, and a version never changes. Sealing, extending, dropping
rows and compaction all publish the next number with `put_if_absent`; a process that loses a race for a
number reads again and tries the next.

Versions are chained: each contains the digest of its predecessor's manifest, and `_document.py` stores
each digest a second time elsewhere. A recorded version that is missing is damage.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from gradkeep.errors import (
    ConflictError,
    DamagedError,
    InvalidRowsError,
    MissingRowsError,
    StoreError,
)
from gradkeep.store._document import (
    LARGE_DOCUMENT,
    LARGEST_DOCUMENT,
    LARGEST_WHOLE,
    Count,
    Record,
    from_bytes,
    malformed_document,
    read_bytes,
    read_document,
    read_heads,
    record_head,
    to_bytes,
)
from gradkeep.store.blocks._incoming import IdSet, whole_numbers
from gradkeep.store.blocks._schema import Schema
from gradkeep.store.blocks._segment import SUFFIX, Segment, pack

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gradkeep.store.backends._backend import Backend, Durability, Entry
    from gradkeep.store.blocks._block import Block

MANIFESTS = "manifest"
SEGMENTS = "seg"
REWRITTEN = "without-"
"""Prefix of segments that were rewritten when rows were dropped."""
_FILE = re.compile(r"(seg/(\d{6,18}|without-[0-9a-f]{32})|packed/\d{6,18})\.safetensors")
"""Names that a manifest may list: segments of its own block only."""


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment of a version."""

    file: str
    """Key below the block's folder."""
    rows: Count
    bytes: Count
    xxh3: str
    """Digest of the header, which holds the digests of the tensors."""


class Manifest(Record, frozen=True, omit_defaults=True):
    """One version of a block: its segments in the order of their rows."""

    version: int
    schema_hash: str
    segments: tuple[SegmentEntry, ...]
    written: tuple[Count, ...]
    """Rows of every numbered segment that was ever written, dropped ones included."""
    previous: str | None = None
    """Digest of the previous manifest; None for the first, and in stores of early versions."""

    @property
    def identity(self) -> str:
        """Digest of the rows: equal for captures of the same bytes, whenever they were written."""
        parts = [self.schema_hash, *(segment.xxh3 for segment in self.segments)]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def next_version(self, segments: tuple[SegmentEntry, ...]) -> Manifest:
        """Return the next version, with other segments and no new rows."""
        return Manifest(
            version=self.version + 1,
            schema_hash=self.schema_hash,
            segments=segments,
            written=self.written,
            previous=self.digest,
        )

    def with_more(self, entries: Sequence[SegmentEntry]) -> Manifest:
        """Return the next version, with additional segments."""
        written = (*self.written, *(entry.rows for entry in entries))
        following = self.next_version((*self.segments, *entries))
        return msgspec.structs.replace(following, written=written)

    @property
    def next_segment(self) -> int:
        """First unused number; a segment with this number or a later one is work in progress."""
        return len(self.written)

    @property
    def next_row(self) -> int:
        """Number of rows that were ever written, dropped ones included."""
        return sum(self.written)

    @property
    def rows(self) -> int:
        """Number of rows of all segments."""
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)


def no_version(schema: Schema) -> Manifest:
    """Return the empty predecessor of the first version."""
    return Manifest(version=-1, schema_hash=schema.hash, segments=(), written=())


def manifest_key(folder: str, version: int) -> str:
    return f"{folder}/{MANIFESTS}/{version:06d}.json"


def manifest_versions(backend: Backend, folder: str) -> list[int]:
    """List the published versions, oldest first."""
    return numbered_files(backend.list(f"{folder}/{MANIFESTS}"), ".json")


def is_number(name: str, *, digits: int = 6) -> bool:
    """Return True if gradkeep writes numbers in names like this: zero-padded to `digits`."""
    if not (name.isascii() and name.isdigit() and digits <= len(name) <= 18):
        return False
    return len(name) == digits or name[0] != "0"


def numbered_files(listed: Iterable[Entry], suffix: str, *, digits: int = 6) -> list[int]:
    """Return the sorted numbers of files named by a number; other files are ignored."""
    names = (entry.name for entry in listed)
    numbers = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(int(number) for number in numbers if is_number(number, digits=digits))


def load_manifest(
    backend: Backend,
    folder: str,
    version: int,
    *,
    recorded: Mapping[int, frozenset[str]] | None = None,
) -> Manifest:
    """Load the manifest of a version and compare it with its record."""
    name = manifest_key(folder, version)
    try:
        manifest = read_document(backend, name, Manifest, most=LARGEST_DOCUMENT)
    except FileNotFoundError:
        # Read the records afterwards: a deliberate deletion removes them first.
        if version in read_heads(backend, folder):
            raise _lost(backend, folder, version) from None
        have = ", ".join(map(str, manifest_versions(backend, folder))) or "none"
        raise MissingRowsError(
            f"there is no version {version} of this block",
            code="store.no_such_version",
            path=backend.describe(folder),
            found=f"versions {have}",
            fix="Open the block without `version=`; `gradkeep gc` removes older versions.",
        ) from None
    _check_manifest(manifest, backend.describe(name))
    if manifest.version != version:
        raise DamagedError(
            f"the file holds the manifest of version {manifest.version} instead of {version}",
            code="store.misnamed_manifest",
            path=backend.describe(name),
        )
    known = (read_heads(backend, folder) if recorded is None else recorded).get(version)
    if known is not None and manifest.digest not in known:
        raise DamagedError(
            "the manifest differs from the published one",
            code="store.replaced_manifest",
            path=backend.describe(name),
            fix="Restore it from a copy of this store, or run `gradkeep verify STORE --repair`.",
        )
    return manifest


def _check_manifest(manifest: Manifest, path: str) -> None:
    files = [entry.file for entry in manifest.segments]
    for file in files:
        if _FILE.fullmatch(file) is None:
            raise malformed_document(path, f"file: {file!a} is not a segment of this block"[:200])
    if len(set(files)) < len(files):
        raise malformed_document(path, "a segment that is listed twice")
    if max(manifest.rows, manifest.bytes, manifest.next_row) > LARGEST_WHOLE:
        raise malformed_document(path, "more rows or bytes than can be counted")


def _lost(backend: Backend, folder: str, version: int) -> DamagedError:
    return DamagedError(
        f"the published version {version} of this block is missing",
        code="store.lost_version",
        path=backend.describe(manifest_key(folder, version)),
        fix="Restore it from a copy of this store, or run `gradkeep verify STORE --repair`, which "
        "makes the previous version the newest one.",
    )


def latest_manifest(backend: Backend, folder: str) -> Manifest | None:
    """Load the manifest of the newest version; return None if nothing was published."""
    while True:
        # Records first: each is written after its manifest, so every recorded manifest is visible.
        recorded = read_heads(backend, folder)
        numbers = manifest_versions(backend, folder)
        newest = numbers[-1] if numbers else -1
        lost = {version for version in recorded if version > newest}
        if not lost:
            break
        # Unless the block is being deleted, which removes the records first.
        if lost := lost & set(read_heads(backend, folder)):
            raise _lost(backend, folder, max(lost))
    return load_manifest(backend, folder, newest, recorded=recorded) if numbers else None


def publish_manifest(
    backend: Backend, folder: str, manifest: Manifest, *, durability: Durability
) -> Manifest:
    """Write the manifest, then its record; raise `ConflictError` if the number is taken."""
    # The first manifest has no `previous`: its bytes are the same as in early versions.
    data = to_bytes(manifest)
    backend.put_if_absent(manifest_key(folder, manifest.version), [data], durability=durability)
    xxh3 = xxhash.xxh3_128_hexdigest(data)
    record_head(backend, folder, manifest.version, xxh3, durability=durability)
    return msgspec.structs.replace(manifest, digest=xxh3)


def ensure_recorded(
    backend: Backend, folder: str, manifest: Manifest, *, durability: Durability
) -> None:
    """Record a version whose writer died first, or which an earlier gradkeep wrote."""
    if manifest.digest is not None and manifest.version not in read_heads(backend, folder):
        if durability == "full":
            backend.ensure_durable([manifest_key(folder, manifest.version)])
        record_head(backend, folder, manifest.version, manifest.digest, durability=durability)


def open_segment(
    backend: Backend, folder: str, entry: SegmentEntry, *, schema: Schema, verify: bool = True
) -> Segment:
    """Open a segment of a manifest and check that it matches the manifest's entry."""
    key = f"{folder}/{entry.file}"
    try:
        segment = Segment(backend, key, verify=verify)
    except FileNotFoundError:
        raise MissingRowsError(
            f"a segment with {entry.rows} rows is missing",
            code="store.missing_segment",
            path=backend.describe(key),
            fix="Open an older version, or delete the block and capture it again: this segment was "
            "written when rows were dropped and cannot be recreated."
            if REWRITTEN in entry.file
            else "If it was moved to the quarantine, run the work again to recreate it; if an old "
            "version was removed meanwhile, open the block again.",
        ) from None
    problem = None
    if segment.schema_hash != schema.hash:
        problem = ("store.other_schema", "the segment has another schema than its block")
    elif (segment.digest, segment.rows) != (entry.xxh3, entry.rows):
        problem = ("store.replaced_segment", "the segment differs from the one in the manifest")
    if problem is not None:
        segment.close()
        code, message = problem
        raise DamagedError(message, code=code, path=backend.describe(key))
    return segment


def schema_key(folder: str) -> str:
    return f"{folder}/schema.json"


def load_schema(backend: Backend, folder: str) -> Schema:
    """Load the schema of a block; raise `StoreError` if there is no such block."""
    key = schema_key(folder)
    try:
        return read_schema(backend, key)
    except FileNotFoundError:
        raise StoreError(
            "there is no such block",
            code="store.no_such_block",
            path=backend.describe(folder),
            fix="List the blocks with `gradkeep info STORE`.",
        ) from None


_schemas: dict[str, Schema] = {}


def read_schema(backend: Backend, key: str) -> Schema:
    """Read a schema; equal bytes are parsed only once."""
    data, path = read_bytes(backend, key, most=LARGE_DOCUMENT), backend.describe(key)
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest not in _schemas:
        if len(_schemas) >= 64:
            _schemas.clear()
        _schemas[digest] = Schema.from_fields(from_bytes(data, path=path), path=path)
    return _schemas[digest]


def segment_numbers(backend: Backend, folder: str) -> list[int]:
    """List the numbers of the committed segments, sealed or not."""
    return numbered_files(backend.list(f"{folder}/{SEGMENTS}"), SUFFIX)


def segment_file(number: int) -> str:
    """Return the key of a segment below its block's folder."""
    return f"{SEGMENTS}/{number:06d}{SUFFIX}"


def live_manifest(backend: Backend, folder: str, schema: Schema) -> Manifest:
    """Return the newest version plus the segments committed after it, as an unpublished manifest."""
    before = latest_manifest(backend, folder) or no_version(schema)
    numbers = [x for x in segment_numbers(backend, folder) if x >= before.next_segment]
    fresh = [entry_of(backend, folder, number, schema=schema) for number in numbers]
    manifest = before.with_more(fresh)
    return msgspec.structs.replace(manifest, version=-1, previous=None)


def entry_of(backend: Backend, folder: str, number: int, *, schema: Schema | None) -> SegmentEntry:
    """Build the manifest entry of a committed segment from its header."""
    file = segment_file(number)
    with contextlib.closing(Segment(backend, f"{folder}/{file}")) as segment:
        if schema is not None and segment.schema_hash != schema.hash:
            raise DamagedError(
                "the segment has another schema than its block",
                code="store.other_schema",
                path=segment.path,
            )
        return SegmentEntry(file, segment.rows, segment.size, segment.digest)


def seal(
    backend: Backend,
    folder: str,
    *,
    durability: Durability,
    own: Collection[str],
    adding: bool,
) -> Manifest:
    """Publish a version of all committed segments after checking that none is missing.

    Sealing again is free: without new segments, or without `adding`, the newest version is checked and
    returned. `own` are segments that the caller wrote with this durability itself.
    """
    schema = load_schema(backend, folder)
    while True:
        newest = latest_manifest(backend, folder)
        candidate = _candidate(backend, folder, schema, newest, adding=adding)
        if candidate is newest and newest is not None:
            if durability == "full":
                backend.ensure_durable([manifest_key(folder, newest.version)])
            ensure_recorded(backend, folder, newest, durability=durability)
            return newest
        if durability == "full":
            # A version must not outlive its segments, whichever process wrote them.
            fresh = candidate.segments[0 if newest is None else len(newest.segments) :]
            backend.ensure_durable(
                f"{folder}/{entry.file}" for entry in fresh if entry.file not in own
            )
        with contextlib.suppress(ConflictError):  # the number is taken: try the next
            return publish_manifest(backend, folder, candidate, durability=durability)


def _candidate(
    backend: Backend, folder: str, schema: Schema, newest: Manifest | None, *, adding: bool
) -> Manifest:
    before = newest or no_version(schema)
    first, old = before.next_segment, before.segments
    fresh = [number for number in segment_numbers(backend, folder) if number >= first and adding]
    present = {f"{SEGMENTS}/{item.name}" for item in backend.list(f"{folder}/{SEGMENTS}")}
    missing = [entry.file for entry in old if entry.file not in present]
    holes = sorted(set(range(first, max(fresh, default=first - 1) + 1)) - set(fresh))
    if missing or holes:
        names = missing + [segment_file(number) for number in holes]
        raise MissingRowsError(
            f"{len(names)} segments are missing",
            code="store.missing_segments",
            path=backend.describe(folder),
            found=", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
            fix="Open an older version, or delete the block and capture it again: segments that were "
            "written when rows were dropped cannot be recreated."
            if any(REWRITTEN in name for name in names)
            else "Run the work again: it recreates exactly the missing ones.",
        )
    if newest is not None and not fresh:
        return newest
    entries = [entry_of(backend, folder, number, schema=schema) for number in fresh]
    candidate = before.with_more(entries)
    _check_rows(backend, folder, schema, candidate, fresh_from=len(old))
    return candidate


def _check_rows(
    backend: Backend, folder: str, schema: Schema, candidate: Manifest, *, fresh_from: int
) -> None:
    path = backend.describe(folder)
    if schema.num_rows is not None and candidate.next_row != schema.num_rows:
        raise MissingRowsError(
            "the block is not complete",
            code="store.incomplete",
            path=path,
            found=f"{candidate.next_row} of {schema.num_rows} rows",
            fix="Run the work again: it resumes after the existing rows.",
        )
    seen = IdSet()
    for index, entry in enumerate(candidate.segments):
        with contextlib.closing(open_segment(backend, folder, entry, schema=schema)) as segment:
            ids = segment.small("ids")
            repeated = seen.among(ids)
            seen.add(ids)
            short = entry.rows != schema.rows_per_segment
            last = index == len(candidate.segments) - 1
        if len(repeated):
            raise InvalidRowsError(
                "ids occur in two segments",
                code="store.id_in_two_segments",
                path=backend.describe(f"{folder}/{entry.file}"),
                found=f"id {int(repeated[0])}" + (" and more" if len(repeated) > 1 else ""),
                fix="Delete the block and write it again with unique ids.",
            )
        if short and not last and index >= fresh_from:
            raise MissingRowsError(
                "a segment before the last one is not full",
                code="store.short_segment",
                path=backend.describe(f"{folder}/{entry.file}"),
                found=f"{entry.rows} of {schema.rows_per_segment} rows",
            )


def drop_rows(block: Block, ids: Any, *, durability: Durability) -> Manifest:
    """Publish a version without these rows; affected segments are rewritten, the others shared.

    The old version stays readable until `gc`.
    """
    backend, folder = block.backend, block.folder
    dropped = np.unique(whole_numbers(ids, path=block.path))
    block.read(dropped, [])  # raises for unknown ids
    newest = latest_manifest(backend, folder)
    if newest is None or newest.version != block.version:
        raise ConflictError(
            f"version {block.version} is not the newest",
            code="store.not_newest",
            path=block.path,
            fix="Open the block again and repeat.",
        )
    entries: list[SegmentEntry] = []
    for entry, start in zip(newest.segments, block.starts, strict=False):
        remaining = np.flatnonzero(~np.isin(block.ids[start : start + entry.rows], dropped))
        if len(remaining) == entry.rows:
            entries.append(entry)
        elif len(remaining):
            rows = remaining + start
            batch = block.read_rows(rows)
            packed = pack(block.schema, batch.ids, batch.columns, first_row=int(rows[0]))
            # Named by content: a retry after a crash, even with other rows, cannot reuse a wrong file,
            # and a seal does not mistake it for new rows.
            file = f"{SEGMENTS}/{REWRITTEN}{packed.digest}{SUFFIX}"
            backend.put_if_absent(f"{folder}/{file}", packed.parts, durability=durability)
            entries.append(SegmentEntry(file, len(remaining), packed.size, packed.digest))
    manifest = newest.next_version(tuple(entries))
    return publish_manifest(backend, folder, manifest, durability=durability)
