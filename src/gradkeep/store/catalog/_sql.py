"""SQL over a store: DuckDB in memory, offline, read-only.

| view | a row for every |
| --- | --- |
| `samples` | sample of every sealed capture: run, checkpoint, split, capture, id, all scalars |
| `captures`, `scores` | capture, saved scores, sealed or not |
| `runs`, `checkpoints` | recorded run, recorded checkpoint |

Only the views that a query names are loaded, and of `samples` only the columns it needs. Captures may
have different scalars: missing ones are NULL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from gradkeep._display import html_table, text_table
from gradkeep._environment import import_extra
from gradkeep.errors import DamagedError, ReadOnlyError, StoreError
from gradkeep.store.catalog._scan import scan_blocks, scan_checkpoints, scan_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradkeep.store._store import Store
    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._block import Block
    from gradkeep.store.catalog._scan import BlockFacts, CheckpointFacts, RunFacts

_SHOWN_ROWS = 20
_SHOWN_CHARACTERS = 60

_Record = TypeVar("_Record", "RunFacts", "CheckpointFacts")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SqlResult:
    """Result of a query: `.rows()`, `.arrow()`, `.to_pandas()`; prints as a table."""

    _table: Any

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._table.column_names)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return all rows as tuples of Python values; NULL is None."""
        columns = [column.to_pylist() for column in self._table.columns]
        return list(zip(*columns, strict=True))

    def arrow(self) -> Any:
        """Return the result as a `pyarrow.Table`, without a copy."""
        return self._table

    def to_pandas(self) -> Any:
        """Return the result as a `pandas.DataFrame`."""
        return self._table.to_pandas()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def text(self, *, limit: int | None = None, width: int | None = None) -> str:
        """Format the first `limit` rows (or all) as a table with cells of at most `width` characters."""
        cells, right = self._cells(limit, width)
        shown = text_table(self.columns, cells, right=right)
        num_hidden = len(self) - len(cells)
        return shown if num_hidden <= 0 else f"{shown}\n... {num_hidden} more rows"

    def __repr__(self) -> str:
        return self.text(limit=_SHOWN_ROWS, width=_SHOWN_CHARACTERS)

    def _repr_html_(self) -> str:
        cells, right = self._cells(_SHOWN_ROWS, _SHOWN_CHARACTERS)
        num_hidden = len(self) - len(cells)
        more = f"<p>{num_hidden} more rows</p>" if num_hidden > 0 else ""
        return html_table(self.columns, cells, right=right) + more

    def _cells(self, limit: int | None, width: int | None) -> tuple[list[list[str]], set[int]]:
        import pyarrow.types as kinds

        shown = SqlResult(self._table if limit is None else self._table.slice(0, limit)).rows()
        types = enumerate(self._table.schema.types)
        numbers = (kinds.is_integer, kinds.is_floating, kinds.is_decimal)
        right = {at for at, kind in types if any(is_kind(kind) for is_kind in numbers)}
        return [[_cell(value, width) for value in row] for row in shown], right


def _cell(value: object, width: int | None) -> str:
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if width is None:
        return text  # unchanged: the plan of EXPLAIN has line breaks
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else f"{text[: width - 1]}…"


_CAPTURE = dict.fromkeys(("run", "checkpoint", "split", "capture"), "string")
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


def _captures(backend: Backend) -> Iterator[dict[str, object]]:
    for facts in scan_blocks(backend, "capture"):
        yield facts.address.capture.labels | _block(facts)


def _scores(backend: Backend) -> Iterator[dict[str, object]]:
    for facts in scan_blocks(backend, "scores"):
        yield {"name": facts.address.name} | _block(facts)


def _runs(backend: Backend) -> Iterator[dict[str, object]]:
    for run in scan_runs(backend):
        config = json.dumps(_readable(run).config)
        yield {"run": run.name, "config": config, "code": run.code, "data": run.data}


def _checkpoints(backend: Backend) -> Iterator[dict[str, object]]:
    for checkpoint in scan_checkpoints(backend):
        yield {"checkpoint": checkpoint.name} | dataclasses.asdict(_readable(checkpoint))


_TABLES: dict[str, tuple[dict[str, str], Callable[[Backend], Iterator[dict[str, object]]]]] = {
    "captures": (_CAPTURE | _BLOCK, _captures),
    "scores": ({"name": "string"} | _BLOCK, _scores),
    "runs": (dict.fromkeys(("run", "config", "code", "data"), "string"), _runs),
    "checkpoints": (
        {"run": "string", "checkpoint": "string", "weights": "string", "step": "int64"}
        | {"lr": "float64", "parent": "string"},
        _checkpoints,
    ),
}
"""Columns and rows of each table except `samples`."""


def _readable(record: _Record) -> _Record:
    """Return the record; raise if it cannot be read, as a result without it would be wrong."""
    if record.problem is not None:
        raise DamagedError(record.problem, code="store.unreadable_record")
    return record


def _block(facts: BlockFacts) -> dict[str, object]:
    when = datetime.fromtimestamp(facts.modified, UTC).replace(tzinfo=None)
    return {name: getattr(facts, name, None) for name in _BLOCK} | {
        "segments": facts.num_segments,
        "layers": len(facts.layers),
        "modified": when if facts.modified else None,
        "fingerprints": json.dumps(dict(facts.fingerprints)),
    }


def _schema(columns: dict[str, str]) -> Any:
    import pyarrow as pa

    known = {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "timestamp": pa.timestamp("us"),
    }
    return pa.schema([(name, known[kind]) for name, kind in columns.items()])


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
    """Return a capture's scalars as Parquet: mapped and checked, or derived from the segments."""
    assert capture.version is not None
    address, backend = capture.address, store.backend
    name = find_samples(backend, address.folder, capture.version)
    if name is not None:
        with contextlib.closing(backend.open(name)) as file:
            data = file.map()
        check_samples(data, name.rpartition("/")[2], path=backend.describe(name))
        return data
    block = store.read(address.capture, version=capture.version)
    return ensure_samples(backend, block, address.capture.labels, durability=store.durability)


def _samples_schema(sealed: Sequence[BlockFacts]) -> Any:
    """Return the schema of `samples`: labels, id, and every scalar in a type that fits all captures."""
    import pyarrow as pa

    types: dict[str, list[str]] = {}
    texts: set[str] = set()
    for capture in sealed:
        for array in capture.arrays:
            if array.is_text:
                texts.add(array.name)
            if not array.shape and not array.ragged:
                types.setdefault(array.name, []).append(array.dtype)
    fields = [(name, pa.string()) for name in ("run", "checkpoint", "split", "capture")]
    fields.append(("id", pa.int64()))
    fields += [(name, pa.string()) for name in sorted(texts)]
    for name, dtypes in types.items():
        if name in texts:
            continue  # a number in one capture and a text in another: shown as text
        dtype = np.result_type(*dtypes)
        # DuckDB has no half precision.
        wide = np.dtype("float32") if dtype == np.float16 else dtype
        fields.append((name, pa.from_numpy_dtype(wide)))
    return pa.schema(fields)


_READING = ("SELECT", "EXPLAIN", "PRAGMA", "MULTI")  # MULTI: PIVOT over values not known yet
_CLOSED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # a query must not see the caller's variables
    "temp_directory": "",  # nothing is spilled to disk
    "lock_configuration": "true",
}


def sql(store: Store, query: str) -> SqlResult:
    """Run one reading statement over the store's views."""
    duckdb = import_extra("duckdb", extra="sql", what="SQL")
    import_extra("pyarrow", extra="sql", what="SQL")
    connection = duckdb.connect(":memory:", config=_CLOSED)
    try:
        view_names = _views_in(connection, query)
        _register(connection, store, view_names)
        return SqlResult(_whole_numbers(_interruptible(connection, query)))
    except duckdb.Error as error:
        raise StoreError(
            str(error).strip(),
            code="store.sql_error",
            expected="tables samples, captures, scores, runs, checkpoints",
            fix="List the columns of a table with DESCRIBE, for example `DESCRIBE samples`.",
        ) from None
    finally:
        connection.close()


def _interruptible(connection: Any, query: str) -> Any:
    """Run the query in a thread, because DuckDB does not react to every interrupt."""

    def answer() -> Any:
        relation = connection.sql(query)
        if relation is None:
            raise StoreError(
                "the statement returns no rows", code="store.sql_no_rows", fix="Use SELECT."
            )
        return relation.to_arrow_table()

    with ThreadPoolExecutor(1, thread_name_prefix="gradkeep-sql") as pool:
        future = pool.submit(answer)
        try:
            return future.result()
        except KeyboardInterrupt:
            # Repeat until it ends: an interrupt before the query has begun is lost.
            while not wait([future], timeout=0.05).done:
                connection.interrupt()
            raise


def _views_in(connection: Any, query: str) -> set[str]:
    """Return the views that a query names, after checking that it only reads."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise StoreError(
            "only one statement can be run",
            code="store.sql_statements",
            found=f"{len(statements)} statements",
            expected="1",
        )
    kind = statements[0].type.name
    if kind not in _READING:
        raise StoreError(
            "SQL can only read a store",
            code="store.sql_not_reading",
            found=f"{kind} statement",
            expected="SELECT, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN or PRAGMA",
            fix="Write to a store with gk.capture or store.write.",
        )
    import duckdb

    try:
        # The connection has no tables yet, so every name that is not a CTE is one of the views.
        return {str(name).lower() for name in connection.get_table_names(query)}
    except duckdb.Error:
        # Some statements cannot be analyzed before their tables exist.
        return {word.lower() for word in re.findall(r"\w+", query)}


def _register(connection: Any, store: Store, view_names: set[str]) -> None:
    """Register all views; views that the query does not name are empty, for SHOW and DESCRIBE."""
    import pyarrow as pa

    for name, (columns, rows) in _TABLES.items():
        listed = list(rows(store.backend)) if name in view_names else []
        connection.register(name, pa.Table.from_pylist(listed, schema=_schema(columns)))
    captures = scan_blocks(store.backend, "capture")
    sealed = [capture for capture in captures if capture.version is not None]
    schema = _samples_schema(sealed)
    samples = _all_samples(store, sealed if "samples" in view_names else [], schema)
    connection.register("samples", samples)


def _whole_numbers(table: Any) -> Any:
    """Convert sums of integers, which DuckDB returns as wide decimals, to int64."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            with contextlib.suppress(pa.ArrowInvalid):  # too large: keep the decimal
                table = table.set_column(at, field.name, table.column(at).cast(pa.int64()))
    return table


_PREFIX = "samples-"
_SUFFIX = ".parquet"


def find_samples(backend: Backend, folder: str, version: int) -> str | None:
    """Return the key of a version's Parquet file, or None."""
    start = f"{_PREFIX}{version:06d}-"
    for entry in backend.list(folder):
        if entry.name.startswith(start) and entry.name.endswith(_SUFFIX):
            return f"{folder}/{entry.name}"
    return None


def is_samples(name: str) -> bool:
    """Return True for the name of a Parquet file of samples."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def check_samples(data: bytes | memoryview, name: str, *, path: str) -> None:
    """Raise `DamagedError` unless the bytes match the digest in the name."""
    if xxhash.xxh3_128_hexdigest(data) != name.removesuffix(_SUFFIX).rpartition("-")[2]:
        raise DamagedError(
            "the Parquet file does not match its checksum",
            path=path,
            fix="Delete it, or run `gradkeep verify STORE --repair`: it is recreated when needed.",
        )


def is_tied(name: str, block: Block) -> bool | None:
    """Return True if a file name belongs to this version; None for names of earlier versions."""
    parts = name.removesuffix(_SUFFIX).split("-")
    return None if len(parts) != 4 else parts[2] == _tie(block, parts[3])


def _tie(block: Block, digest: str) -> str:
    tied = f"{block.folder} {block.manifest.digest} {digest}"
    return xxhash.xxh3_64_hexdigest(tied.encode())


def samples_table(block: Block, labels: Mapping[str, str]) -> Any:
    """Build an Arrow table: the labels, `id`, and every array with one value or text per row."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    columns: dict[str, Any] = {}
    for name, value in labels.items():
        indices = _column(pa, np.zeros(len(block), np.int32))
        columns[name] = pa.DictionaryArray.from_arrays(indices, _text_column(pa, [value]))
    columns |= {name: _column(pa, values) for name, values in _scalars(block).items()}
    columns |= {name: _text_column(pa, values) for name, values in _texts(block).items()}
    return pa.Table.from_pydict(columns)


def _column(pa: Any, values: np.ndarray[Any, Any]) -> Any:
    """Build an Arrow array from memory; `pa.array` would import pandas."""
    bits = values.dtype == np.bool_
    memory = np.packbits(values, bitorder="little") if bits else np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(memory)])


def _text_column(pa: Any, texts: list[str]) -> Any:
    parts = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, parts)])
    if bounds[-1] > np.iinfo(np.int32).max:
        return pa.array(texts, pa.string())  # more than one array holds
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _texts(block: Block) -> dict[str, list[str]]:
    """Read every array that holds a text per row."""
    return {array.name: block.column(array.name) for array in block.schema.arrays if array.is_text}


def _scalars(block: Block) -> dict[str, np.ndarray[Any, Any]]:
    """Read the ids `[N]` and every array that holds one value per row."""
    names = [array.name for array in block.schema.arrays if not array.shape and not array.ragged]
    parts: dict[str, list[Any]] = {name: [] for name in ("id", *names)}
    for batch in block.stream(names):
        parts["id"].append(batch.ids)
        for name in names:
            parts[name].append(batch[name])
    columns = {}
    for name, pieces in parts.items():
        dtype = "int64" if name == "id" else block.schema.array(name).dtype
        columns[name] = np.concatenate([np.empty(0, dtype), *pieces])
    return columns


def holds_samples_of(data: bytes, block: Block, labels: Mapping[str, str], *, path: str) -> bool:
    """Return True if Parquet bytes hold exactly the labels, ids and scalars of a version."""
    pa = import_extra("pyarrow", extra="sql", what="Parquet")
    import pyarrow.parquet as pq

    try:
        # Without threads: remaining threads of pyarrow can abort a process that ends at once.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(
            "the Parquet file cannot be read",
            code="store.unreadable_samples",
            path=path,
            found=str(error)[:200],
        ) from error
    expected = samples_table(block, labels)
    # As text: NaN is not equal to itself.
    return table.column_names == expected.column_names and all(
        str(table.column(name).to_pylist()) == str(expected.column(name).to_pylist())
        for name in expected.column_names
    )


def ensure_samples(
    backend: Backend, block: Block, labels: Mapping[str, str], *, durability: Durability
) -> bytes:
    """Return the Parquet bytes of a version: read and checked, or created and saved."""
    key = find_samples(backend, block.folder, block.version)
    if key is not None:
        data = backend.read(key)
        check_samples(data, key.rpartition("/")[2], path=backend.describe(key))
        return data
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    # A dictionary of ids, which all differ, would only cost time.
    texts = [array.name for array in block.schema.arrays if array.is_text]
    pq.write_table(
        samples_table(block, labels),
        buffer,
        compression="zstd",
        use_dictionary=[*labels, *texts],
    )
    data = buffer.getvalue()
    digest = xxhash.xxh3_128_hexdigest(data)
    name = f"{_PREFIX}{block.version:06d}-{_tie(block, digest)}-{digest}{_SUFFIX}"
    # A read-only store can still be queried.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(f"{block.folder}/{name}", [data], durability=durability)
    return data


def samples_available() -> bool:
    """Return True if pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None
