"""Records of runs, checkpoints and published versions.

When a version of a block is published, its number and the digest of its manifest are put under
`heads/`, in the name of a small file. So a manifest that is gone, or was replaced by an older one, is
noticed, and so is a block that is gone as a whole. Runs and checkpoints have such a record too.

The order makes it safe at any moment. What is published comes first and its record after it: a
process that dies in between leaves a version without a record, which is no damage, and the next
writer adds it. What is removed on purpose loses its record first. So a record without its file always
means that the file was lost. Stores of earlier versions have no records, and are read without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import TYPE_CHECKING

import msgspec

from gradkeep.errors import ReadOnlyError, StoreError
from gradkeep.store._document import (
    LARGE_DOCUMENT,
    Count,
    Record,
    T,
    not_ours,
    read_document,
    to_bytes,
)
from gradkeep.store._keys import HEADS, RUNS, Checkpoint, Run

if TYPE_CHECKING:
    from gradkeep.store.backends._backend import Backend, Durability

_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{32})\.json")


def run_folder(run: str) -> str:
    """Where the record of a run lies."""
    return f"{RUNS}/{run}"


def checkpoint_folder(run: str, name: str) -> str:
    """Where the record of a checkpoint lies."""
    return f"{RUNS}/{run}/ckpt/{name}"


def checked_run(run: Run) -> Run:
    """The run as it is recorded; raises `StoreError` if it cannot be."""
    try:
        config = json.loads(json.dumps(dict(run.config), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"the config of run {run.name!r} cannot be recorded: {error}"[:300]
        raise StoreError(problem, expected="texts, finite numbers, lists and objects") from None
    return dataclasses.replace(run, config=config)


def read_run(backend: Backend, name: str) -> Run | None:
    """The record of a run; None if there is none."""
    run = _read_record(backend, f"{run_folder(name)}/run.json", Run)
    if run is not None and run.name != name:
        raise not_ours(backend.describe(run_folder(name)), "the record of another run")
    return run


def read_checkpoint(backend: Backend, run: str, name: str) -> Checkpoint | None:
    """The record of a checkpoint; None if there is none."""
    folder = checkpoint_folder(run, name)
    checkpoint = _read_record(backend, f"{folder}/ckpt.json", Checkpoint)
    if checkpoint is not None and (checkpoint.run, checkpoint.name) != (run, name):
        raise not_ours(backend.describe(folder), "the record of another checkpoint")
    return checkpoint


def _read_record(backend: Backend, key: str, kind: type[T]) -> T | None:
    try:
        return read_document(backend, key, kind, most=LARGE_DOCUMENT)
    except FileNotFoundError:
        return None


class Head(Record, frozen=True):
    """The second record of what was published: outside of the folder that it is about."""

    of: str
    version: Count
    published: str = msgspec.field(name="digest")


def head_key(folder: str, version: int, xxh3: str) -> str:
    """The name of a record: what it tells of, which version, and the digest of its bytes."""
    return f"{HEADS}/{folder}/{version:06d}-{xxh3}.json"


def heads_of(backend: Backend, folder: str) -> dict[int, frozenset[str]]:
    """For every version that is recorded, the digest of its bytes; of a sound store there is one."""
    heads: dict[int, frozenset[str]] = {}
    for entry in backend.list(f"{HEADS}/{folder}"):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            version = int(match[1])
            heads[version] = heads.get(version, frozenset()) | {match[2]}
    return heads


def head_keys(backend: Backend, folder: str) -> dict[str, int]:
    """The names of all records of a folder, and the version each tells of."""
    return {
        head_key(folder, version, digest): version
        for version, digests in heads_of(backend, folder).items()
        for digest in digests
    }


def record_head(
    backend: Backend, folder: str, version: int, xxh3: str, *, durability: Durability
) -> None:
    """Record what was published; done again by whoever finds that its writer died before this."""
    data = to_bytes({"of": folder, "version": version, "digest": xxh3})
    # A store that may only be read is read all the same.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(head_key(folder, version, xxh3), [data], durability=durability)
