"""The catalog: facts about every block in SQLite tables, brought up to date when asked for.

A cache and never the truth: it can be deleted at any moment and is made again from the files. It
lives in memory; on disk is a copy of it that is only ever replaced as a whole, so that no lock is
needed and no journal is left behind, on any filesystem. That copy is the SQLite file followed by its
xxh3-128, so a torn, damaged or foreign file is noticed and made again. SQLite ignores the 16 bytes.
A checksum is no signature: before anything in it is asked, the copy must have exactly our tables (no
view or trigger that could run for ever), sound pages, and values of the right types.

Only what changed is looked at again. A folder's stamp changes when a name in it comes or goes, and
files never change, so a block whose folders all carry the stamps of the last scan is as it was. A
stamp younger than two seconds at the time of the scan proves nothing, as a later change may fall
into the same tick of the clock: such a block is looked at again.
"""

from __future__ import annotations

import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any, Self, get_args

import xxhash

from gradkeep.errors import StoreError
from gradkeep.store._document import LARGEST_WHOLE
from gradkeep.store._keys import CATALOG
from gradkeep.store.blocks._schema import Array
from gradkeep.store.catalog._scan import (
    LATEST,
    BlockAddress,
    BlockFacts,
    BlockKind,
    BlockState,
    CheckpointFacts,
    LayerFacts,
    RunFacts,
    SegmentFacts,
    block_addresses,
    scan_block,
    scan_checkpoints,
    scan_runs,
    watched_folders,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradkeep.store._store import Store
    from gradkeep.store.catalog._scan import ScannedBlock

# Without row numbers every table is ordered by its key: the same facts give the same dump,
# whatever the order in which they were found.
_TABLES = """
create table store (uuid text primary key) without rowid;
create table runs (
    name text primary key, config text, code text, data text, problem text
) without rowid;
create table checkpoints (
    run text, name text, weights text, step integer, lr real, parent text, problem text,
    primary key (run, name)
) without rowid;
create table blocks (
    folder text primary key, kind text, name text, run text, checkpoint text, split text,
    state text, problem text, version integer, rows integer, num_rows integer,
    unsealed_rows integer, num_segments integer, data_bytes integer, bytes integer,
    modified real, schema_hash text, fingerprints text
) without rowid;
create table layers (
    block text, position integer, name text, type text, parameters integer, row_bytes real,
    primary key (block, position)
) without rowid;
create table arrays (
    block text, position integer, name text, dtype text, shape text, kind text, encoding text,
    layer text, ragged integer, compression text, nan text,
    primary key (block, position)
) without rowid;
create table segments (
    block text, file text, rows integer, bytes integer, xxh3 text, sealed integer, modified real,
    primary key (block, file)
) without rowid;
create table stamps (
    block text, folder text, stamp integer, primary key (block, folder)
) without rowid;
"""
_ADDRESS = "kind, name, run, checkpoint, split"
_STATE = (
    "state, problem, version, rows, num_rows, unsealed_rows, num_segments, data_bytes, bytes, "
    "modified, schema_hash"
)
_OF_BLOCKS = ("layers", "arrays", "segments", "stamps")


class Catalog:
    """What a store holds, by SQL or as facts; a context manager that lets go of its memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    @classmethod
    def empty(cls, uuid: str) -> Self:
        """A catalog of a store of which nothing is known yet."""
        catalog = cls(new_connection())
        catalog.connection.executescript(_TABLES)
        catalog.connection.execute("insert into store values (?)", (uuid,))
        return catalog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory."""
        self.connection.close()

    def runs(self) -> list[RunFacts]:
        """The recorded runs, by name."""
        rows = self._all("select name, config, code, data, problem from runs order by name")
        return [
            RunFacts(name, None if config is None else json.loads(config), *rest)
            for name, config, *rest in rows
        ]

    def checkpoints(self) -> list[CheckpointFacts]:
        """The recorded checkpoints, by run, step and name."""
        rows = self._all(
            "select run, name, weights, step, lr, parent, problem from checkpoints "
            "order by run, step, name"
        )
        return [CheckpointFacts(*row) for row in rows]

    def blocks(self, *kinds: BlockKind) -> list[BlockFacts]:
        """The blocks of these kinds (or all), by folder."""
        layers, arrays = self._layers(), self._arrays()
        rows = self._all(f"select {_ADDRESS}, {_STATE}, fingerprints from blocks order by folder")
        found = []
        for kind, name, run, checkpoint, split, *state, fingerprints in rows:
            if not kinds or kind in kinds:
                address = BlockAddress(kind, name, run, checkpoint, split)
                lists = tuple(layers.get(address.folder, ())), tuple(arrays.get(address.folder, ()))
                found.append(BlockFacts(address, *(*state, json.loads(fingerprints), *lists)))
        return found

    def segments(self, folder: str) -> list[SegmentFacts]:
        """The segments of one block, by name."""
        rows = self._all(
            "select file, rows, bytes, xxh3, sealed, modified from segments "
            "where block = ? order by file",
            folder,
        )
        return [
            SegmentFacts(file, count, size, xxh3, sealed=bool(sealed), modified=modified)
            for file, count, size, xxh3, sealed, modified in rows
        ]

    def dump(self) -> list[str]:
        """The content as SQL, line by line; the same files give the same lines.

        Stamps are left out: they say when a folder changed, not what is in it.
        """
        return [
            line
            for line in self.connection.iterdump()
            if not line.startswith('INSERT INTO "stamps')
        ]

    def stamps(self) -> dict[str, dict[str, int | None]]:
        """For every block the stamps of its folders at the last scan; None if not to be trusted."""
        found: dict[str, dict[str, int | None]] = {}
        for block, folder, stamp in self._all("select block, folder, stamp from stamps"):
            found.setdefault(block, {})[folder] = stamp
        return found

    def put_records(self, runs: Sequence[RunFacts], checkpoints: Sequence[CheckpointFacts]) -> bool:
        """Take over the recorded runs and checkpoints; whether they differ from those before."""
        before = self._all("select * from runs"), self._all("select * from checkpoints")
        self.connection.execute("delete from runs")
        self.connection.execute("delete from checkpoints")
        self._insert("runs", [(x.name, _json(x.config), x.code, x.data, x.problem) for x in runs])
        self._insert(
            "checkpoints",
            [(x.run, x.name, x.weights, x.step, x.lr, x.parent, x.problem) for x in checkpoints],
        )
        return before != (self._all("select * from runs"), self._all("select * from checkpoints"))

    def put_block(self, scanned: ScannedBlock, stamps: Mapping[str, int | None]) -> None:
        """Take over one block in place of what was known about it."""
        facts, address = scanned.facts, scanned.facts.address
        folder = address.folder
        self.drop_block(folder)
        where = (folder, address.kind, address.name, address.run, address.checkpoint, address.split)
        state = (facts.state, facts.problem, facts.version, facts.rows, facts.num_rows)
        sizes = (facts.unsealed_rows, facts.num_segments, facts.data_bytes, facts.bytes)
        made_from = (facts.modified, facts.schema_hash, _json(facts.fingerprints))
        self._insert("blocks", [(*where, *state, *sizes, *made_from)])
        self._insert(
            "layers",
            [
                (folder, position, x.name, x.type, x.parameters, x.row_bytes)
                for position, x in enumerate(facts.layers)
            ],
        )
        self._insert(
            "arrays",
            [(folder, position, *_array_row(x)) for position, x in enumerate(facts.arrays)],
        )
        self._insert(
            "segments",
            [
                (folder, x.file, x.rows, x.bytes, x.xxh3, x.sealed, x.modified)
                for x in scanned.segments
            ],
        )
        self._insert("stamps", [(folder, name, stamp) for name, stamp in stamps.items()])

    def drop_block(self, folder: str) -> None:
        """Forget a block."""
        self.connection.execute("delete from blocks where folder = ?", (folder,))
        for table in _OF_BLOCKS:
            self.connection.execute(f"delete from {table} where block = ?", (folder,))

    def _layers(self) -> dict[str, list[LayerFacts]]:
        found: dict[str, list[LayerFacts]] = {}
        query = (
            "select block, name, type, parameters, row_bytes from layers order by block, position"
        )
        for block, *rest in self._all(query):
            found.setdefault(block, []).append(LayerFacts(*rest))
        return found

    def _arrays(self) -> dict[str, list[Array]]:
        found: dict[str, list[Array]] = {}
        query = (
            "select block, name, dtype, shape, kind, encoding, layer, ragged, compression, nan "
            "from arrays order by block, position"
        )
        for block, name, dtype, shape, kind, encoding, layer, ragged, *rest in self._all(query):
            made = Array(
                name, dtype, tuple(json.loads(shape)), kind, encoding, layer, bool(ragged), *rest
            )
            found.setdefault(block, []).append(made)
        return found

    def _all(self, query: str, *values: object) -> list[Any]:
        return self.connection.execute(query, values).fetchall()

    def _insert(self, table: str, found: Iterable[tuple[object, ...]]) -> None:
        rows = [tuple(map(_storable, row)) for row in found]
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self.connection.executemany(f"insert into {table} values ({marks})", rows)


def new_connection() -> sqlite3.Connection:
    """A database in memory; in autocommit, as nobody else can see it."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def _array_row(array: Array) -> tuple[object, ...]:
    shape = json.dumps(array.shape)
    kind = (array.dtype, shape, array.kind, array.encoding, array.layer)
    return (array.name, *kind, array.ragged, array.compression, array.nan)


def _storable(value: object) -> object:
    """A value as SQLite takes it: text without lone surrogates, whole numbers that fit."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -LARGEST_WHOLE <= value <= LARGEST_WHOLE:
        return LARGEST_WHOLE if value > 0 else -LARGEST_WHOLE
    return value


def _json(fields: Mapping[str, object] | None) -> str | None:
    return None if fields is None else json.dumps(fields, ensure_ascii=False)


_FORMAT = 2
_TYPES = {
    "TEXT": "('text', 'null')",
    "INTEGER": "('integer', 'null')",
    "REAL": "('real', 'integer', 'null')",
}
_DIGEST_BYTES = 16
_MOST_BYTES = 1 << 30
"""A larger file is no catalog: 100,000 segments take 6 MB."""
_SETTLED_NS = 2_000_000_000


def current_catalog(store: Store) -> Catalog:
    """The catalog as the files are now; kept beside them where the backend takes writes."""
    catalog = load_catalog(store)
    fresh = catalog is None
    if catalog is None:
        catalog = Catalog.empty(store.uuid)
    if refresh_catalog(store, catalog) or fresh:
        save_catalog(store, catalog)
    return catalog


def rebuilt_catalog(store: Store) -> Catalog:
    """The catalog made from nothing but the files, in place of the one that is kept."""
    catalog = Catalog.empty(store.uuid)
    refresh_catalog(store, catalog)
    save_catalog(store, catalog)
    return catalog


def refresh_catalog(store: Store, catalog: Catalog) -> bool:
    """Look at every block that may have changed; whether any of them did, or was uncertain."""
    backend = store.backend
    connection = catalog.connection
    connection.execute("begin")
    changed = catalog.put_records(scan_runs(backend), scan_checkpoints(backend))
    before = catalog.stamps()
    gone = set(before)
    for address in block_addresses(backend):
        # Before the scan: what comes while we scan changes the stamp of the next time.
        stamps = _stamps(store, address)
        known = before.get(address.folder)
        if known is not None and known == stamps and None not in stamps.values():
            gone.discard(address.folder)
            continue
        segments = {} if known is None else _by_file(catalog, address.folder)
        scanned = scan_block(backend, address, segments)
        if scanned is not None:
            gone.discard(address.folder)
            catalog.put_block(scanned, stamps)
            changed = True
    for folder in gone:
        catalog.drop_block(folder)
    connection.execute("commit")
    return changed or bool(gone)


def load_catalog(store: Store) -> Catalog | None:
    """The catalog that is kept; None if there is none that can be used."""
    if not hasattr(sqlite3.Connection, "deserialize"):
        return None  # SQLite before 3.36: scan every time
    try:
        opened = store.backend.open(CATALOG)
        try:
            data = opened.read(0, opened.size) if opened.size <= _MOST_BYTES else b""
        finally:
            opened.close()
    except (OSError, StoreError, MemoryError):
        return None
    content = data[:-_DIGEST_BYTES]
    if not content or xxhash.xxh3_128_digest(content) != data[-_DIGEST_BYTES:]:
        return None
    connection = new_connection()
    try:
        connection.deserialize(content)
        usable = _is_ours(connection, store.uuid)
    except (sqlite3.Error, OverflowError, ValueError, TypeError, RecursionError, StoreError):
        usable = False
    if not usable:
        connection.close()
        return None
    return Catalog(connection)


def _is_ours(connection: sqlite3.Connection, uuid: str) -> bool:
    """Whether a database has our tables and nothing else, whole and with values of their types."""
    connection.execute("pragma trusted_schema = off")
    layout = "select type, name, tbl_name, sql from sqlite_master order by type, name"
    with Catalog.empty(uuid) as ours:
        if connection.execute(layout).fetchall() != ours.connection.execute(layout).fetchall():
            return False
        columns = {
            table: ours.connection.execute(f"pragma table_info({table})").fetchall()
            for (table,) in ours.connection.execute("select name from sqlite_master")
        }
    # A page that is used twice can make a tree of a few pages endless.
    if connection.execute("pragma quick_check(1)").fetchall() != [("ok",)]:
        return False
    if connection.execute("pragma user_version").fetchone()[0] != _FORMAT:
        return False
    for table, described in columns.items():
        odd = " or ".join(
            f"typeof({name}) not in {_TYPES[kind]}" for _, name, kind, *_ in described
        )
        if connection.execute(f"select 1 from {table} where {odd} limit 1").fetchall():
            return False
    for table in ("segments", "stamps"):  # the rest is read below
        odd = " or ".join(f"{name} glob '*[^ -~]*'" for _, name, *_ in columns[table])
        if connection.execute(f"select 1 from {table} where {odd} limit 1").fetchall():
            return False  # text that is none: all names in a store are plain
    if connection.execute("select uuid from store").fetchall() != [(uuid,)]:
        return False
    catalog = Catalog(connection)
    kinds, states = get_args(BlockKind), get_args(BlockState)
    runs, _, blocks = catalog.runs(), catalog.checkpoints(), catalog.blocks()
    return all(
        x.kind in kinds
        and x.state in states
        and isinstance(x.fingerprints, dict)
        and 0 <= x.modified <= LATEST
        for x in blocks
    ) and all(x.config is None or isinstance(x.config, dict) for x in runs)


def save_catalog(store: Store, catalog: Catalog) -> bool:
    """Keep the catalog beside the files; False where the backend takes no writes."""
    if not hasattr(sqlite3.Connection, "serialize"):
        return False
    catalog.connection.execute(f"pragma user_version = {_FORMAT}")
    content = catalog.connection.serialize()
    if len(content) + _DIGEST_BYTES > _MOST_BYTES:
        return False
    return store.backend.replace_cache(CATALOG, content + xxhash.xxh3_128_digest(content))


def _stamps(store: Store, address: BlockAddress) -> dict[str, int | None]:
    now = time.time_ns()
    try:
        watched = watched_folders(store.backend, address)
        stamps = {folder: store.backend.stamp(folder) for folder in watched}
    except StoreError:
        return {address.folder: None}  # the scan says what is wrong
    return {
        folder: stamp if stamp is not None and now - stamp > _SETTLED_NS else None
        for folder, stamp in stamps.items()
    }


def _by_file(catalog: Catalog, folder: str) -> dict[str, SegmentFacts]:
    return {segment.file: segment for segment in catalog.segments(folder)}
