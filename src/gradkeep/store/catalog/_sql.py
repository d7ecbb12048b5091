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
import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradkeep._display import html_table, text_table
from gradkeep._environment import import_extra
from gradkeep.errors import DamagedError, StoreError
from gradkeep.store.catalog._samples import check_samples, ensure_samples, find_samples
from gradkeep.store.catalog._scan import scan_blocks, scan_checkpoints, scan_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradkeep.store._store import Store
    from gradkeep.store.backends._backend import Backend
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
        raise DamagedError(
            record.problem,
            code="store.unreadable_record",
            fix="Move it aside with `gradkeep verify STORE --repair`.",
        )
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
