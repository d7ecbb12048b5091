"""One piece of work shared out: its parts are rows that are gone when all of them are in."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

import gradkeep.store as gs
from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import FarmError, GradkeepError, StoreError, WriteFailed
from gradkeep.farm._job import check_workers
from gradkeep.farm._run import check_place, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.farm._job import Job
    from gradkeep.farm._progress import Progress
    from gradkeep.farm._run import Engine, Outcome
    from gradkeep.store import Array, Store

_REFUSED, _LONGEST = "refused", 4096
_UNKNOWN = 4
"""Workers that an engine is taken to have which does not say."""
_YOUNG = 3600.0
"""Seconds within which a set may be that of another process whose workers have yet to begin."""
_LIMITS: dict[str, Any] = {"max_attempts": 10, "lease_seconds": 20.0, "give_up_after": 50}
"""Workers may die often: whoever takes a part over goes on where it can."""


def share_out(
    store: Store,
    title: str,
    arrays: Sequence[Array],
    count: int,
    job: Job,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    here: Job | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, Any]:
    """What `job` returns for the parts 0 to `count - 1` of one piece of work, each array `[count, ...]`.

    The parts are rows of a set in the store, deleted when all are in or none can be had any more; so
    are sets that a killed process left under the same title. What a job raises on purpose, a
    `GradkeepError`, is not tried again, and is what is found in the error that is raised here.
    With `here`, the job as this process has it at hand, this process is one of the local workers.
    """
    if store.backend.local_path("") is None and "://" not in store.location:
        raise FarmError(
            "other processes cannot reach this store",
            found=store.location,
            fix="use a folder or a bucket; or leave workers= and engine= out",
        )
    prefix = f"shared-{xxhash.xxh3_64_hexdigest(title.encode())}-"
    for old in store.row_sets():
        if old.startswith(prefix):
            _delete_idle(store, old)
    name = prefix + secrets.token_hex(4)
    schema = gs.Schema((*arrays, gs.Array(_REFUSED, "uint8", (_LONGEST,))))
    rows = store.rows(name, schema, num_rows=count)
    try:
        outcome = run(
            store,
            name,
            _RefusingJob(job, tuple(arrays)),
            workers=None if workers is None else min(workers, count),
            engine=engine,
            here=None if here is None or engine is not None else _RefusingJob(here, tuple(arrays)),
            progress=progress,
            **_LIMITS,
        )
        done = rows.read(rows.done()) if len(rows.done()) else None
        _check_done(title, outcome, [] if done is None else done[_REFUSED])
        assert done is not None
        return {array.name: done[array.name] for array in arrays}
    finally:
        store.delete_rows(name)


@dataclass(frozen=True, slots=True)
class _RefusingJob:
    """A job whose own errors are results: another attempt would end the same."""

    job: Job
    arrays: tuple[Array, ...]

    def __call__(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        told = np.zeros(_LONGEST, np.uint8)
        try:
            return [{**found, _REFUSED: told} for found in self.job(numbers)]
        except WriteFailed:
            raise  # a full disk may have room again
        except GradkeepError as error:
            text = np.frombuffer(str(error).encode("utf-8", "replace")[:_LONGEST], np.uint8)
            told[: len(text)] = text
        nothing = {array.name: np.zeros(array.shape, array.dtype) for array in self.arrays}
        return [{**nothing, _REFUSED: told} for _ in numbers]


def _check_done(title: str, outcome: Outcome, refused: Any) -> None:
    seen, failures = outcome.progress, outcome.failures
    texts = [one.tobytes().rstrip(b"\0").decode("utf-8", "replace") for one in refused]
    texts = [text for text in texts if text]
    missing = seen.total - seen.done + len(texts)
    if not missing:
        return
    found = "workers that ended before all was done"
    if texts:
        found = "\n" + texts[0]
    elif failures:
        found = "\n" + "\n".join(failures[0].error.strip().splitlines()[-3:])
    raise FarmError(
        f"{title}: {missing} of {seen.total} parts were not made",
        found=found,
        expected="every part made by some worker",
        fix="repair what it says and run the same again; what is whole in the store stays",
    )


def _delete_idle(store: Store, name: str) -> None:
    """Delete a set of rows unless somebody may be working on it."""
    with contextlib.suppress(StoreError):  # its owner has just deleted it
        rows = store.rows(name)
        begun = [entry.modified for entry in store.backend.list(rows.folder)]
        if max(begun, default=0.0) < time.time() - _YOUNG and rows.counts().leased == 0:
            store.delete_rows(name)


@checked(FarmError)
def blocks_of(count: int, workers: int) -> list[range]:
    """`count` things in one block for each worker, nearly equal.

    >>> blocks_of(5, 2), blocks_of(1, 4)
    ([range(0, 3), range(3, 5)], [range(0, 1)])
    """
    _arguments.count("count", count, error=FarmError, least=1)
    check_workers(workers, least=1)
    parts = min(count, workers)
    bounds = [-(-count * part // parts) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


@checked(FarmError)
def size_of(workers: int | None, engine: Engine | None) -> int:
    """How many workers there will be, as far as that is known."""
    check_place(workers, engine)
    found = workers if engine is None else getattr(engine, "num_workers", None)
    return max(1, found or _UNKNOWN)
