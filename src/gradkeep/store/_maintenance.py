"""Keep a store healthy and small: check every byte, move aside what is damaged, remove what no
kept version needs.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.errors import Damaged, StoreError
from gradkeep.store import _document
from gradkeep.store._keys import CATALOG, ROWS
from gradkeep.store._store import FORMAT, STORE_FILE, VERSION, Store, check_format
from gradkeep.store._store import open as open_store
from gradkeep.store.backends._backend import QUARANTINE
from gradkeep.store.backends._schemes import backend_for
from gradkeep.store.blocks._manifest import (
    MANIFESTS,
    SEGMENTS,
    load_manifest,
    load_schema,
    manifest_key,
    manifest_versions,
    schema_key,
)
from gradkeep.store.blocks._packing import SUFFIX
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.catalog._samples import check_samples, find_samples, is_samples
from gradkeep.store.rows._leases import LEASES
from gradkeep.store.rows._row_files import LOOSE, PACKED, drop_packed_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from gradkeep.store.backends._backend import Backend

_YOUNG_SECONDS = 3600.0
"""A file younger than this may belong to work that has not published its manifest yet."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written."""

    path: str
    """The key of the file in the store."""
    tensor: str | None
    """The tensor inside a segment, if the damage is inside one."""
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of the whole store found."""

    files: int
    bytes: int
    damage: tuple[Damage, ...]
    orphans: tuple[str, ...]
    """Unfinished writes whose writer is gone."""
    unknown: tuple[str, ...]
    """Files that gradkeep did not put there; they are left alone."""
    repaired: tuple[str, ...]
    """What was done, a sentence each."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


def verify(
    store: Store | Backend | str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Read every file of a store and compare it with its checksums; O(bytes).

    With `repair`, damaged files are moved to the store's quarantine, so that running the work again
    recreates exactly them, and unfinished writes are removed. Nothing else is changed. A path is
    best given as it is: a store whose own document is damaged cannot be opened, but checked.

    >>> import gradkeep as gk, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> store = gk.open(folder)
    >>> gk.store.verify(folder).healthy
    True
    """
    backend = store.backend if isinstance(store, Store) else backend_for(store)
    Store.require_some(backend)
    keys = sorted(_walk(backend, ""))
    known = frozenset(keys)
    damage: list[Damage] = []
    unknown: list[str] = []
    size = 0
    for done, key in enumerate(keys):
        if progress is not None:
            progress(done, len(keys))
        # A file can be deleted while we look: compaction, gc and leases do that.
        with contextlib.suppress(FileNotFoundError):
            size += _check(backend, key, known, damage, unknown)
    if progress is not None:
        progress(len(keys), len(keys))
    damage += _missing_schemas(keys)
    orphans = tuple(backend.leftovers(older_than=_YOUNG_SECONDS))
    repaired = _repair(backend, damage, orphans) if repair else ()
    return Verdict(len(keys), size, tuple(damage), orphans, tuple(unknown), repaired)


def _walk(backend: Backend, prefix: str) -> Iterator[str]:
    for entry in backend.list(prefix):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_folder:
            if key != QUARANTINE:
                yield from _walk(backend, key)
        elif not key.startswith((CATALOG, f".{CATALOG}")):
            yield key


def _check(
    backend: Backend, key: str, known: frozenset[str], damage: list[Damage], unknown: list[str]
) -> int:
    """Check one file; returns its size."""
    name = key.rpartition("/")[2]
    if name.endswith(SUFFIX):
        return _check_segment(backend, key, damage)
    data = backend.read(key)
    try:
        if is_samples(name):
            check_samples(data, name, path=key)
        elif name.endswith(".json"):
            _check_document(backend, key, data, known, damage)
        else:
            unknown.append(key)
    except StoreError as error:
        damage.append(Damage(key, None, error.what))
    return len(data)


def _check_segment(backend: Backend, key: str, damage: list[Damage]) -> int:
    try:
        segment = Segment(backend, key)
    except Damaged as error:
        damage.append(Damage(key, None, error.what))
        return 0
    try:
        found = segment.check_everything()
        damage += [Damage(key, error.tensor, error.what) for error in found]
        if not found:
            _check_place(backend, segment, damage)
        return segment.size
    finally:
        segment.close()


def _check_place(backend: Backend, segment: Segment, damage: list[Damage]) -> None:
    """Whether a segment that is whole also lies where it belongs."""
    folder = _block_folder(segment.key)
    try:
        schema = load_schema(backend, folder)
    except StoreError:
        return  # told of the schema itself
    if segment.schema_hash != schema.hash:
        damage.append(Damage(segment.key, None, "it belongs to another schema"))
    loose = f"{folder}/{LOOSE}/" in segment.key
    name = segment.key.rpartition("/")[2].removesuffix(SUFFIX)
    if loose and segment.small("ids").tolist() != [int(name)]:
        damage.append(Damage(segment.key, None, "it holds another row than its name says"))
    path = backend.local_path(segment.key)
    if path is not None:
        _check_by_library(path, segment, damage)


def _check_by_library(path: str, segment: Segment, damage: list[Damage]) -> None:
    """Whether safetensors itself opens the file: other tools must be able to read it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            names = set(opened.keys())
    except SafetensorError as error:
        damage.append(Damage(segment.key, None, f"safetensors cannot read it: {error}"))
        return
    if names != set(segment.extents):
        damage.append(Damage(segment.key, None, "safetensors sees other tensors in it"))


def _check_document(
    backend: Backend, key: str, data: bytes, known: frozenset[str], damage: list[Damage]
) -> None:
    fields = _document.from_bytes(data, path=key)
    if key == STORE_FILE:
        check_format(backend, fields)
        return
    parts = key.split("/")
    if parts[-2] != MANIFESTS:
        return
    folder = "/".join(parts[:-2])
    manifest = load_manifest(backend, folder, int(parts[-1].removesuffix(".json")))
    with contextlib.suppress(StoreError):
        if load_schema(backend, folder).hash != manifest.schema_hash:
            damage.append(Damage(key, None, "it belongs to another schema than its block's"))
    if parts[0] == ROWS and manifest.version not in manifest_versions(backend, folder)[-1:]:
        return  # of packed rows, nobody reads an older version
    for entry in manifest.segments:
        file = f"{folder}/{entry.file}"
        if file not in known and not backend.exists(file):
            damage.append(
                Damage(
                    file, None, f"missing: version {manifest.version} needs its {entry.rows} rows"
                )
            )
            continue
        with contextlib.suppress(Damaged, FileNotFoundError):
            segment = Segment(backend, file)
            segment.close()
            if (segment.digest, segment.rows) != (entry.xxh3, entry.rows):
                what = f"it is not the segment that version {manifest.version} names"
                damage.append(Damage(file, None, what))


def _missing_schemas(keys: list[str]) -> Iterator[Damage]:
    folders = {_block_folder(key) for key in keys if key.endswith(SUFFIX)}
    known = set(keys)
    for folder in sorted(folders):
        if schema_key(folder) not in known:
            yield Damage(schema_key(folder), None, "missing: the segments beside it need it")


def _block_folder(key: str) -> str:
    """The folder of the block that a segment belongs to."""
    parts = key.split("/")
    for part in (SEGMENTS, PACKED, LOOSE):
        if part in parts[2:]:
            return "/".join(parts[: len(parts) - 1 - parts[::-1].index(part)])
    return "/".join(parts[:-1])


def _follow_up(backend: Backend, key: str) -> Iterator[str]:
    """What must change because a file is gone, told in a sentence each."""
    folder, _, name = key.rpartition("/")
    block, _, part = folder.rpartition("/")
    version = name.removesuffix(".json")
    if part == MANIFESTS and version.isdigit():
        # The number will be given again, perhaps to other rows.
        derived = find_samples(backend, block, int(version))
        if derived is not None:
            backend.delete([derived], durability="full")
            yield f"removed {derived}, which was derived from it"
    if part == PACKED and block.startswith(f"{ROWS}/") and drop_packed_file(backend, block, key):
        yield f"published a version without {key}; its rows count as not done"


def _repair(backend: Backend, damage: list[Damage], orphans: tuple[str, ...]) -> tuple[str, ...]:
    done = []
    for key in dict.fromkeys(item.path for item in damage):
        if not backend.exists(key):
            done.append(f"{key} is gone; run the work again to recreate it")
        elif f"/{LEASES}/" in key:
            backend.delete([key], durability="process")
            done.append(f"removed the unreadable lease {key}")
        else:
            done.append(f"moved {key} to {backend.move_aside(key)}")
        if key == STORE_FILE:
            fields = {"format": FORMAT, "version": VERSION, "uuid": str(uuid.uuid4())}
            backend.put_if_absent(key, [_document.to_bytes(fields)], durability="full")
            done.append(f"wrote a new {STORE_FILE}; the store's old uuid is lost")
        done += _follow_up(backend, key)
    if orphans:
        backend.delete(orphans, durability="full")
        done += [f"removed the unfinished write {key}" for key in orphans]
    return tuple(done)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed, or would be."""

    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class _WasteFile:
    key: str
    size: int


def gc(
    store: Store | str | os.PathLike[str], *, keep_versions: int = 1, dry_run: bool = False
) -> GcReport:
    """Remove old versions of every block, the segments only they needed, and unfinished writes.

    Safe at any moment and beside readers and writers: old manifests go first, so that no version
    that is still listed ever lacks a file, and work in progress is recognised by its number or age.
    A reader that holds an old version gets a clear error when it touches a removed segment.
    """
    if keep_versions < 1:
        raise StoreError(
            "at least one version must stay", found=keep_versions, expected="1 or more"
        )
    store = store if isinstance(store, Store) else open_store(store, create=False)
    backend = store.backend
    manifests: list[_WasteFile] = []
    rest = [_WasteFile(key, 0) for key in backend.leftovers(older_than=_YOUNG_SECONDS)]
    kept: list[str] = []
    blocks = [key.folder for key in store.blocks()]
    for folder in (*blocks, *(f"{ROWS}/{name}" for name in store.row_sets())):
        # Listed once: of a version that comes while we look, nothing may go.
        versions = manifest_versions(backend, folder)
        manifests += _old_manifests(backend, folder, versions[:-keep_versions])
        kept += [manifest_key(folder, number) for number in versions[-keep_versions:]]
        if folder in blocks:
            rest += _block_waste(backend, folder, versions[-keep_versions:])
    for name in store.row_sets():
        rest += _row_waste(store, name)
    if not dry_run:
        if store.durability == "full":
            _ensure_durable(backend, kept)
        for items in (manifests, rest):
            backend.delete([item.key for item in items], durability=store.durability)
    everything = (*manifests, *rest)
    return GcReport(tuple(item.key for item in everything), sum(item.size for item in everything))


def _ensure_durable(backend: Backend, manifests: list[str]) -> None:
    """What stays must survive a power cut before anything goes; so must an earlier, killed gc."""
    for key in manifests:
        # Gone if another gc runs beside us, which then has seen to a later one.
        with contextlib.suppress(FileNotFoundError):
            backend.ensure_durable([key])


def _old_manifests(backend: Backend, folder: str, versions: list[int]) -> list[_WasteFile]:
    old = {manifest_key(folder, number) for number in versions}
    listed = backend.list(f"{folder}/{MANIFESTS}")
    items = [_WasteFile(f"{folder}/{MANIFESTS}/{entry.name}", entry.size) for entry in listed]
    return [item for item in items if item.key in old]


def _block_waste(backend: Backend, folder: str, versions: list[int]) -> list[_WasteFile]:
    if not versions:
        return []
    kept = [load_manifest(backend, folder, number) for number in versions]
    needed = {entry.file for manifest in kept for entry in manifest.segments}
    now, waste = time.time(), []
    for entry in backend.list(f"{folder}/{SEGMENTS}"):
        file, name = f"{SEGMENTS}/{entry.name}", entry.name.removesuffix(SUFFIX)
        if file in needed or not entry.name.endswith(SUFFIX):
            continue
        used = name.isdigit() and int(name) < kept[-1].next_segment
        old = not name.isdigit() and now - entry.modified > _YOUNG_SECONDS
        if used or old:
            waste.append(_WasteFile(f"{folder}/{file}", entry.size))
    stay = {f"{manifest.version:06d}" for manifest in kept}
    derived = (entry for entry in backend.list(folder) if is_samples(entry.name))
    waste += [
        _WasteFile(f"{folder}/{entry.name}", entry.size)
        for entry in derived
        if entry.name.split("-")[1] not in stay
    ]
    return waste


def _row_waste(store: Store, name: str) -> list[_WasteFile]:
    """Own files of rows that are packed, and leases of rows that are done."""
    rows, folder, backend = store.rows(name), f"{ROWS}/{name}", store.backend
    packed, done = rows.packed_rows, set(rows.done().tolist())
    waste = []
    for kind, gone in ((LOOSE, packed), (LEASES, done)):
        for bucket in backend.list(f"{folder}/{kind}"):
            for entry in backend.list(f"{folder}/{kind}/{bucket.name}"):
                row = entry.name.partition(".")[0].partition("-")[0]
                if row.isdigit() and int(row) in gone:
                    waste.append(
                        _WasteFile(f"{folder}/{kind}/{bucket.name}/{entry.name}", entry.size)
                    )
    return waste
