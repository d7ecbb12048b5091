"""SQL over a store: DuckDB in memory, offline, reading only.

| view | a row for every |
| --- | --- |
| `samples` | sample of every sealed capture: run, checkpoint, split, capture, id, all scalars |
| `captures`, `scores` | capture, saved scores, sealed or not |
| `runs`, `checkpoints` | recorded run, recorded checkpoint |

Only what a query names is loaded, and of `samples` only the columns it needs. Captures may have
different scalars: what one of them lacks is NULL there.
"""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from gradkeep.errors import MissingExtra, SqlError
from gradkeep.store import _refresh, _views
from gradkeep.store._result import Result

if TYPE_CHECKING:
    from gradkeep.store._store import Store

_READING = ("SELECT", "EXPLAIN", "PRAGMA", "MULTI")  # MULTI: PIVOT over values not known yet
_CLOSED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # a query must not see the caller's variables
    "temp_directory": "",  # nothing is spilled to disk
    "lock_configuration": "true",
}


def sql(store: Store, query: str) -> Result:
    """Run one reading statement over the store's views."""
    duckdb = _duckdb()
    connection = duckdb.connect(":memory:", config=_CLOSED)
    try:
        wanted = _views_in(connection, query)
        _register(connection, store, wanted)
        return Result(_whole_numbers(_interruptible(connection, query)))
    except duckdb.Error as error:
        raise SqlError(
            str(error).strip(),
            expected="tables samples, captures, scores, runs, checkpoints",
            fix="DESCRIBE samples lists the columns of a table",
        ) from None
    finally:
        connection.close()


def _interruptible(connection: Any, query: str) -> Any:
    """Run the query in a thread: DuckDB itself does not notice every interrupt, we do."""

    def answer() -> Any:
        relation = connection.sql(query)
        if relation is None:
            raise SqlError("the statement gives no rows", fix="begin with SELECT")
        return relation.to_arrow_table()

    with ThreadPoolExecutor(1, thread_name_prefix="gradkeep-sql") as pool:
        future = pool.submit(answer)
        try:
            return future.result()
        except KeyboardInterrupt:
            # Until it ends: an interrupt that comes before the query has begun is forgotten.
            while not wait([future], timeout=0.05).done:
                connection.interrupt()
            raise


def _views_in(connection: Any, query: str) -> set[str]:
    """The views that a query names, after checking that it only reads."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise SqlError(
            "one statement at a time", found=f"{len(statements)} statements", expected="1"
        )
    kind = statements[0].type.name
    if kind not in _READING:
        raise SqlError(
            "a store is only read by SQL; nothing was done",
            found=f"{kind} statement",
            expected="SELECT, DESCRIBE, SHOW, SUMMARIZE, EXPLAIN or PRAGMA",
            fix="write to a store with gk.capture or store.write",
        )
    import duckdb

    try:
        # The connection holds no table yet, so every name that is not a CTE is one of ours.
        return {str(name).lower() for name in connection.get_table_names(query)}
    except duckdb.Error:
        # Some statements cannot be taken apart before their tables are there.
        return {word.lower() for word in re.findall(r"\w+", query)}


def _register(connection: Any, store: Store, wanted: set[str]) -> None:
    with _refresh.up_to_date(store) as catalog:
        views = (
            _views.samples(store, catalog.blocks("capture")),
            _views.captures(catalog.blocks("capture")),
            _views.scores(catalog.blocks("scores")),
            _views.runs(catalog.runs()),
            _views.checkpoints(catalog.checkpoints()),
        )
    for view in views:
        # Views that the query does not name are there, for SHOW and DESCRIBE, but empty.
        content = view.load() if view.name in wanted else view.schema.empty_table()
        connection.register(view.name, content)


def _whole_numbers(table: Any) -> Any:
    """The table with sums of whole numbers as int64; DuckDB hands them over as wide decimals."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            with contextlib.suppress(pa.ArrowInvalid):  # it does not fit: the decimal stays
                table = table.set_column(at, field.name, table.column(at).cast(pa.int64()))
    return table


def _duckdb() -> Any:
    try:
        import duckdb
        import pyarrow  # noqa: F401 - what DuckDB reads from and answers with
    except ImportError as error:
        raise MissingExtra(
            "SQL needs duckdb and pyarrow", found=str(error), fix='pip install "gradkeep[sql]"'
        ) from error
    return duckdb
