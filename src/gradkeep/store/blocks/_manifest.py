"""Versions of a block: numbered manifests, read, chosen, sealed.

A manifest lists the segments of a version, and a version is never changed. Sealing, extending,
dropping rows and compaction all publish the next number with `put_if_absent`; who loses a race for
a number reads again and tries the next.

Versions are chained: each names the digest of its predecessor's manifest, and `_records.py` keeps the
digest of each a second time, elsewhere. A version that was recorded and is gone is damage.
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
    to_bytes,
)
from gradkeep.store._records import read_heads, record_head
from gradkeep.store.blocks._columns import IdSet, whole_numbers
from gradkeep.store.blocks._packing import SUFFIX, pack_batch
from gradkeep.store.blocks._schema import Schema
from gradkeep.store.blocks._segment import Segment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gradkeep.store.backends._backend import Backend, Durability, Entry
    from gradkeep.store.blocks._block import Block

MANIFESTS = "manifest"
SEGMENTS = "seg"
REWRITTEN = "without-"
"""How the names of segments begin that were written anew when rows were dropped."""
_FILE = re.compile(r"(seg/(\d{6,18}|without-[0-9a-f]{32})|packed/\d{6,18})\.safetensors")
"""What a manifest may name: segments of its own block, and nothing else."""


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment of a version."""

    file: str
    """Its key below the block's folder."""
    rows: Count
    bytes: Count
    xxh3: str
    """The digest of its header, which holds the digests of its tensors."""


class Manifest(Record, frozen=True, omit_defaults=True):
    """One version of a block: its segments, in the order of their rows."""

    version: int
    schema_hash: str
    segments: tuple[SegmentEntry, ...]
    written: tuple[Count, ...]
    """The rows of every numbered segment that was ever written, left out since or not."""
    previous: str | None = None
    """The digest of the manifest before this; None of the first, and of those of old stores."""

    @property
    def identity(self) -> str:
        """A digest of the rows: equal for captures of the same bytes, whenever they were written."""
        parts = [self.schema_hash, *(segment.xxh3 for segment in self.segments)]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def next_version(self, segments: tuple[SegmentEntry, ...]) -> Manifest:
        """The version after this one, with other segments and no new rows."""
        return Manifest(
            version=self.version + 1,
            schema_hash=self.schema_hash,
            segments=segments,
            written=self.written,
            previous=self.digest,
        )

    def with_more(self, entries: Sequence[SegmentEntry]) -> Manifest:
        """The version after this one, with more segments."""
        written = (*self.written, *(entry.rows for entry in entries))
        following = self.next_version((*self.segments, *entries))
        return msgspec.structs.replace(following, written=written)

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


def no_version(schema: Schema) -> Manifest:
    """What comes before the first version."""
    return Manifest(version=-1, schema_hash=schema.hash, segments=(), written=())


def manifest_key(folder: str, version: int) -> str:
    """The name of a version's manifest."""
    return f"{folder}/{MANIFESTS}/{version:06d}.json"


def manifest_versions(backend: Backend, folder: str) -> list[int]:
    """The published versions, oldest first."""
    return numbered_files(backend.list(f"{folder}/{MANIFESTS}"), ".json")


def is_number(name: str, *, digits: int = 6) -> bool:
    """Whether this is how gradkeep writes a number in a name: padded to so many digits, no more."""
    if not (name.isascii() and name.isdigit() and digits <= len(name) <= 18):
        return False
    return len(name) == digits or name[0] != "0"


def numbered_files(listed: Iterable[Entry], suffix: str, *, digits: int = 6) -> list[int]:
    """The numbers of the files that are called by one, rising; all others are somebody else's."""
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
    """A version's manifest, checked, and compared with what is `recorded` of it elsewhere."""
    name = manifest_key(folder, version)
    try:
        manifest = read_document(backend, name, Manifest, most=LARGEST_DOCUMENT)
    except FileNotFoundError:
        # Looked at afterwards: what is removed on purpose loses its record first.
        if version in read_heads(backend, folder):
            raise _lost(backend, folder, version) from None
        have = ", ".join(map(str, manifest_versions(backend, folder))) or "none"
        raise MissingRowsError(
            f"there is no version {version} of this block, only {have}",
            path=backend.describe(folder),
            fix="older versions are removed by `gradkeep gc`; open the block without `version=`",
        ) from None
    _check_manifest(manifest, backend.describe(name))
    if manifest.version != version:
        what = f"the manifest of version {manifest.version} under the name of version {version}"
        raise DamagedError(what, path=backend.describe(name))
    known = (read_heads(backend, folder) if recorded is None else recorded).get(version)
    if known is not None and manifest.digest not in known:
        raise DamagedError(
            "it is not the manifest that was published under this number",
            path=backend.describe(name),
            fix="restore it from a copy of this store, or `gradkeep verify STORE --repair`",
        )
    return manifest


def _check_manifest(manifest: Manifest, path: str) -> None:
    files = [entry.file for entry in manifest.segments]
    for file in files:
        if _FILE.fullmatch(file) is None:
            raise malformed_document(path, f"file: {file!a} is not a segment of this block"[:200])
    if len(set(files)) < len(files):
        raise malformed_document(path, "a segment that is named twice")
    if max(manifest.rows, manifest.bytes, manifest.next_row) > LARGEST_WHOLE:
        raise malformed_document(path, "more rows or bytes than can be counted")


def _lost(backend: Backend, folder: str, version: int) -> DamagedError:
    return DamagedError(
        f"version {version} of this block was published and is gone",
        path=backend.describe(manifest_key(folder, version)),
        fix="restore it from a copy of this store; or let `gradkeep verify STORE --repair` forget "
        "it, after which the version before it is the newest again",
    )


def latest_manifest(backend: Backend, folder: str) -> Manifest | None:
    """The newest version's manifest; None if nothing was published yet."""
    while True:
        # Records first: each was put after its manifest, so a manifest that was not lost is seen.
        recorded = read_heads(backend, folder)
        numbers = manifest_versions(backend, folder)
        newest = numbers[-1] if numbers else -1
        lost = {version for version in recorded if version > newest}
        if not lost:
            break
        # Unless the block is just being deleted, which begins with the records.
        if lost := lost & set(read_heads(backend, folder)):
            raise _lost(backend, folder, max(lost))
    return load_manifest(backend, folder, newest, recorded=recorded) if numbers else None


def publish_manifest(
    backend: Backend, folder: str, manifest: Manifest, *, durability: Durability
) -> Manifest:
    """Put the manifest under its number, then its record; raises `ConflictError` if another took it."""
    # The first manifest has no `previous`, and stays what it always was, byte for byte.
    data = to_bytes(manifest)
    backend.put_if_absent(manifest_key(folder, manifest.version), [data], durability=durability)
    xxh3 = xxhash.xxh3_128_hexdigest(data)
    record_head(backend, folder, manifest.version, xxh3, durability=durability)
    return msgspec.structs.replace(manifest, digest=xxh3)


def ensure_recorded(
    backend: Backend, folder: str, manifest: Manifest, *, durability: Durability
) -> None:
    """Record a version whose writer died before it could, or was of an earlier gradkeep."""
    if manifest.digest is not None and manifest.version not in read_heads(backend, folder):
        if durability == "full":
            backend.ensure_durable([manifest_key(folder, manifest.version)])
        record_head(backend, folder, manifest.version, manifest.digest, durability=durability)


def open_segment(
    backend: Backend, folder: str, entry: SegmentEntry, *, schema: Schema, verify: bool = True
) -> Segment:
    """Open a segment of a manifest and check that it is the one the manifest means."""
    key = f"{folder}/{entry.file}"
    try:
        segment = Segment(backend, key, verify=verify)
    except FileNotFoundError:
        raise MissingRowsError(
            f"a segment with {entry.rows} rows is gone",
            path=backend.describe(key),
            fix="it was written when rows were dropped and nothing can write it again: open an older "
            "version, or delete the block and capture it again"
            if REWRITTEN in entry.file
            else "if it was moved to quarantine, run the work again to recreate it; if an old "
            "version was cleaned up meanwhile, open the block again",
        ) from None
    problem = None
    if segment.schema_hash != schema.hash:
        problem = "it belongs to another schema"
    elif (segment.digest, segment.rows) != (entry.xxh3, entry.rows):
        problem = "it is not the segment that the manifest names"
    if problem is not None:
        segment.close()
        raise DamagedError(
            problem,
            path=backend.describe(key),
            fix="`gradkeep verify STORE --repair` moves the file aside; "
            "run the work again to recreate it",
        )
    return segment


def schema_key(folder: str) -> str:
    """The name of a block's schema."""
    return f"{folder}/schema.json"


def load_schema(backend: Backend, folder: str) -> Schema:
    """The schema of a block, checked."""
    key = schema_key(folder)
    try:
        return read_schema(backend, key)
    except FileNotFoundError:
        raise StoreError(
            "there is no such block", path=backend.describe(folder), fix="see `gradkeep info STORE`"
        ) from None


_schemas: dict[str, Schema] = {}


def read_schema(backend: Backend, key: str) -> Schema:
    """Read a schema; the same bytes, which every opening of a block reads, are checked once."""
    data, path = read_bytes(backend, key, most=LARGE_DOCUMENT), backend.describe(key)
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest not in _schemas:
        if len(_schemas) >= 64:
            _schemas.clear()
        _schemas[digest] = Schema.from_fields(from_bytes(data, path=path), path=path)
    return _schemas[digest]


def segment_numbers(backend: Backend, folder: str) -> list[int]:
    """The numbers of the segments that are committed, sealed or not."""
    return numbered_files(backend.list(f"{folder}/{SEGMENTS}"), SUFFIX)


def segment_file(number: int) -> str:
    """The key of a segment below its block's folder."""
    return f"{SEGMENTS}/{number:06d}{SUFFIX}"


def live_manifest(backend: Backend, folder: str, schema: Schema) -> Manifest:
    """What is committed now as if it were a version: the newest one and the segments after it."""
    before = latest_manifest(backend, folder) or no_version(schema)
    numbers = [x for x in segment_numbers(backend, folder) if x >= before.next_segment]
    fresh = [entry_of(backend, folder, number, schema=schema) for number in numbers]
    manifest = before.with_more(fresh)
    return msgspec.structs.replace(manifest, version=-1, previous=None)


def entry_of(backend: Backend, folder: str, number: int, *, schema: Schema | None) -> SegmentEntry:
    """The manifest entry of a committed segment, from its header."""
    file = segment_file(number)
    with contextlib.closing(Segment(backend, f"{folder}/{file}")) as segment:
        if schema is not None and segment.schema_hash != schema.hash:
            raise DamagedError("this segment belongs to another schema", path=segment.path)
        return SegmentEntry(file, segment.rows, segment.size, segment.digest)


def seal(
    backend: Backend,
    folder: str,
    *,
    durability: Durability,
    own: Collection[str],
    adding: bool,
) -> Manifest:
    """Publish a version of everything that is committed, after checking that nothing is missing.

    Sealing again is free: if nothing came since the last version, that version is returned; so it
    is, checked, unless `adding`. `own` are segments that the caller has put with this durability
    itself.
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
            # A version must not outlive its segments, whoever put them.
            fresh = candidate.segments[0 if newest is None else len(newest.segments) :]
            backend.ensure_durable(
                f"{folder}/{entry.file}" for entry in fresh if entry.file not in own
            )
        with contextlib.suppress(ConflictError):  # another took the number: look again
            return publish_manifest(backend, folder, candidate, durability=durability)


def _candidate(
    backend: Backend, folder: str, schema: Schema, newest: Manifest | None, *, adding: bool
) -> Manifest:
    before = newest or no_version(schema)
    first, old = before.next_segment, before.segments
    fresh = [number for number in segment_numbers(backend, folder) if number >= first and adding]
    present = {f"{SEGMENTS}/{item.name}" for item in backend.list(f"{folder}/{SEGMENTS}")}
    gone = [entry.file for entry in old if entry.file not in present]
    holes = sorted(set(range(first, max(fresh, default=first - 1) + 1)) - set(fresh))
    if gone or holes:
        names = gone + [segment_file(number) for number in holes]
        raise MissingRowsError(
            f"{len(names)} segments are missing",
            path=backend.describe(folder),
            found=", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
            fix="open an older version, or delete the block and capture it again: what was written "
            "when rows were dropped cannot be written again"
            if any(REWRITTEN in name for name in names)
            else "run the work again: it recreates exactly the missing ones",
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
            f"the block is not complete: {candidate.next_row} of {schema.num_rows} rows",
            path=path,
            fix="run the work again: it resumes after the rows that are there",
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
                path=backend.describe(f"{folder}/{entry.file}"),
                found=f"id {int(repeated[0])}" + (" and more" if len(repeated) > 1 else ""),
                fix="delete the block and write it again with ids that differ",
            )
        if short and not last and index >= fresh_from:
            what = f"a segment in the middle has {entry.rows} of {schema.rows_per_segment} rows"
            raise MissingRowsError(what, path=backend.describe(f"{folder}/{entry.file}"))


def drop_rows(block: Block, ids: Any, *, durability: Durability) -> Manifest:
    """Publish a version without these rows; touched segments are written anew, the rest shared.

    The old version stays readable until `gc`.
    """
    backend, folder = block.backend, block.folder
    unwanted = np.unique(whole_numbers(ids, path=block.path))
    block.read(unwanted, [])  # raises for ids that are not there
    newest = latest_manifest(backend, folder)
    if newest is None or newest.version != block.version:
        raise ConflictError(
            f"version {block.version} is not the newest",
            path=block.path,
            fix="open the block again and repeat",
        )
    kept: list[SegmentEntry] = []
    for entry, start in zip(newest.segments, block.starts, strict=False):
        stay = np.flatnonzero(~np.isin(block.ids[start : start + entry.rows], unwanted))
        if len(stay) == entry.rows:
            kept.append(entry)
        elif len(stay):
            rows = stay + start
            packed = pack_batch(block.schema, block.read_rows(rows), first_row=int(rows[0]))
            # Named by content: a second try after a crash, for other rows even, takes no wrong file,
            # and a seal does not mistake it for new rows.
            file = f"{SEGMENTS}/{REWRITTEN}{packed.digest}{SUFFIX}"
            backend.put_if_absent(f"{folder}/{file}", packed.parts, durability=durability)
            kept.append(SegmentEntry(file, len(stay), packed.size, packed.digest))
    manifest = newest.next_version(tuple(kept))
    return publish_manifest(backend, folder, manifest, durability=durability)
