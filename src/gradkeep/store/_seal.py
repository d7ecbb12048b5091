"""Publishing versions of a block: seal what is complete, leave rows out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import Conflict, InvalidRows, MissingRows
from gradkeep.store import _manifest
from gradkeep.store._block import (
    LEFT_OUT,
    SEGMENTS,
    Block,
    entry_of,
    load_schema,
    open_segment,
    segment_file,
    segment_numbers,
)
from gradkeep.store._encoding import Encoded
from gradkeep.store._ids import IdSet
from gradkeep.store._layout import SUFFIX, Packed, StoredArray, pack
from gradkeep.store._manifest import Manifest, SegmentEntry

if TYPE_CHECKING:
    from collections.abc import Collection

    from gradkeep.store._backend import Backend, Durability
    from gradkeep.store._schema import Schema


def seal(
    backend: Backend,
    folder: str,
    *,
    durability: Durability,
    own: Collection[str] = (),
    adding: bool = True,
) -> Manifest:
    """Publish a version of everything that is committed, after checking that nothing is missing.

    Sealing again is free: if nothing came since the last version, that version is returned; so it
    is, checked, unless `adding`. `own` are segments that the caller has put with this durability
    itself.
    """
    schema = load_schema(backend, folder)
    while True:
        newest = _manifest.latest(backend, folder)
        candidate = _candidate(backend, folder, schema, newest, adding=adding)
        if candidate is newest and newest is not None:
            if durability == "full":
                backend.ensure_durable([_manifest.key(folder, newest.version)])
            return newest
        if durability == "full":
            # A version must not outlive its segments, whoever put them.
            fresh = candidate.segments[0 if newest is None else len(newest.segments) :]
            backend.ensure_durable(
                f"{folder}/{entry.file}" for entry in fresh if entry.file not in own
            )
        try:
            _manifest.publish(backend, folder, candidate, durability=durability)
        except Conflict:
            continue
        return candidate


def _candidate(
    backend: Backend, folder: str, schema: Schema, newest: Manifest | None, *, adding: bool
) -> Manifest:
    first = 0 if newest is None else newest.next_segment
    old = () if newest is None else newest.segments
    fresh = [number for number in segment_numbers(backend, folder) if number >= first and adding]
    present = {f"{SEGMENTS}/{item.name}" for item in backend.list(f"{folder}/{SEGMENTS}")}
    gone = [entry.file for entry in old if entry.file not in present]
    holes = sorted(set(range(first, max(fresh, default=first - 1) + 1)) - set(fresh))
    if gone or holes:
        names = gone + [segment_file(number) for number in holes]
        raise MissingRows(
            f"{len(names)} segments are missing",
            path=backend.describe(folder),
            found=", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
            fix="open an older version, or delete the block and capture it again: what was written "
            "when rows were dropped cannot be written again"
            if any(LEFT_OUT in name for name in names)
            else "run the work again: it recreates exactly the missing ones",
        )
    if newest is not None and not fresh:
        return newest
    entries = [entry_of(backend, folder, number, schema=schema) for number in fresh]
    candidate = Manifest(
        version=0 if newest is None else newest.version + 1,
        schema_hash=schema.hash,
        segments=(*old, *entries),
        written=(*(() if newest is None else newest.written), *(x.rows for x in entries)),
    )
    _check_rows(backend, folder, schema, candidate, fresh_from=len(old))
    return candidate


def _check_rows(
    backend: Backend, folder: str, schema: Schema, candidate: Manifest, *, fresh_from: int
) -> None:
    path = backend.describe(folder)
    if schema.num_rows is not None and candidate.next_row != schema.num_rows:
        raise MissingRows(
            "the block is not complete",
            path=path,
            found=f"{candidate.next_row} rows",
            expected=f"{schema.num_rows} rows",
            fix="run the work again: it resumes after the rows that are there",
        )
    seen = IdSet()
    for index, entry in enumerate(candidate.segments):
        segment = open_segment(backend, folder, entry, schema=schema)
        try:
            ids = segment.small("ids")
            repeated = seen.among(ids)
            seen.add(ids)
            short = entry.rows != schema.rows_per_segment
            last = index == len(candidate.segments) - 1
        finally:
            segment.close()
        if len(repeated):
            raise InvalidRows(
                "ids occur in two segments",
                path=backend.describe(f"{folder}/{entry.file}"),
                found=f"id {int(repeated[0])}" + (" and more" if len(repeated) > 1 else ""),
                expected="each id once in a block",
                fix="delete the block and write it again with ids that differ",
            )
        if short and not last and index >= fresh_from:
            raise MissingRows(
                "a segment in the middle is short",
                path=backend.describe(f"{folder}/{entry.file}"),
                found=f"{entry.rows} rows",
                expected=f"{schema.rows_per_segment} rows",
            )


def without(block: Block, ids: Any, *, durability: Durability) -> Manifest:
    """Publish a version without these rows; touched segments are written anew, the rest shared.

    The old version stays readable until `gc`.
    """
    backend, folder = block.backend, block.folder
    unwanted = np.unique(np.asarray(ids, np.int64).reshape(-1))
    block.read(unwanted, [])  # raises for ids that are not there
    newest = _manifest.latest(backend, folder)
    if newest is None or newest.version != block.version:
        raise Conflict(
            "this is not the newest version",
            path=block.path,
            found=f"version {block.version}",
            expected=f"version {None if newest is None else newest.version}",
            fix="open the block again and repeat",
        )
    kept: list[SegmentEntry] = []
    for entry, start in zip(newest.segments, block.starts, strict=False):
        stay = np.flatnonzero(~np.isin(block.ids[start : start + entry.rows], unwanted))
        if len(stay) == entry.rows:
            kept.append(entry)
        elif len(stay):
            packed = _repacked(block, np.asarray(stay + start))
            # Named by content: a second try after a crash, for other rows even, takes no wrong file,
            # and a seal does not mistake it for new rows.
            file = f"{SEGMENTS}/{LEFT_OUT}{packed.digest}{SUFFIX}"
            backend.put_if_absent(f"{folder}/{file}", packed.parts, durability=durability)
            kept.append(SegmentEntry(file, len(stay), packed.size, packed.digest))
    manifest = dataclasses.replace(newest, version=newest.version + 1, segments=tuple(kept))
    _manifest.publish(backend, folder, manifest, durability=durability)
    return manifest


def _repacked(block: Block, rows: Any) -> Packed:
    batch = block.read_rows(rows)
    arrays = {
        column.array.name: StoredArray(Encoded(column.values, column.scale), column.offsets)
        for column in batch.columns
    }
    return pack(block.schema, batch.ids, arrays, first_row=int(rows[0]))
