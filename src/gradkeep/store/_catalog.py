"""The catalog: facts about every block in SQLite tables.

A cache and never the truth: it can be deleted at any moment and is made again from the files. It
lives in memory; on disk is a copy of it that is only ever replaced as a whole (see `_refresh`), so
that no lock is needed and no journal is left behind, on any filesystem.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Any, Self

from gradkeep.store._facts import (
    BlockFacts,
    CheckpointFacts,
    Kind,
    LayerFacts,
    Place,
    RunFacts,
    SegmentFacts,
)
from gradkeep.store._schema import Array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradkeep.store._facts import Scanned

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
_PLACE = "kind, name, run, checkpoint, split"
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

    def blocks(self, *kinds: Kind) -> list[BlockFacts]:
        """The blocks of these kinds (or all), by folder."""
        layers, arrays = self._layers(), self._arrays()
        rows = self._all(f"select {_PLACE}, {_STATE}, fingerprints from blocks order by folder")
        found = []
        for kind, name, run, checkpoint, split, *state, fingerprints in rows:
            if not kinds or kind in kinds:
                place = Place(kind, name, run, checkpoint, split)
                lists = tuple(layers.get(place.folder, ())), tuple(arrays.get(place.folder, ()))
                found.append(BlockFacts(place, *(*state, json.loads(fingerprints), *lists)))
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

    def put_block(self, scanned: Scanned, stamps: Mapping[str, int | None]) -> None:
        """Take over one block in place of what was known about it."""
        facts, place = scanned.facts, scanned.facts.place
        folder = place.folder
        self.drop_block(folder)
        where = (folder, place.kind, place.name, place.run, place.checkpoint, place.split)
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

    def _insert(self, table: str, rows: Iterable[tuple[object, ...]]) -> None:
        rows = list(rows)
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


def _json(fields: Mapping[str, object] | None) -> str | None:
    return None if fields is None else json.dumps(fields, ensure_ascii=False)
