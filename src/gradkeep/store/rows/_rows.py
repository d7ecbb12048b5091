"""Rows written by many processes: claimed, computed, put or failed.

A worker claims rows (advisory), computes them, and puts each; a row that fails is recorded with its
traceback and tried again, but not for ever.
"""

from __future__ import annotations

import contextlib
import json
import traceback as tracebacks
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from gradkeep import _arguments
from gradkeep._display import head_and_tail
from gradkeep.errors import InvalidRowsError, StoreError
from gradkeep.store._document import Count, Record, read_document, to_bytes
from gradkeep.store.blocks._columns import whole_numbers
from gradkeep.store.blocks._manifest import is_number, numbered_files
from gradkeep.store.blocks._packing import SUFFIX
from gradkeep.store.blocks._segment import Segment
from gradkeep.store.rows._leases import (
    LEASES,
    ROWS_PER_FOLDER,
    Lease,
    default_owner,
    lease_key,
    lease_numbers,
    load_lease,
    release_lease,
    renew_lease,
    take_lease,
)
from gradkeep.store.rows._row_files import LOOSE, RowFiles, record_row, recorded_number, row_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

RowStateName = Literal["pending", "leased", "done", "failed"]

FAILED = "failed"
_MOST_STATES = 1 << 24
LONGEST_ERROR = 64 << 10
"""Bytes of an error's text that are kept: half of them from its beginning, half from its end."""


class FailureRecord(Record, frozen=True):
    """One failed attempt of a row."""

    row: Count
    owner: str
    error: str


@dataclass(frozen=True, slots=True)
class RowState:
    """What is known about one row."""

    row: int
    state: RowStateName
    attempts: int = 0
    """How many attempts failed so far."""
    owner: str | None = None
    """Who holds the lease."""
    expires: float | None = None
    error: str | None = None
    """The traceback of the last failed attempt."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many rows of a set are in each state."""

    done: int
    leased: int
    failed: int
    pending: int

    @property
    def unfinished(self) -> int:
        """Rows that are neither done nor failed too often."""
        return self.leased + self.pending


class Rows(RowFiles):
    """A growable set of rows 0 to `num_rows - 1`, each put once by whoever is first."""

    def claim(
        self,
        *,
        owner: str | None = None,
        seconds: float = 600.0,
        count: int = 1,
        max_attempts: int = 3,
    ) -> list[Lease]:
        """Up to `count` rows that are neither done, leased nor failed too often.

        Workers begin their search at different rows, so that they seldom meet.
        """
        _arguments.count("count", count, error=InvalidRowsError, least=1)
        _arguments.count("max_attempts", max_attempts, error=InvalidRowsError, least=1)
        seconds = _arguments.number("seconds", seconds, error=StoreError)
        # Any text, as a broken host name has it too.
        _arguments.instance("owner", owner, (str, type(None)), error=StoreError)
        owner = default_owner() if owner is None else owner
        total = self.num_rows
        if total == 0:
            return []
        self._refresh_packed()
        taken: list[Lease] = []
        buckets = -(-total // ROWS_PER_FOLDER)
        start = hash_owner(owner) % total
        first = start // ROWS_PER_FOLDER
        for bucket in (*range(first, buckets), *range(first)):
            low, high = bucket * ROWS_PER_FOLDER, min(total, (bucket + 1) * ROWS_PER_FOLDER)
            # Of the first bucket, the rows from the start on come first.
            rows = [*range(max(low, start), high), *range(low, min(start, high))]
            if bucket != first:
                rows = list(range(low, high))
            try:
                for lease in self._claim_in(bucket, rows, owner, seconds, max_attempts):
                    taken.append(lease)
                    if len(taken) == count:
                        return taken
            except BaseException:  # a full disk, say: the caller never learns of these
                for lease in taken:
                    self.release(lease)
                raise
        return taken

    def _claim_in(
        self, bucket: int, rows: Iterable[int], owner: str, seconds: float, max_attempts: int
    ) -> Iterator[Lease]:
        self._record_bucket(bucket)
        leases = lease_numbers(self._backend, self.folder, bucket)
        failures = self._failures(bucket)
        for row in rows:
            if row in self._known_done or row in self._packed_ids:
                continue
            if len(failures.get(row, ())) >= max_attempts:
                continue
            number = leases[row][-1] if row in leases else None
            if number is not None:
                held = load_lease(self._backend, self.folder, row, number)
                if held is not None and not held.expired:
                    continue
            if self.has(row):
                self._known_done.add(row)
                continue
            following = 0 if number is None else number + 1
            lease = take_lease(
                self._backend, self.folder, row, following, owner=owner, seconds=seconds
            )
            if lease is None:
                continue
            stale = [lease_key(self.folder, row, old) for old in leases.get(row, ())]
            self._backend.delete(stale, durability="process")
            if self.has(row):
                release_lease(self._backend, self.folder, lease)
                self._known_done.add(row)
                continue
            yield lease

    @_arguments.checked(StoreError)
    def renew(self, lease: Lease, *, seconds: float = 600.0) -> Lease:
        """A later end for a lease: a worker's sign of life."""
        return renew_lease(self._backend, self.folder, lease, seconds=seconds)

    @_arguments.checked(StoreError)
    def release(self, lease: Lease) -> None:
        """Give a row back without having done it."""
        release_lease(self._backend, self.folder, lease)

    @_arguments.checked(StoreError)
    def finish(
        self,
        lease: Lease,
        arrays: Mapping[str, Any],
        *,
        differing: Literal["raise", "keep"] = "keep",
    ) -> bool:
        """Put the leased row and end the lease."""
        created = self.put(lease.row, arrays, differing=differing)
        release_lease(self._backend, self.folder, lease)
        return created

    @_arguments.checked(StoreError)
    def fail(self, lease: Lease, error: BaseException | str) -> None:
        """Record a failed attempt with its traceback and end the lease."""
        text = error if isinstance(error, str) else _traceback(error)
        record = FailureRecord(row=lease.row, owner=lease.owner, error=shortened(text))
        # Named by the lease's token: two workers that fail the same row are two attempts.
        name = f"{lease.row}-{lease.token}.json"
        key = f"{self.folder}/{FAILED}/{lease.row // ROWS_PER_FOLDER:06d}/{name}"
        data = to_bytes(record)
        self._backend.put_if_absent(key, [data], durability=self._durability)
        digest = xxhash.xxh3_128_hexdigest(data)
        recorded = record_row(self._backend, self.folder, FAILED, lease.row, digest)
        if not self._backend.exists(key):  # forgotten by `retry` before it was recorded
            self._backend.delete([recorded], durability="process")
        release_lease(self._backend, self.folder, lease)

    @_arguments.checked(StoreError)
    def retry(self, rows: Iterable[int] | None = None) -> int:
        """Forget failed attempts (of all rows, or these), so that they are tried again."""
        listed: Any = rows if rows is None or hasattr(rows, "shape") else list(rows)
        wanted = None if rows is None else set(whole_numbers(listed, path=self.path).tolist())
        keys = []
        for bucket in self._buckets(FAILED):
            for row, names in self._failures(bucket).items():
                if wanted is None or row in wanted:
                    keys += [f"{self.folder}/{FAILED}/{bucket:06d}/{name}" for name in names]
        records = row_records(self._backend, self.folder, FAILED, wanted)
        self._backend.delete(records, durability=self._durability)
        return self._backend.delete(keys, durability=self._durability)

    @_arguments.checked(StoreError)
    def states(self, *, max_attempts: int = 3) -> list[RowState]:
        """The state of every row, in order; of very many, `counts()` tells how many are in each."""
        total = self.num_rows
        if total > _MOST_STATES:
            raise InvalidRowsError(
                f"there are too many rows to tell of each: {total} of {_MOST_STATES}",
                path=self.path,
                fix="counts() tells how many are done, leased, failed and pending",
            )
        done = set(self.done().tolist())
        leases, failures = self._held(), self._all_failures()
        return [
            self._state(row, done, leases, failures, max_attempts=max_attempts)
            for row in range(total)
        ]

    @_arguments.checked(StoreError)
    def counts(self, *, max_attempts: int = 3) -> RowCounts:
        """How many rows are in each state; costs the files that are there, not the rows to come."""
        total = self.num_rows
        done = {row for row in self.done().tolist() if row < total}
        leased = {row for row in self._held() if row < total} - done
        failures = self._all_failures().items()
        failed = {row for row, names in failures if row < total and len(names) >= max_attempts}
        failed -= done | leased
        pending = total - len(done) - len(leased) - len(failed)
        return RowCounts(len(done), len(leased), len(failed), pending)

    def _record_bucket(self, bucket: int) -> None:
        """Record what was put by processes that died before they could, or by earlier versions."""
        if bucket in self._recorded:
            return
        self._recorded.add(bucket)
        backend, rows = (
            self._backend,
            range(bucket * ROWS_PER_FOLDER, (bucket + 1) * ROWS_PER_FOLDER),
        )
        recorded = {recorded_number(key) for key in row_records(backend, self.folder, LOOSE, rows)}
        for row in numbered_files(
            backend.list(f"{self.folder}/{LOOSE}/{bucket:06d}"), SUFFIX, digits=1
        ):
            if row not in recorded and row not in self._packed_ids:
                with contextlib.suppress(StoreError, FileNotFoundError):
                    segment = Segment(backend, self._row_key(row))
                    segment.close()
                    record_row(backend, self.folder, LOOSE, row, segment.digest)
        digests = {key[-32:] for key in row_records(backend, self.folder, FAILED, rows)}
        for row, names in self._failures(bucket).items():
            for name in names:
                with contextlib.suppress(StoreError, FileNotFoundError):
                    key = f"{self.folder}/{FAILED}/{bucket:06d}/{name}"
                    note = read_document(backend, key, FailureRecord)
                    if note.digest not in digests:
                        record_row(backend, self.folder, FAILED, row, str(note.digest))

    def _held(self) -> dict[int, Lease]:
        leases: dict[int, Lease] = {}
        for bucket in self._buckets(LEASES):
            for row, numbers in lease_numbers(self._backend, self.folder, bucket).items():
                lease = load_lease(self._backend, self.folder, row, numbers[-1])
                if lease is not None and not lease.expired:
                    leases[row] = lease
        return leases

    def _all_failures(self) -> dict[int, list[str]]:
        failures: dict[int, list[str]] = {}
        for bucket in self._buckets(FAILED):
            failures.update(self._failures(bucket))
        return failures

    def _state(
        self,
        row: int,
        done: set[int],
        leases: Mapping[int, Lease],
        failures: Mapping[int, list[str]],
        *,
        max_attempts: int,
    ) -> RowState:
        names = failures.get(row, [])
        error = self._last_error(row, names) if names else None
        if row in done:
            return RowState(row, "done", len(names), error=error)
        if row in leases:
            lease = leases[row]
            return RowState(row, "leased", len(names), lease.owner, lease.expires, error)
        state: RowStateName = "failed" if len(names) >= max_attempts else "pending"
        return RowState(row, state, len(names), error=error)

    def _last_error(self, row: int, names: list[str]) -> str:
        key = f"{self.folder}/{FAILED}/{row // ROWS_PER_FOLDER:06d}/{names[-1]}"
        try:
            return read_document(self._backend, key, FailureRecord).error
        except FileNotFoundError:
            return "forgotten meanwhile, so that the row is tried again"

    def _failures(self, bucket: int) -> dict[int, list[str]]:
        found: dict[int, list[tuple[float, str]]] = {}
        for entry in self._backend.list(f"{self.folder}/{FAILED}/{bucket:06d}"):
            row = entry.name.partition("-")[0]
            if is_number(row, digits=1) and int(row) // ROWS_PER_FOLDER == bucket:
                found.setdefault(int(row), []).append((entry.modified, entry.name))
        return {row: [name for _, name in sorted(named)] for row, named in found.items()}


def hash_owner(owner: str) -> int:
    """Where a worker begins its search."""
    return int(xxhash.xxh3_64_intdigest(owner.encode("utf-8", "backslashreplace")))


def shortened(text: str) -> str:
    """An error's text as it is kept: without lone surrogates, and its middle left out if it is long.

    >>> len(shortened("x" * 10**6)) < LONGEST_ERROR + 100
    True
    """
    most = LONGEST_ERROR
    while True:
        cut = head_and_tail(text, most).replace("\0", "\\x00")
        cut = cut.encode("utf-8", "backslashreplace").decode()
        if len(json.dumps(cut, ensure_ascii=False).encode()) <= LONGEST_ERROR + 2:
            return cut
        most = most * 3 // 4  # wide letters and line breaks take more than a byte


def _traceback(error: BaseException) -> str:
    try:
        return "".join(tracebacks.format_exception(error))
    except Exception as unprintable:  # a broken __str__ must not hide that there was an error
        return f"{type(error).__name__}, which cannot be shown: {type(unprintable).__name__}"
