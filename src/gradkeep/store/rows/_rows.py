"""Rows written by many processes: claimed, computed, then finished or failed.

A worker claims rows, computes them, and writes each. A failed row is recorded with its traceback and
retried a limited number of times.

A lease is a small numbered file. Taking, renewing and taking over all write the next number, which
only one process can do. Correctness does not depend on leases: if two processes compute the same row,
only the first result is stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
import traceback as tracebacks
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from gradkeep import _arguments
from gradkeep._display import head_and_tail
from gradkeep.errors import (
    ConflictError,
    DamagedError,
    InvalidRowsError,
    LeaseLostError,
    StoreError,
)
from gradkeep.store._document import Count, Finite, Record, read_document, to_bytes
from gradkeep.store.blocks._incoming import whole_numbers
from gradkeep.store.blocks._manifest import is_number, numbered_files
from gradkeep.store.blocks._segment import SUFFIX, Segment
from gradkeep.store.rows._row_files import (
    LOOSE,
    ROWS_PER_FOLDER,
    RowFiles,
    record_row,
    recorded_number,
    row_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


RowStateName = Literal["pending", "leased", "done", "failed"]

FAILED = "failed"
LEASES = "claims"
_MOST_STATES = 1 << 24
LONGEST_ERROR = 64 << 10
"""Most bytes of an error's text that are stored: half from its beginning, half from its end."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Right to work on a row until `expires`.

    Attributes:
        row: The row.
        number: Number of the lease file.
        owner: Name of the worker.
        token: Random identifier.
        expires: End, in seconds since the epoch.
    """

    row: int
    number: int
    owner: str
    token: str
    expires: float

    @property
    def expired(self) -> bool:
        """True if another worker may take the row now."""
        return time.time() >= self.expires


class LeaseRecord(Record, frozen=True):
    """Content of a lease file."""

    owner: str
    token: str
    expires: Finite


class FailureRecord(Record, frozen=True):
    """One failed attempt of a row."""

    row: Count
    owner: str
    error: str


@dataclass(frozen=True, slots=True)
class RowState:
    """State of one row.

    Attributes:
        row: The row.
        state: `pending`, `leased`, `done` or `failed`.
        attempts: Number of failed attempts.
        owner: Owner of the lease.
        expires: End of the lease, in seconds since the epoch.
        error: Traceback of the last failed attempt.
    """

    row: int
    state: RowStateName
    attempts: int = 0
    owner: str | None = None
    expires: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Number of rows of a set in each state.

    Attributes:
        done: Finished rows.
        leased: Rows that a worker holds.
        failed: Rows that failed too often.
        pending: All others.
    """

    done: int
    leased: int
    failed: int
    pending: int

    @property
    def unfinished(self) -> int:
        """Rows that are neither done nor failed too often."""
        return self.leased + self.pending


class Rows(RowFiles):
    """Growable set of rows 0 to `num_rows - 1` that many processes compute; see `Store.rows`.

    The first value written for a row is final.
    """

    def claim(
        self,
        *,
        owner: str | None = None,
        seconds: float = 600.0,
        count: int = 1,
        max_attempts: int = 3,
    ) -> list[Lease]:
        """Lease up to `count` rows that are neither done, leased nor failed too often.

        Workers start their search at different rows, so that they rarely compete.

        Args:
            owner: Name of the worker; host and process id by default.
            seconds: Lease timeout in seconds.
            count: Most rows to lease.
            max_attempts: Failed attempts after which a row is not leased any more.

        Returns:
            The leases; empty if no row is free.
        """
        _arguments.count("count", count, error=InvalidRowsError, least=1)
        _arguments.count("max_attempts", max_attempts, error=InvalidRowsError, least=1)
        seconds = _arguments.number("seconds", seconds, error=StoreError)
        # Any text, since broken host names occur.
        _arguments.instance("owner", owner, (str, type(None)), error=StoreError)
        owner = f"{socket.gethostname()}-{os.getpid()}" if owner is None else owner
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
            # In the first bucket, begin at the start row.
            rows = [*range(max(low, start), high), *range(low, min(start, high))]
            if bucket != first:
                rows = list(range(low, high))
            try:
                for lease in self._claim_in(bucket, rows, owner, seconds, max_attempts):
                    taken.append(lease)
                    if len(taken) == count:
                        return taken
            except BaseException:  # a full disk, for example: the caller never sees these leases
                for lease in taken:
                    self.release(lease)
                raise
        return taken

    def _claim_in(
        self, bucket: int, rows: Iterable[int], owner: str, seconds: float, max_attempts: int
    ) -> Iterator[Lease]:
        self._record_bucket(bucket)
        leases = self._lease_numbers(bucket)
        failures = self._failures(bucket)
        for row in rows:
            if row in self._known_done or row in self._packed_ids:
                continue
            if len(failures.get(row, ())) >= max_attempts:
                continue
            number = leases[row][-1] if row in leases else None
            if number is not None:
                held = self._load_lease(row, number)
                if held is not None and not held.expired:
                    continue
            if self.has(row):
                self._known_done.add(row)
                continue
            following = 0 if number is None else number + 1
            lease = self._take_lease(row, following, owner, seconds)
            if lease is None:
                continue
            stale = [self._lease_key(row, old) for old in leases.get(row, ())]
            self._backend.delete(stale, durability="process")
            if self.has(row):
                self.release(lease)
                self._known_done.add(row)
                continue
            yield lease

    @_arguments.checked(StoreError)
    def renew(self, lease: Lease, *, seconds: float = 600.0) -> Lease:
        """Extend a lease.

        Args:
            lease: The lease.
            seconds: New timeout in seconds from now.

        Returns:
            The new lease.

        Raises:
            LeaseLostError: Another worker has taken the row.
        """
        renewed, following = None, lease.number + 1
        if self._is_current(lease):
            renewed = self._take_lease(lease.row, following, lease.owner, seconds)
        if renewed is None:
            raise LeaseLostError(
                f"row {lease.row} was taken over by another worker",
                path=self._backend.describe(self._lease_key(lease.row, following)),
                fix="Stop working on it; if this happens often, use longer leases.",
            )
        self._backend.delete([self._lease_key(lease.row, lease.number)], durability="process")
        return renewed

    @_arguments.checked(StoreError)
    def release(self, lease: Lease) -> None:
        """End a lease without a result, unless another worker has taken it over.

        Args:
            lease: The lease.
        """
        if self._is_current(lease):
            self._backend.delete([self._lease_key(lease.row, lease.number)], durability="process")

    def _lease_key(self, row: int, number: int) -> str:
        return f"{self.folder}/{LEASES}/{row // ROWS_PER_FOLDER:06d}/{row}-{number:06d}.json"

    def _lease_numbers(self, bucket: int) -> dict[int, list[int]]:
        """List the lease numbers of every row of a bucket, oldest first."""
        numbers_of_row: dict[int, list[int]] = {}
        for entry in self._backend.list(f"{self.folder}/{LEASES}/{bucket:06d}"):
            row, _, number = entry.name.removesuffix(".json").partition("-")
            named = is_number(row, digits=1) and is_number(number)
            if named and int(row) // ROWS_PER_FOLDER == bucket:
                numbers_of_row.setdefault(int(row), []).append(int(number))
        return {row: sorted(numbers) for row, numbers in numbers_of_row.items()}

    def _load_lease(self, row: int, number: int) -> Lease | None:
        """Load a lease; return None if it is missing or unreadable, which is equivalent."""
        try:
            record = read_document(self._backend, self._lease_key(row, number), LeaseRecord)
        except (FileNotFoundError, DamagedError):
            return None
        return Lease(row, number, record.owner, record.token, record.expires)

    def _take_lease(self, row: int, number: int, owner: str, seconds: float) -> Lease | None:
        """Write the lease with this number; return None if another worker was first."""
        lease = Lease(row, number, owner, secrets.token_hex(8), round(time.time() + seconds, 3))
        data = to_bytes(LeaseRecord(owner=owner, token=lease.token, expires=lease.expires))
        key = self._lease_key(row, number)
        try:
            # A lease lost in a power cut is an expired lease: no fsync is needed.
            self._backend.put_if_absent(key, [data], durability="process")
        except ConflictError:
            return None
        return lease

    def _is_current(self, lease: Lease) -> bool:
        """Return True if the lease file is unchanged: numbers start again for a free row."""
        return self._load_lease(lease.row, lease.number) == lease

    @_arguments.checked(StoreError)
    def finish(
        self,
        lease: Lease,
        arrays: Mapping[str, Any],
        *,
        differing: Literal["raise", "keep"] = "keep",
    ) -> bool:
        """Write the leased row and end the lease.

        Args:
            lease: The lease.
            arrays: Value of every array of the schema, `[*shape]`.
            differing: As for `put`.

        Returns:
            True if this row is now the stored one, False if it was there already.
        """
        created = self.put(lease.row, arrays, differing=differing)
        self.release(lease)
        return created

    @_arguments.checked(StoreError)
    def fail(self, lease: Lease, error: BaseException | str) -> None:
        """Record a failed attempt with its traceback and end the lease.

        Args:
            lease: The lease.
            error: The exception, or its text.
        """
        text = error if isinstance(error, str) else _traceback(error)
        record = FailureRecord(row=lease.row, owner=lease.owner, error=shortened(text))
        # Named by the lease's token: failures of two workers are two attempts.
        name = f"{lease.row}-{lease.token}.json"
        key = f"{self.folder}/{FAILED}/{lease.row // ROWS_PER_FOLDER:06d}/{name}"
        data = to_bytes(record)
        self._backend.put_if_absent(key, [data], durability=self._durability)
        digest = xxhash.xxh3_128_hexdigest(data)
        recorded = record_row(self._backend, self.folder, FAILED, lease.row, digest)
        if not self._backend.exists(key):  # deleted by `retry` before it was recorded
            self._backend.delete([recorded], durability="process")
        self.release(lease)

    @_arguments.checked(StoreError)
    def retry(self, rows: Iterable[int] | None = None) -> int:
        """Delete failed attempts, so that the rows are tried again.

        Args:
            rows: The rows; all by default.

        Returns:
            Number of deleted attempts.
        """
        listed: Any = rows if rows is None or hasattr(rows, "shape") else list(rows)
        selected = None if rows is None else set(whole_numbers(listed, path=self.path).tolist())
        keys = []
        for bucket in self._buckets(FAILED):
            for row, names in self._failures(bucket).items():
                if selected is None or row in selected:
                    keys += [f"{self.folder}/{FAILED}/{bucket:06d}/{name}" for name in names]
        records = row_records(self._backend, self.folder, FAILED, selected)
        self._backend.delete(records, durability=self._durability)
        return self._backend.delete(keys, durability=self._durability)

    @_arguments.checked(StoreError)
    def states(self, *, max_attempts: int = 3) -> list[RowState]:
        """List the state of every row in order.

        Args:
            max_attempts: Failed attempts after which a row counts as failed.

        Returns:
            One state per row.

        Raises:
            InvalidRowsError: The set is too large; use `counts`.
        """
        total = self.num_rows
        if total > _MOST_STATES:
            raise InvalidRowsError(
                "the set is too large to list the state of every row",
                code="store.too_many_states",
                path=self.path,
                found=f"{total} rows",
                expected=f"at most {_MOST_STATES}",
                fix="Use counts().",
            )
        done = set(self.done().tolist())
        leases, failures = self._held(), self._all_failures()
        return [
            self._state(row, done, leases, failures, max_attempts=max_attempts)
            for row in range(total)
        ]

    @_arguments.checked(StoreError)
    def counts(self, *, max_attempts: int = 3) -> RowCounts:
        """Count the rows in each state; the cost depends on the existing files, not on `num_rows`.

        Args:
            max_attempts: Failed attempts after which a row counts as failed.

        Returns:
            The counts.
        """
        total = self.num_rows
        done = {row for row in self.done().tolist() if row < total}
        leased = {row for row in self._held() if row < total} - done
        failures = self._all_failures().items()
        failed = {row for row, names in failures if row < total and len(names) >= max_attempts}
        failed -= done | leased
        pending = total - len(done) - len(leased) - len(failed)
        return RowCounts(len(done), len(leased), len(failed), pending)

    def _record_bucket(self, bucket: int) -> None:
        """Record rows of processes that died before recording them, or of earlier versions."""
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
                    failure = read_document(backend, key, FailureRecord)
                    if failure.digest not in digests:
                        record_row(backend, self.folder, FAILED, row, str(failure.digest))

    def _held(self) -> dict[int, Lease]:
        leases: dict[int, Lease] = {}
        for bucket in self._buckets(LEASES):
            for row, numbers in self._lease_numbers(bucket).items():
                lease = self._load_lease(row, numbers[-1])
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
            return "deleted meanwhile by retry()"

    def _failures(self, bucket: int) -> dict[int, list[str]]:
        names_of_row: dict[int, list[tuple[float, str]]] = {}
        for entry in self._backend.list(f"{self.folder}/{FAILED}/{bucket:06d}"):
            row = entry.name.partition("-")[0]
            if is_number(row, digits=1) and int(row) // ROWS_PER_FOLDER == bucket:
                names_of_row.setdefault(int(row), []).append((entry.modified, entry.name))
        return {row: [name for _, name in sorted(named)] for row, named in names_of_row.items()}


def hash_owner(owner: str) -> int:
    """Hash the name of a worker, to spread the first rows of workers."""
    return int(xxhash.xxh3_64_intdigest(owner.encode("utf-8", "backslashreplace")))


def shortened(text: str) -> str:
    """Shorten an error's text: without lone surrogates, and without its middle if it is long.

    >>> len(shortened("x" * 10**6)) < LONGEST_ERROR + 100
    True
    """
    most = LONGEST_ERROR
    while True:
        cut = head_and_tail(text, most).replace("\0", "\\x00")
        cut = cut.encode("utf-8", "backslashreplace").decode()
        if len(json.dumps(cut, ensure_ascii=False).encode()) <= LONGEST_ERROR + 2:
            return cut
        most = most * 3 // 4  # non-ASCII characters and line breaks take more than a byte


def _traceback(error: BaseException) -> str:
    try:
        return "".join(tracebacks.format_exception(error))
    except Exception as unprintable:  # a broken __str__ must not hide the error
        return f"{type(error).__name__}, which cannot be shown: {type(unprintable).__name__}"
