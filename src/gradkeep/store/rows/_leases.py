"""Advisory leases on rows.

A lease is a small numbered file. Taking, renewing and taking over all write the next number, which
only one process can do. Correctness does not depend on leases: if two processes compute the same row,
only the first result is stored.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.errors import ConflictError, DamagedError, LeaseLostError
from gradkeep.store._document import Finite, Record, read_document, to_bytes
from gradkeep.store.blocks._manifest import is_number

if TYPE_CHECKING:
    from gradkeep.store.backends._backend import Backend

LEASES = "claims"
ROWS_PER_FOLDER = 1024


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


def default_owner() -> str:
    """Return a name for this process: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def lease_key(folder: str, row: int, number: int) -> str:
    return f"{folder}/{LEASES}/{row // ROWS_PER_FOLDER:06d}/{row}-{number:06d}.json"


def lease_numbers(backend: Backend, folder: str, bucket: int) -> dict[int, list[int]]:
    """List the lease numbers of every row of a bucket, oldest first."""
    numbers_of_row: dict[int, list[int]] = {}
    for entry in backend.list(f"{folder}/{LEASES}/{bucket:06d}"):
        row, _, number = entry.name.removesuffix(".json").partition("-")
        named = is_number(row, digits=1) and is_number(number)
        if named and int(row) // ROWS_PER_FOLDER == bucket:
            numbers_of_row.setdefault(int(row), []).append(int(number))
    return {row: sorted(numbers) for row, numbers in numbers_of_row.items()}


def load_lease(backend: Backend, folder: str, row: int, number: int) -> Lease | None:
    """Load a lease; return None if it is missing or unreadable, which is equivalent."""
    try:
        record = read_document(backend, lease_key(folder, row, number), LeaseRecord)
    except (FileNotFoundError, DamagedError):
        return None
    return Lease(row, number, record.owner, record.token, record.expires)


def take_lease(
    backend: Backend, folder: str, row: int, number: int, *, owner: str, seconds: float
) -> Lease | None:
    """Write the lease with this number; return None if another worker was first."""
    lease = Lease(row, number, owner, secrets.token_hex(8), round(time.time() + seconds, 3))
    data = to_bytes(LeaseRecord(owner=owner, token=lease.token, expires=lease.expires))
    try:
        # A lease lost in a power cut is an expired lease: no fsync is needed.
        backend.put_if_absent(lease_key(folder, row, number), [data], durability="process")
    except ConflictError:
        return None
    return lease


def renew_lease(backend: Backend, folder: str, lease: Lease, *, seconds: float) -> Lease:
    """Return the lease with a later end; raise `LeaseLostError` if it was taken over."""
    renewed = None
    if _is_current(backend, folder, lease):
        number = lease.number + 1
        renewed = take_lease(backend, folder, lease.row, number, owner=lease.owner, seconds=seconds)
    if renewed is None:
        raise LeaseLostError(
            f"row {lease.row} was taken over by another worker",
            path=backend.describe(lease_key(folder, lease.row, lease.number + 1)),
            fix="Stop working on it; if this happens often, use longer leases.",
        )
    backend.delete([lease_key(folder, lease.row, lease.number)], durability="process")
    return renewed


def release_lease(backend: Backend, folder: str, lease: Lease) -> None:
    """End the lease, unless another worker has taken it over."""
    if _is_current(backend, folder, lease):
        backend.delete([lease_key(folder, lease.row, lease.number)], durability="process")


def _is_current(backend: Backend, folder: str, lease: Lease) -> bool:
    """Return True if the lease file is unchanged: numbers start again for a free row."""
    return load_lease(backend, folder, lease.row, lease.number) == lease
