"""The tables that SQL sees: for each its columns, and how to load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradkeep.errors import Damaged
from gradkeep.store import _samples
from gradkeep.store._names import CaptureKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradkeep.store._facts import BlockFacts, CheckpointFacts, RunFacts
    from gradkeep.store._store import Store

_Record = TypeVar("_Record", "RunFacts", "CheckpointFacts")


@dataclass(frozen=True, slots=True)
class View:
    """A table by name; `load` gives an Arrow table or data set of that schema."""

    name: str
    schema: Any
    load: Callable[[], Any]


def samples(store: Store, captures: Sequence[BlockFacts]) -> View:
    """A row for every sample of the newest version of every capture."""
    sealed = [capture for capture in captures if capture.version is not None]
    schema = _samples_schema(sealed)
    return View("samples", schema, lambda: _all_samples(store, sealed, schema))


def captures(found: Sequence[BlockFacts]) -> View:
    """A row for every capture, sealed or not."""
    names = ("run", "checkpoint", "split", "capture")
    schema = _schema({**dict.fromkeys(names, "string"), **_BLOCK})
    return View(
        "captures",
        schema,
        lambda: _table(
            schema,
            (
                (x.place.run, x.place.checkpoint, x.place.split, x.place.name, *_block(x))
                for x in found
            ),
        ),
    )


def scores(found: Sequence[BlockFacts]) -> View:
    """A row for every block of saved scores."""
    schema = _schema({"name": "string", **_BLOCK})
    return View(
        "scores", schema, lambda: _table(schema, ((x.place.name, *_block(x)) for x in found))
    )


def runs(found: Sequence[RunFacts]) -> View:
    """A row for every recorded run."""
    schema = _schema(dict.fromkeys(("run", "config", "code", "data"), "string"))
    return View(
        "runs",
        schema,
        lambda: _table(
            schema,
            ((x.name, json.dumps(x.config), x.code, x.data) for x in _readable(found)),
        ),
    )


def checkpoints(found: Sequence[CheckpointFacts]) -> View:
    """A row for every recorded checkpoint."""
    schema = _schema(
        {"run": "string", "checkpoint": "string", "weights": "string", "step": "int64"}
        | {"lr": "float64", "parent": "string"}
    )
    return View(
        "checkpoints",
        schema,
        lambda: _table(
            schema,
            ((x.run, x.name, x.weights, x.step, x.lr, x.parent) for x in _readable(found)),
        ),
    )


def _readable(found: Sequence[_Record]) -> Sequence[_Record]:
    """The records; raises if one cannot be read, as an answer without it would be wrong."""
    for record in found:
        if record.problem is not None:
            raise Damaged(
                record.problem, fix="`gradkeep verify STORE --repair` moves the file aside"
            )
    return found


_BLOCK = {
    "state": "string",
    "problem": "string",
    "version": "int64",
    "rows": "int64",
    "num_rows": "int64",
    "unsealed_rows": "int64",
    "segments": "int64",
    "bytes": "int64",
    "data_bytes": "int64",
    "dense_bytes": "int64",
    "ratio": "float64",
    "layers": "int64",
    "modified": "timestamp",
    "schema_hash": "string",
    "fingerprints": "string",
}


def _block(facts: BlockFacts) -> tuple[object, ...]:
    when = datetime.fromtimestamp(facts.modified, UTC).replace(tzinfo=None)
    return (
        *(facts.state, facts.problem, facts.version, facts.rows),
        *(facts.num_rows, facts.unsealed_rows, facts.num_segments, facts.bytes),
        *(facts.data_bytes, facts.dense_bytes, facts.ratio, len(facts.layers)),
        *(
            when if facts.modified else None,
            facts.schema_hash,
            json.dumps(dict(facts.fingerprints)),
        ),
    )


def _schema(columns: dict[str, str]) -> Any:
    import pyarrow as pa

    known = {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "timestamp": pa.timestamp("us"),
    }
    return pa.schema([(name, known[kind]) for name, kind in columns.items()])


def _table(schema: Any, rows: Iterable[tuple[object, ...]]) -> Any:
    import pyarrow as pa

    lines = list(rows)
    columns = [[line[at] for line in lines] for at in range(len(schema))]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _all_samples(store: Store, sealed: Sequence[BlockFacts], schema: Any) -> Any:
    import pyarrow as pa
    import pyarrow.dataset as ds

    form = ds.ParquetFileFormat()
    fragments = [
        form.make_fragment(pa.BufferReader(pa.py_buffer(_parquet(store, capture))))
        for capture in sealed
    ]
    return ds.FileSystemDataset(fragments, schema, form) if fragments else schema.empty_table()


def _parquet(store: Store, capture: BlockFacts) -> Any:
    """A capture's scalars as Parquet: mapped and checked, or derived from the segments now."""
    assert capture.version is not None
    place, backend = capture.place, store.backend
    name = _samples.find(backend, place.folder, capture.version)
    if name is not None:
        file = backend.open(name)
        try:
            data = file.map()
        finally:
            file.close()
        _samples.check(data, name.rpartition("/")[2], path=backend.describe(name))
        return data
    key = CaptureKey(
        str(place.checkpoint), str(place.split), run=str(place.run), capture=place.name
    )
    block = store.read(key, version=capture.version)
    return _samples.ensure(backend, block, key.labels, durability=store.durability)


def _samples_schema(sealed: Sequence[BlockFacts]) -> Any:
    """Labels, id, and every scalar of any capture in a type that holds them all."""
    import pyarrow as pa

    types: dict[str, list[str]] = {}
    for capture in sealed:
        for array in capture.arrays:
            if not array.shape and not array.ragged:
                types.setdefault(array.name, []).append(array.dtype)
    fields = [(name, pa.string()) for name in ("run", "checkpoint", "split", "capture")]
    fields.append(("id", pa.int64()))
    for name, dtypes in types.items():
        dtype = np.result_type(*dtypes)
        # DuckDB knows no half precision.
        wide = np.dtype("float32") if dtype == np.float16 else dtype
        fields.append((name, pa.from_numpy_dtype(wide)))
    return pa.schema(fields)
