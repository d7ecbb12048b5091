"""Rows in files of their own, and packed: one row, one file, one winner.

Each row is written as a small segment of its own. Many finished rows are compacted into packed segments
under a manifest. A row is in the packed part if the manifest lists it, else in its own file, else it is
missing.
"""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from gradkeep import _arguments
from gradkeep.errors import (
    ConflictError,
    DamagedError,
    InvalidRowsError,
    MissingRowsError,
    StoreError,
)
from gradkeep.store._document import Count, Record, read_document, record_head, to_bytes
from gradkeep.store._keys import HEADS
from gradkeep.store.blocks._block import Block
from gradkeep.store.blocks._columns import Batch, Column, Ragged, check_fill, fill_missing
from gradkeep.store.blocks._incoming import as_ids, validate_rows, whole_numbers
from gradkeep.store.blocks._manifest import (
    Manifest,
    SegmentEntry,
    ensure_recorded,
    is_number,
    latest_manifest,
    load_schema,
    manifest_key,
    manifest_versions,
    no_version,
    numbered_files,
    publish_manifest,
)
from gradkeep.store.blocks._segment import SUFFIX, Segment, pack
from gradkeep.store.blocks._writer import encode_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from gradkeep.store.backends._backend import Backend, Durability
    from gradkeep.store.blocks._columns import AnyArray
    from gradkeep.store.blocks._schema import Array, Schema


ROWS_PER_FOLDER = 1024
_NAME = re.compile(r"(\d{6,18})-[0-9a-f]{32}")


def row_record_key(folder: str, part: str, row: int, digest: str) -> str:
    """Return the key of the record of a row (part `rows`) or of a failed attempt (part `failed`)."""
    return f"{HEADS}/{folder}/{part}/{row // ROWS_PER_FOLDER:06d}/{row:06d}-{digest}"


def record_row(backend: Backend, folder: str, part: str, row: int, digest: str) -> str:
    """Record a written row or failed attempt; return the key of the record."""
    key = row_record_key(folder, part, row, digest)
    backend.put_if_absent(key, [b""], durability="process")
    return key


def recorded_number(key: str) -> int:
    """Return the row that a record is about."""
    return int(key.rpartition("/")[2].partition("-")[0])


def row_records(
    backend: Backend, folder: str, part: str, rows: Collection[int] | None = None
) -> list[str]:
    """List the records of these rows, or of all."""
    place = f"{HEADS}/{folder}/{part}"
    selected = None if rows is None else set(rows)
    if selected is None:
        buckets = [entry.name for entry in backend.list(place) if entry.is_folder]
    else:
        buckets = [
            f"{number:06d}" for number in sorted({row // ROWS_PER_FOLDER for row in selected})
        ]
    keys = []
    for bucket in buckets:
        for entry in backend.list(f"{place}/{bucket}"):
            match = _NAME.fullmatch(entry.name)
            if match is not None and (selected is None or int(match[1]) in selected):
                keys.append(f"{place}/{bucket}/{entry.name}")
    return keys


LOOSE = "rows"
PACKED = "packed"
SIZES = "size"
_SIZE_DIGITS = 12
_MOST_ROWS = 1 << 40
"""Most rows of a set: each row is a file at first, and no filesystem holds more."""

_log = logging.getLogger("gradkeep")


class SizeRecord(Record, frozen=True):
    """Number of rows of a set."""

    num_rows: Count


class RowFiles:
    """Growable set of rows 0 to `num_rows - 1`; the first value written for a row is final."""

    def __init__(
        self,
        backend: Backend,
        folder: str,
        *,
        durability: Durability = "full",
        verify: bool = True,
    ) -> None:
        self.folder, self.path = folder, backend.describe(folder)
        self.schema: Schema = load_schema(backend, folder)
        self._backend, self._durability, self._verify = backend, durability, verify
        self._packed: Block | None = None
        self._packed_ids: set[int] = set()
        self._known_done: set[int] = set()
        self._known_size = 0
        self._recorded: set[int] = set()
        latest_manifest(backend, folder)  # raises if a packed version is lost
        self._refresh_packed()

    @property
    def num_rows(self) -> int:
        """Number of rows; the largest size that was ever set."""
        listed = self._backend.list(f"{self.folder}/{SIZES}")
        largest = max(numbered_files(listed, ".json", digits=_SIZE_DIGITS), default=0)
        if largest > self._known_size:
            self._check_size(largest)
            self._known_size = largest
        return largest

    def _check_size(self, size: int) -> None:
        """Raise `DamagedError` if the record of a size does not match its name, as after a rename."""
        try:
            recorded = read_document(
                self._backend, size_key(self.folder, size), SizeRecord
            ).num_rows
        except (StoreError, FileNotFoundError):
            return  # the name has all the information; `verify` reports the damage
        if recorded != size:
            raise DamagedError(
                f"the record of a size holds {recorded} instead of {size} rows",
                code="store.misnamed_size",
                path=self._backend.describe(size_key(self.folder, size)),
            )

    @_arguments.checked(StoreError)
    def grow(self, num_rows: int) -> None:
        """Add rows; the number of rows never decreases.

        Args:
            num_rows: New number of rows.

        Raises:
            InvalidRowsError: The set has more rows already.
        """
        check_size(num_rows, path=self.path)
        largest = self.num_rows
        if num_rows < largest:
            raise InvalidRowsError(
                "rows can only be added",
                code="store.fewer_rows",
                path=self.path,
                found=f"{num_rows} rows",
                expected=f"at least {largest}",
            )
        if num_rows > 0:
            # Even if it is set already: its writer may have died before it was durable.
            set_size(self._backend, self.folder, num_rows, durability=self._durability)

    @_arguments.checked(StoreError)
    def put(
        self, row: int, arrays: Mapping[str, Any], *, differing: Literal["raise", "keep"] = "raise"
    ) -> bool:
        """Write one row, unless it is there already.

        Args:
            row: The row.
            arrays: Value of every array of the schema, `[*shape]`.
            differing: If the stored row has other values, `raise` raises `ConflictError`; `keep` keeps the first
                and logs both digests (trainings may differ in the last bit), but a different mask still raises.

        Returns:
            True if this row is now the stored one, False if it was there already.

        Raises:
            ConflictError: The stored row has other values.
        """
        self._check_row(row)
        ids = np.array([row], np.int64)
        batch = {name: _one_row(value) for name, value in arrays.items()}
        rows = validate_rows(self.schema, ids, batch, path=self.path)
        columns = encode_rows(self.schema, rows, slice(0, 1))
        packed = pack(self.schema, ids, columns, first_row=row)
        self._refresh_packed()
        created = False
        if row not in self._packed_ids:
            try:
                created = self._backend.put_if_absent(
                    self._row_key(row), packed.parts, durability=self._durability
                )
            except ConflictError:
                if self._durability == "full":
                    with contextlib.suppress(FileNotFoundError):
                        self._backend.ensure_durable([self._row_key(row)])
            if created:
                record = record_row(self._backend, self.folder, LOOSE, row, packed.digest)
                # Compaction may have packed and removed another process's file meanwhile, or this
                # one before it was recorded.
                self._refresh_packed()
                created = row not in self._packed_ids
                if not created:
                    self._backend.delete([record], durability="process")
        if not created:
            self._compare_with_stored(row, columns, packed.digest, differing=differing)
        self._known_done.add(row)
        return created

    def _compare_with_stored(
        self,
        row: int,
        columns: Sequence[Column],
        digest: str,
        *,
        differing: Literal["raise", "keep"],
    ) -> None:
        first = self.read([row])
        differing_arrays = [
            stored.array
            for stored, column in zip(first.columns, columns, strict=True)
            if not _same(stored, column)
        ]
        if not differing_arrays:
            return
        if differing == "raise" or any(array.kind == "mask" for array in differing_arrays):
            raise ConflictError(
                f"row {row} is stored with other values, which were not overwritten",
                code="store.row_differs",
                path=self.path,
                found=f"different {', '.join(array.name for array in differing_arrays)}",
                fix="Check that both workers use the same code, data and seed; "
                'differing="keep" accepts other outputs for the same mask.',
            )
        names = ", ".join(array.name for array in differing_arrays)
        _log.info("%s: row %d was written again with other %s (%s)", self.path, row, names, digest)

    @_arguments.checked(StoreError)
    def has(self, row: int) -> bool:
        """Return True if the row is done.

        Args:
            row: The row.
        """
        if row in self._known_done or self._backend.exists(self._row_key(row)):
            return True
        self._refresh_packed()
        return row in self._packed_ids

    def done(self) -> AnyArray:
        """Return the rows that are done, sorted `[D]`."""
        # List loose rows first: compaction publishes before it removes, so a row that is moved
        # meanwhile is seen in at least one of the two places.
        loose = set(self._loose())
        self._refresh_packed()
        self._known_done = loose | self._packed_ids
        return np.array(sorted(self._known_done), np.int64)

    @property
    def packed_rows(self) -> frozenset[int]:
        """Rows that are in packed segments."""
        self._refresh_packed()
        return frozenset(self._packed_ids)

    def read(
        self, rows: Any, names: Sequence[str] | None = None, *, fill: float | None = None
    ) -> Batch:
        """Read rows in this order.

        Args:
            rows: The rows `[B]`.
            names: Arrays to read; all by default.
            fill: `float("nan")` to get NaN for missing rows of float arrays; by default they raise.

        Returns:
            The rows.

        Raises:
            MissingRowsError: A row is not done.
        """
        requested = whole_numbers(rows, path=self.path)
        if names is not None:
            names = _arguments.texts("names", names, error=StoreError)
        self._refresh_packed()
        if fill is not None:
            check_fill(fill, self._arrays(names), path=self.path)
            present = np.isin(requested, self.done())
            batch_of_present = self.read(requested[present], names)
            return Batch(
                requested,
                tuple(fill_missing(column, present) for column in batch_of_present.columns),
            )
        batches, order = self._collect(requested, names)
        columns = tuple(
            Column.join(array, [batch.column(array.name) for batch in batches]).take(order)
            for array in self._arrays(names)
        )
        return Batch(requested, columns)

    def _collect(
        self, requested: AnyArray, names: Sequence[str] | None
    ) -> tuple[list[Batch], AnyArray]:
        """Read batches that hold the requested rows, and return the position of each row in them."""
        batches: list[Batch] = []
        position_of: dict[int, int] = {}
        loose = sorted(set(requested.tolist()) - self._packed_ids)
        if loose:
            batch = self._read_loose(loose, self._arrays(names))
            batches.append(batch)
            position_of.update(zip(batch.ids.tolist(), range(len(batch.ids)), strict=True))
            if len(position_of) < len(loose):
                # Packed meanwhile: the manifest is published before the file is removed.
                self._refresh_packed()
        packed = sorted(set(requested.tolist()) & self._packed_ids)
        if packed and self._packed is not None:
            batches.append(self._packed.read(packed, names))
            position_of.update(
                zip(packed, range(len(position_of), len(position_of) + len(packed)), strict=True)
            )
        missing = sorted(set(requested.tolist()) - set(position_of))
        if missing:
            raise MissingRowsError(
                f"{len(missing)} of {len(requested)} rows are not done",
                code="store.unfinished_rows",
                path=self.path,
                found=f"no row {', '.join(map(str, missing[:5]))}"
                + (" ..." if len(missing) > 5 else ""),
                fix="Wait for the workers, read rows of done(), or pass fill=nan.",
            )
        return batches, np.array([position_of[row] for row in requested.tolist()], np.int64)

    def _read_loose(self, rows: Sequence[int], arrays: Sequence[Array]) -> Batch:
        """Read and verify rows that have their own files; rows without a file are left out."""
        ids: list[int] = []
        columns: list[list[Column]] = [[] for _ in arrays]
        for row in rows:
            try:
                # There can be millions of files: do not remember each one as verified.
                key = self._row_key(row)
                segment = Segment(self._backend, key, verify=self._verify, remember=False)
            except FileNotFoundError:
                continue
            with contextlib.closing(segment):
                other = segment.schema_hash != self.schema.hash
                if other or segment.small("ids").tolist() != [row]:
                    raise DamagedError(
                        "the file holds another row than its name",
                        code="store.misnamed_row",
                        path=segment.path,
                    )
                for array, parts in zip(arrays, columns, strict=True):
                    parts.append(segment.column(array))
            ids.append(row)
        joined = (Column.join(array, parts) for array, parts in zip(arrays, columns, strict=True))
        return Batch(np.array(ids, np.int64), tuple(joined))

    @_arguments.checked(StoreError)
    def compact(self, *, rows_per_file: int = 1024, partial: bool = False) -> int:
        """Move finished rows from their own files into packed segments.

        Other processes may read, write and compact at the same time. A kill at any moment leaves every row
        readable.

        Args:
            rows_per_file: Rows of each packed segment.
            partial: Also pack the remaining rows that do not fill a segment.

        Returns:
            Number of rows moved.
        """
        _arguments.count("rows_per_file", rows_per_file, error=InvalidRowsError, least=1)
        moved = 0
        waiting: list[int] | None = None
        while True:
            # Read the manifest before choosing rows, to know which are packed already.
            newest = latest_manifest(self._backend, self.folder)
            if newest is not None:
                ensure_recorded(self._backend, self.folder, newest, durability=self._durability)
            self._refresh_packed()
            number = 0 if newest is None else newest.next_segment
            file = f"{PACKED}/{number:06d}{SUFFIX}"
            key = f"{self.folder}/{file}"
            rows: list[int] | None = None
            if not self._backend.exists(key):
                # List once, not for every file: the cost of a listing grows with the loose rows.
                stale, waiting = waiting is not None, self._waiting(waiting)
                rows = self._next_rows(waiting, rows_per_file)
                if not rows or (len(rows) < rows_per_file and not partial):
                    if not stale:
                        return moved
                    waiting = None  # other processes may have written rows meanwhile
                    continue
                batch = self.read(rows)
                packed = pack(self.schema, batch.ids, batch.columns, first_row=0)
                try:
                    self._backend.put_if_absent(key, packed.parts, durability=self._durability)
                except ConflictError:  # another process packed other rows under this number
                    rows = None
            # A packed file that no manifest lists is published by the next process that sees it.
            if not self._adopt(newest, file, written_here=rows is not None) or rows is None:
                waiting = None  # other processes compact too: list again
                continue
            moved += len(rows)
            self._refresh_packed()
            self._remove_own_files(rows)

    def _waiting(self, known: list[int] | None) -> list[int]:
        """Return the rows that have their own files, last first; remove redundant files."""
        if known is not None:
            return known
        loose = sorted(self._loose(), reverse=True)
        self._remove_own_files([row for row in loose if row in self._packed_ids])
        return loose

    def _next_rows(self, waiting: list[int], count: int) -> list[int]:
        """Take the next rows that no version packs."""
        rows: list[int] = []
        while waiting and len(rows) < count:
            row = waiting.pop()
            if row not in self._packed_ids:
                rows.append(row)
        return rows

    def _adopt(self, newest: Manifest | None, file: str, *, written_here: bool) -> bool:
        """Publish a version with one more packed file; return False if another process was first."""
        with contextlib.closing(Segment(self._backend, f"{self.folder}/{file}")) as segment:
            damage = segment.check_everything()
            if damage:
                raise damage[0]
            entry = SegmentEntry(file, segment.rows, segment.size, segment.digest)
        if self._durability == "full" and not written_here:
            # Its writer may have died before its fsync, and the rows' own files are removed next.
            self._backend.ensure_durable([f"{self.folder}/{file}"])
        manifest = (newest or no_version(self.schema)).with_more([entry])
        try:
            publish_manifest(self._backend, self.folder, manifest, durability=self._durability)
        except ConflictError:
            return False
        return True

    def _remove_own_files(self, rows: Sequence[int]) -> None:
        """Remove the own files of rows that the manifest lists as packed."""
        surplus = [self._row_key(row) for row in rows if row in self._packed_ids]
        if surplus and self._packed is not None and self._durability == "full":
            # Missing if gc removed it after a later version, which gc made durable.
            with contextlib.suppress(FileNotFoundError):
                manifest = manifest_key(self.folder, self._packed.version)
                self._backend.ensure_durable([manifest])
        if surplus:
            records = row_records(self._backend, self.folder, LOOSE, self._packed_ids & set(rows))
            self._backend.delete(records, durability=self._durability)
        self._backend.delete(surplus, durability=self._durability)

    def _refresh_packed(self) -> None:
        versions = manifest_versions(self._backend, self.folder)
        known = self._packed
        if (known.version if known is not None else None) == (versions[-1] if versions else None):
            return
        if latest_manifest(self._backend, self.folder) is None:
            return
        packed = Block(self._backend, self.folder, verify=self._verify)
        before = () if known is None else known.manifest.segments
        entries = packed.manifest.segments
        if entries[: len(before)] == before:
            # Read the ids of new segments only.
            self._packed_ids |= set(packed.ids_of(entries[len(before) :]).tolist())
        else:
            self._packed_ids = set(packed.ids.tolist())
        self._packed = packed

    def _loose(self) -> Iterator[int]:
        for bucket in self._buckets(LOOSE):
            listed = self._backend.list(f"{self.folder}/{LOOSE}/{bucket:06d}")
            rows = numbered_files(listed, SUFFIX, digits=1)
            # A row in a wrong folder could not be read.
            yield from (row for row in rows if row // ROWS_PER_FOLDER == bucket)

    def _buckets(self, kind: str) -> list[int]:
        names = (entry.name for entry in self._backend.list(f"{self.folder}/{kind}"))
        return [int(name) for name in names if is_number(name)]

    def _row_key(self, row: int) -> str:
        return f"{self.folder}/{LOOSE}/{row // ROWS_PER_FOLDER:06d}/{row}{SUFFIX}"

    def _check_row(self, row: int) -> None:
        as_ids([row], num_examples=None, path=self.path)
        total = self.num_rows
        if row >= total:
            raise InvalidRowsError(
                f"there is no row {row}",
                code="store.no_such_row",
                path=self.path,
                expected=f"rows from 0 to {total - 1}",
                fix="Call grow() to add rows.",
            )

    def _arrays(self, names: Sequence[str] | None) -> list[Any]:
        return list(self.schema.arrays) if names is None else [self.schema.array(n) for n in names]


def drop_packed_file(backend: Backend, folder: str, key: str) -> bool:
    """Publish a version without a missing packed file, so that its rows are computed again."""
    newest = latest_manifest(backend, folder)
    segments = () if newest is None else newest.segments
    remaining = tuple(entry for entry in segments if f"{folder}/{entry.file}" != key)
    if newest is None or remaining == segments:
        return False
    publish_manifest(backend, folder, newest.next_version(remaining), durability="full")
    return True


def check_size(num_rows: int, *, path: str) -> None:
    """Raise `InvalidRowsError` unless this is a valid number of rows."""
    whole = isinstance(num_rows, int | np.integer) and not isinstance(num_rows, bool)
    if not whole or not 0 <= num_rows <= _MOST_ROWS:
        raise InvalidRowsError(
            f"the number of rows must be from 0 to {_MOST_ROWS}",
            code="store.invalid_num_rows",
            path=path,
            found=repr(num_rows)[:60],
        )


def set_size(backend: Backend, folder: str, num_rows: int, *, durability: Durability) -> None:
    """Record a new number of rows; the largest record counts."""
    data = to_bytes(SizeRecord(num_rows=int(num_rows)))
    backend.put_if_absent(size_key(folder, num_rows), [data], durability=durability)
    xxh3 = xxhash.xxh3_128_hexdigest(data)
    record_head(backend, f"{folder}/{SIZES}", num_rows, xxh3, durability=durability)


def size_key(folder: str, num_rows: int) -> str:
    return f"{folder}/{SIZES}/{num_rows:0{_SIZE_DIGITS}d}.json"


def _one_row(value: Any) -> Any:
    """Return a single row's value as a batch of one."""
    if isinstance(value, Ragged):
        return value
    if hasattr(value, "detach"):
        return value.detach().unsqueeze(0)
    return value[None] if isinstance(value, np.ndarray) else [value]


def _same(one: Column, other: Column) -> bool:
    """Return True if two rows have the same bits."""
    parts = ("values", "scale", "offsets")
    return all(_bits(getattr(one, part)) == _bits(getattr(other, part)) for part in parts)


def _bits(array: AnyArray | None) -> object:
    return None if array is None else (array.dtype, array.shape, array.tobytes())
