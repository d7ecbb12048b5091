"""Bring the catalog up to date: look again only at what changed.

A folder's stamp changes when a name in it comes or goes, and files never change, so a block whose
folders all carry the stamps of the last scan is as it was. A stamp younger than two seconds at the
time of the scan proves nothing, as a later change may fall into the same tick of the clock: such a
block is looked at again.

On disk the catalog is the SQLite file followed by its xxh3-128, so a torn, damaged or foreign file
is noticed and made again. SQLite itself ignores the 16 bytes.
"""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING

import xxhash

from gradkeep.store import _scan
from gradkeep.store._catalog import Catalog, new_connection
from gradkeep.store._names import CATALOG

if TYPE_CHECKING:
    from gradkeep.store._facts import Place, SegmentFacts
    from gradkeep.store._store import Store

_FORMAT = 1
_DIGEST_BYTES = 16
_SETTLED_NS = 2_000_000_000


def up_to_date(store: Store) -> Catalog:
    """The catalog as the files are now; kept beside them where the place takes writes."""
    catalog = load(store)
    fresh = catalog is None
    if catalog is None:
        catalog = Catalog.empty(store.uuid)
    if refresh(store, catalog) or fresh:
        save(store, catalog)
    return catalog


def rebuilt(store: Store) -> Catalog:
    """The catalog made from nothing but the files, in place of the one that is kept."""
    catalog = Catalog.empty(store.uuid)
    refresh(store, catalog)
    save(store, catalog)
    return catalog


def refresh(store: Store, catalog: Catalog) -> bool:
    """Look at every block that may have changed; whether any of them did, or was uncertain."""
    backend = store.backend
    connection = catalog.connection
    connection.execute("begin")
    changed = catalog.put_records(_scan.runs(backend), _scan.checkpoints(backend))
    before = catalog.stamps()
    gone = set(before)
    for place in _scan.places(backend):
        # Before the scan: what comes while we look changes the stamp of the next time.
        stamps = _stamps(store, place)
        known = before.get(place.folder)
        if known is not None and known == stamps and None not in stamps.values():
            gone.discard(place.folder)
            continue
        segments = {} if known is None else _by_file(catalog, place.folder)
        scanned = _scan.scan_block(backend, place, segments)
        if scanned is not None:
            gone.discard(place.folder)
            catalog.put_block(scanned, stamps)
            changed = True
    for folder in gone:
        catalog.drop_block(folder)
    connection.execute("commit")
    return changed or bool(gone)


def load(store: Store) -> Catalog | None:
    """The catalog that is kept; None if there is none that can be used."""
    if not hasattr(sqlite3.Connection, "deserialize"):
        return None  # SQLite before 3.36: scan every time
    try:
        data = store.backend.read(CATALOG)
    except OSError:
        return None
    content = data[:-_DIGEST_BYTES]
    if not content or xxhash.xxh3_128_digest(content) != data[-_DIGEST_BYTES:]:
        return None
    connection = new_connection()
    try:
        connection.deserialize(content)
        found = connection.execute("select uuid from store").fetchall()
        version = connection.execute("pragma user_version").fetchone()[0]
    except sqlite3.Error:
        found, version = [], None
    if (found, version) != ([(store.uuid,)], _FORMAT):
        connection.close()
        return None
    return Catalog(connection)


def save(store: Store, catalog: Catalog) -> bool:
    """Keep the catalog beside the files; False where the place takes no writes."""
    if not hasattr(sqlite3.Connection, "serialize"):
        return False
    catalog.connection.execute(f"pragma user_version = {_FORMAT}")
    content = catalog.connection.serialize()
    return store.backend.replace_cache(CATALOG, content + xxhash.xxh3_128_digest(content))


def _stamps(store: Store, place: Place) -> dict[str, int | None]:
    now = time.time_ns()
    stamps = {
        folder: store.backend.stamp(folder)
        for folder in _scan.watched_folders(store.backend, place)
    }
    return {
        folder: stamp if stamp is not None and now - stamp > _SETTLED_NS else None
        for folder, stamp in stamps.items()
    }


def _by_file(catalog: Catalog, folder: str) -> dict[str, SegmentFacts]:
    return {segment.file: segment for segment in catalog.segments(folder)}
