"""Sets of rows that live as long as one piece of work: how it is divided, not what it leaves."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import xxhash

from gradkeep.errors import StoreError
from gradkeep.farm._run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradkeep.farm._job import Job
    from gradkeep.farm._progress import Progress
    from gradkeep.farm._run import Engine, Outcome
    from gradkeep.store import Rows, Schema, Store


@contextlib.contextmanager
def passing_rows(
    store: Store,
    title: str,
    schema: Schema,
    count: int,
    job: Job,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Callable[[Progress], None] | None = None,
    **limits: Any,
) -> Iterator[tuple[Outcome, Rows]]:
    """Run `job` for `count` rows that nobody else sees, and give the outcome with the rows.

    When the block ends they are deleted. So are those that an earlier process left under the same
    title when it was killed: whatever they say was done is looked for where it belongs, not here.
    """
    prefix = f"passing-{xxhash.xxh3_64_hexdigest(title.encode())}-"
    for old in store.row_sets():
        if old.startswith(prefix):
            _delete_idle(store, old)
    name = prefix + secrets.token_hex(4)
    rows = store.rows(name, schema, num_rows=count)
    try:
        outcome = run(store, name, job, workers=workers, engine=engine, progress=progress, **limits)
        yield outcome, rows
    finally:
        store.delete_rows(name)


def _delete_idle(store: Store, name: str) -> None:
    """Delete a set of rows unless somebody works on it now."""
    with contextlib.suppress(StoreError):  # its owner has just deleted it
        if store.rows(name).counts().leased == 0:
            store.delete_rows(name)
