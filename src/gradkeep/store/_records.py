"""Records of runs, checkpoints and published versions.

When a version of a block is published, its number and the digest of its manifest are stored in the
name of a small file below `heads/`. A manifest that was deleted or replaced by an older one, or a
whole block that was deleted, is then detected. Runs and checkpoints have such a record too.

The order makes this safe at any moment. The file is published first, its record second: a process
that dies in between leaves a version without a record, which is no damage, and the next writer adds
it. Deletion removes the record first. A record without its file therefore always means that the file
was lost. Stores of earlier versions have no records and can be read without them.
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
    malformed_document,
    read_document,
    to_bytes,
)
from gradkeep.store._keys import HEADS, RUNS, Checkpoint, Run

if TYPE_CHECKING:
    from gradkeep.store.backends._backend import Backend, Durability

_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{32})\.json")


def run_folder(run: str) -> str:
    return f"{RUNS}/{run}"


def checkpoint_folder(run: str, name: str) -> str:
    return f"{RUNS}/{run}/ckpt/{name}"


def validate_run(run: Run) -> Run:
    """Return the run with its config as JSON values; raise `StoreError` if that is impossible."""
    try:
        config = json.loads(json.dumps(dict(run.config), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"the config of run {run.name!r} cannot be recorded",
            code="store.invalid_config",
            found=str(error)[:300],
            expected="strings, finite numbers, lists and objects",
        ) from None
    return dataclasses.replace(run, config=config)


def read_run(backend: Backend, name: str) -> Run | None:
    """Read the record of a run; return None if there is none."""
    run = _read_record(backend, f"{run_folder(name)}/run.json", Run)
    if run is not None and run.name != name:
        raise malformed_document(backend.describe(run_folder(name)), "the record of another run")
    return run


def read_checkpoint(backend: Backend, run: str, name: str) -> Checkpoint | None:
    """Read the record of a checkpoint; return None if there is none."""
    folder = checkpoint_folder(run, name)
    checkpoint = _read_record(backend, f"{folder}/ckpt.json", Checkpoint)
    if checkpoint is not None and (checkpoint.run, checkpoint.name) != (run, name):
        raise malformed_document(backend.describe(folder), "the record of another checkpoint")
    return checkpoint


def _read_record(backend: Backend, key: str, kind: type[T]) -> T | None:
    try:
        return read_document(backend, key, kind, most=LARGE_DOCUMENT)
    except FileNotFoundError:
        return None


class Head(Record, frozen=True):
    """Second record of a published file, outside of the folder that it is about."""

    of: str
    version: Count
    published: str = msgspec.field(name="digest")


def head_key(folder: str, version: int, xxh3: str) -> str:
    """Return the key of a record: folder, version and digest of the published bytes."""
    return f"{HEADS}/{folder}/{version:06d}-{xxh3}.json"


def read_heads(backend: Backend, folder: str) -> dict[int, frozenset[str]]:
    """Read the digests recorded for each version; an undamaged store has one per version."""
    heads: dict[int, frozenset[str]] = {}
    for entry in backend.list(f"{HEADS}/{folder}"):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            version = int(match[1])
            heads[version] = heads.get(version, frozenset()) | {match[2]}
    return heads


def head_keys(backend: Backend, folder: str) -> dict[str, int]:
    """List all records of a folder, with the version of each."""
    return {
        head_key(folder, version, digest): version
        for version, digests in read_heads(backend, folder).items()
        for digest in digests
    }


def record_head(
    backend: Backend, folder: str, version: int, xxh3: str, *, durability: Durability
) -> None:
    """Record a published version; repeated by the next process if its writer died before this."""
    data = to_bytes({"of": folder, "version": version, "digest": xxh3})
    # A read-only store stays readable.
    with contextlib.suppress(ReadOnlyError):
        backend.put_if_absent(head_key(folder, version, xxh3), [data], durability=durability)
