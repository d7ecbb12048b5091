"""Garbage collection of unneeded files, and repair of damaged ones."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep import _arguments
from gradkeep.errors import GradkeepError, StoreError
from gradkeep.store._document import head_keys
from gradkeep.store._keys import HEADS, ROWS, SHARED_ROWS, parse_file_key, record_folder, row_part
from gradkeep.store._store import STORE_FILE, Store, put_identity
from gradkeep.store._store import open as open_store
from gradkeep.store.backends._backend import QUARANTINE
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    SEGMENTS,
    ensure_recorded,
    is_number,
    latest_manifest,
    load_manifest,
    manifest_key,
    manifest_versions,
    schema_key,
)
from gradkeep.store.blocks._segment import SUFFIX
from gradkeep.store.catalog._scan import block_addresses, entries_below, keys_below
from gradkeep.store.catalog._sql import find_samples, is_samples
from gradkeep.store.rows._row_files import LOOSE, drop_packed_file, row_records, set_size
from gradkeep.store.rows._rows import FAILED, LEASES

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from gradkeep.store._keys import KnownFile
    from gradkeep.store.backends._backend import Backend


YOUNG_SECONDS = 3600.0
"""Age in seconds below which a file may belong to a write that is not published yet."""
_LONGEST_QUEUE = 7 * 86400.0
"""Seconds that jobs of a cluster may wait before the first of them begins."""


_WORK = (LOOSE, LEASES, FAILED)
_UNFINISHED = {"segment", "row", "lease", "failure", "row record"}
"""Kinds of files that a writer still puts after its block was deleted."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """Files that were removed, or would be in a dry run.

    Attributes:
        files: Keys of the files.
        bytes: Their total size.
    """

    files: tuple[str, ...]
    bytes: int


@_arguments.checked(StoreError)
def gc(
    store: Store | str | os.PathLike[str], *, keep_versions: int = 1, dry_run: bool = False
) -> GcReport:
    """Remove old versions of every block, segments that only they needed, and unfinished writes.

    Temporary row sets of parallel work whose processes were killed are removed after an hour without
    changes, and so are files of blocks that were deleted under their writer.

    Safe at any moment and beside readers and writers: records of old versions are removed first, then
    their manifests, so that no listed version ever lacks a file; work in progress is recognized by its
    number or age. A reader that holds an old version gets an error when it touches a removed segment. A
    store in which a version is lost is refused, because the files that look unneeded may be the only
    remaining copy.

    Args:
        store: The store, or its path.
        keep_versions: Number of versions of each block to keep.
        dry_run: Only report what would be removed.

    Returns:
        Keys and total size of the removed files.

    Raises:
        DamagedError: A published version is missing.
    """
    _arguments.count("keep_versions", keep_versions, error=StoreError, least=1)
    store = store if isinstance(store, Store) else open_store(store, create=False)
    backend = store.backend
    heads: dict[str, int] = {}
    manifests: dict[str, int] = {}
    rest = dict.fromkeys(backend.leftovers(older_than=YOUNG_SECONDS), 0)
    kept_manifests: list[str] = []
    blocks = [key.folder for key in store.blocks()]
    for folder in (*blocks, *(f"{ROWS}/{name}" for name in store.row_sets())):
        # List once: no file of a version that is published meanwhile may be removed.
        versions = manifest_versions(backend, folder)
        newest = latest_manifest(backend, folder)  # raises if one is lost
        if newest is not None and not dry_run:
            ensure_recorded(backend, folder, newest, durability=store.durability)
        kept_versions = versions[-keep_versions:]
        kept_manifests += [manifest_key(folder, number) for number in kept_versions]
        if kept_versions:
            recorded = head_keys(backend, folder).items()
            heads |= {key: 0 for key, number in recorded if number < kept_versions[0]}
            old = {manifest_key(folder, number) for number in versions[:-keep_versions]}
            listed = _sizes_below(backend, f"{folder}/{MANIFESTS}")
            manifests |= {key: size for key, size in listed.items() if key in old}
            rest |= _block_waste(backend, folder, kept_versions) if folder in blocks else {}
    for name in store.row_sets():
        folder = f"{ROWS}/{name}"
        if _is_abandoned(store, name):
            heads |= _sizes_below(backend, f"{HEADS}/{folder}")
            files = _sizes_below(backend, folder)
            # The schema is removed last: until then the rest is a readable row set.
            rest |= dict(sorted(files.items(), key=lambda one: one[0] == schema_key(folder)))
        else:
            packed = store.rows(name).packed_rows
            if packed:
                heads |= dict.fromkeys(row_records(backend, folder, LOOSE, packed), 0)
            rest |= _row_waste(store, name)
    rest |= _without_schema(backend)
    if not dry_run:
        for key in kept_manifests if store.durability == "full" else ():
            # Remaining manifests must survive a power cut before anything is removed. One may be
            # missing if another gc runs at the same time; that one made a later manifest durable.
            with contextlib.suppress(FileNotFoundError):
                backend.ensure_durable([key])
        for keys in (heads, manifests, rest):
            backend.delete(keys, durability=store.durability)
    everything = heads | manifests | rest
    return GcReport(tuple(everything), sum(everything.values()))


def _is_abandoned(store: Store, name: str) -> bool:
    """Return True if a temporary row set belongs to parallel work whose processes are all gone."""
    if SHARED_ROWS.fullmatch(name) is None:
        return False
    rows = store.rows(name)
    files = dict(entries_below(store.backend, rows.folder))
    begun = any(key.startswith(f"{rows.folder}/{part}/") for key in files for part in _WORK)
    age = time.time() - max((entry.modified for entry in files.values()), default=0.0)
    # Workers renew their leases every few seconds.
    return age > (YOUNG_SECONDS if begun else _LONGEST_QUEUE) and rows.counts().leased == 0


def _without_schema(backend: Backend) -> dict[str, int]:
    """Find files of blocks that were deleted while a process still wrote to them.

    A delete removes versions and sizes first, and a writer creates none without a schema. If there are
    any, the schema was lost: that is damage, which only `verify` repairs.
    """
    waste: dict[str, int] = {}
    for address in block_addresses(backend):
        folder = address.folder
        if backend.exists(schema_key(folder)):
            continue
        files = dict(entries_below(backend, folder))
        records = dict(entries_below(backend, f"{HEADS}/{folder}"))
        kinds = {
            None if (file := parse_file_key(key)) is None else file.kind
            for key in (*files, *records)
        }
        newest = max((entry.modified for entry in files.values()), default=0.0)
        if kinds <= _UNFINISHED and time.time() - newest > YOUNG_SECONDS:
            waste |= dict.fromkeys(records, 0)  # records first
            waste |= {key: entry.size for key, entry in files.items()}
    return waste


def _sizes_below(backend: Backend, folder: str) -> dict[str, int]:
    return {key: entry.size for key, entry in entries_below(backend, folder)}


def _block_waste(backend: Backend, folder: str, versions: list[int]) -> dict[str, int]:
    manifests = [load_manifest(backend, folder, number) for number in versions]
    needed = {entry.file for manifest in manifests for entry in manifest.segments}
    now, waste = time.time(), {}
    for entry in backend.list(f"{folder}/{SEGMENTS}"):
        file, name = f"{SEGMENTS}/{entry.name}", entry.name.removesuffix(SUFFIX)
        if file in needed or not entry.name.endswith(SUFFIX):
            continue
        used = is_number(name) and int(name) < manifests[-1].next_segment
        old = not is_number(name) and now - entry.modified > YOUNG_SECONDS
        if used or old:
            waste[f"{folder}/{file}"] = entry.size
    kept_versions = {f"{manifest.version:06d}" for manifest in manifests}
    for entry in backend.list(folder):
        if is_samples(entry.name) and entry.name.split("-")[1] not in kept_versions:
            waste[f"{folder}/{entry.name}"] = entry.size
    return waste


def _row_waste(store: Store, name: str) -> dict[str, int]:
    """Find row files of packed rows, and leases of finished rows."""
    rows, waste = store.rows(name), {}
    for kind, obsolete in ((LOOSE, rows.packed_rows), (LEASES, set(rows.done().tolist()))):
        for key, size in _sizes_below(store.backend, f"{ROWS}/{name}/{kind}").items():
            row = key.rpartition("/")[2].partition(".")[0].partition("-")[0]
            if is_number(row, digits=1) and int(row) in obsolete:
                waste[key] = size
    return waste


def repair_damage(
    backend: Backend, damaged: Sequence[str], orphans: Sequence[str]
) -> tuple[str, ...]:
    """Quarantine damaged files and remove unfinished writes; return a sentence for each action."""
    actions: list[str] = []
    for key in damaged:
        try:
            actions += _repair_file(backend, key)
        except (GradkeepError, OSError) as error:
            reason = error.message if isinstance(error, GradkeepError) else str(error)
            actions.append(f"{key or 'the store'} could not be repaired: {reason}")
    if orphans:
        try:
            backend.delete(orphans, durability="full")
            actions += [f"removed the unfinished write {key}" for key in orphans]
        except GradkeepError as error:
            actions.append(f"unfinished writes could not be removed: {error.message}")
    return tuple(actions)


def _repair_file(backend: Backend, key: str) -> Iterator[str]:
    file = parse_file_key(key)
    if not key or key == QUARANTINE:
        yield f"{key or 'the store'} was not changed; inspect it manually"
        return
    missing = not backend.exists(key)
    if missing and file is not None and file.kind == "schema":
        yield from _quarantine_block(backend, file.folder)
        return
    if missing:
        yield f"{key} is missing; run the work again to recreate it"
    elif file is not None and file.kind == "lease":
        backend.delete([key], durability="process")
        yield f"removed the unreadable lease {key}"
    else:
        yield f"moved {key} to {backend.move_aside(key)}"
    if key == STORE_FILE:
        put_identity(backend, durability="full")
        yield f"wrote a new {STORE_FILE}; the store's old uuid is lost"
    if file is not None:
        yield from _follow_up(backend, key, file, missing=missing)


def _quarantine_block(backend: Backend, folder: str) -> Iterator[str]:
    """Quarantine the files of a block whose schema is missing, as after a delete under a writer."""
    num_removed = backend.delete(list(keys_below(backend, f"{HEADS}/{folder}")), durability="full")
    if num_removed:
        yield f"removed the records of {folder}"
    for key in list(keys_below(backend, folder)):
        if parse_file_key(key) is not None:
            yield f"moved {key} to {backend.move_aside(key)}: its schema is missing"


def _follow_up(backend: Backend, key: str, file: KnownFile, *, missing: bool) -> Iterator[str]:
    """Adjust records and derived files after a file was removed; yield a sentence for each action."""
    recorded = record_folder(file)
    num_removed = 0
    if recorded is not None:
        number = max(0, file.number)
        versions = head_keys(backend, recorded)
        heads = [head for head, version in versions.items() if version == number]
        num_removed = backend.delete(heads, durability="full")
    part = row_part(file)
    if part is not None:
        records = row_records(backend, file.folder, part, [file.number])
        num_removed = backend.delete(records, durability="full")
    if num_removed and file.kind != "size":
        yield f"removed the record of {key}"
    if file.kind == "manifest":
        # The number will be reused, perhaps for other rows.
        derived = find_samples(backend, file.folder, file.number)
        if derived is not None:
            backend.delete([derived], durability="full")
            yield f"removed {derived}, which was derived from it"
    if file.kind == "packed" and drop_packed_file(backend, file.folder, key):
        yield f"published a version without {key}; its rows count as not done"
    if file.kind == "size" and (num_removed or missing):
        # Its name has all its content.
        set_size(backend, file.folder, file.number, durability="full")
        yield f"wrote {key} again"
