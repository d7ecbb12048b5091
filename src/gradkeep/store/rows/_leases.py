"""Advisory leases on rows: who works on what, until when.

A lease is a small numbered file. Taking, renewing and taking over all mean putting the next number,
which only one can do. Nothing rests on leases: if two processes train the same row after all, the
row itself has one winner.
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
    """The right to work on a row until `expires` (seconds since the epoch)."""

    row: int
    number: int
    owner: str
    token: str
    expires: float

    @property
    def expired(self) -> bool:
        """Whether somebody else may take the row now."""
        return time.time() >= self.expires


class LeaseRecord(Record, frozen=True):
    """What a lease file holds."""

    owner: str
    token: str
    expires: Finite


def default_owner() -> str:
    """A name for this process: host and process number."""
    return f"{socket.gethostname()}-{os.getpid()}"


def lease_key(folder: str, row: int, number: int) -> str:
    """The name of a lease file."""
    return f"{folder}/{LEASES}/{row // ROWS_PER_FOLDER:06d}/{row}-{number:06d}.json"


def lease_numbers(backend: Backend, folder: str, bucket: int) -> dict[int, list[int]]:
    """For every row of a bucket that has leases, their numbers, oldest first."""
    found: dict[int, list[int]] = {}
    for entry in backend.list(f"{folder}/{LEASES}/{bucket:06d}"):
        row, _, number = entry.name.removesuffix(".json").partition("-")
        named = is_number(row, digits=1) and is_number(number)
        if named and int(row) // ROWS_PER_FOLDER == bucket:
            found.setdefault(int(row), []).append(int(number))
    return {row: sorted(numbers) for row, numbers in found.items()}


def load_lease(backend: Backend, folder: str, row: int, number: int) -> Lease | None:
    """A lease; None if it is gone or unreadable, which for a lease is the same."""
    try:
        record = read_document(backend, lease_key(folder, row, number), LeaseRecord)
    except (FileNotFoundError, DamagedError):
        return None
    return Lease(row, number, record.owner, record.token, record.expires)


def take_lease(
    backend: Backend, folder: str, row: int, number: int, *, owner: str, seconds: float
) -> Lease | None:
    """Put the lease with this number; None if somebody else was first."""
    lease = Lease(row, number, owner, secrets.token_hex(8), round(time.time() + seconds, 3))
    data = to_bytes(LeaseRecord(owner=owner, token=lease.token, expires=lease.expires))
    try:
        # A lease lost to a power cut is a lease that ended: no fsync is worth waiting for.
        backend.put_if_absent(lease_key(folder, row, number), [data], durability="process")
    except ConflictError:
        return None
    return lease


def renew_lease(backend: Backend, folder: str, lease: Lease, *, seconds: float) -> Lease:
    """The same lease with a later end; raises `LeaseLostError` if it was taken over."""
    renewed = None
    if _stands(backend, folder, lease):
        number = lease.number + 1
        renewed = take_lease(backend, folder, lease.row, number, owner=lease.owner, seconds=seconds)
    if renewed is None:
        raise LeaseLostError(
            f"row {lease.row} was taken over by another worker",
            path=backend.describe(lease_key(folder, lease.row, lease.number + 1)),
            fix="stop working on it; if this happens often, ask for longer leases",
        )
    backend.delete([lease_key(folder, lease.row, lease.number)], durability="process")
    return renewed


def release_lease(backend: Backend, folder: str, lease: Lease) -> None:
    """Give the row back; if it was taken over meanwhile, it is the other's to give back."""
    if _stands(backend, folder, lease):
        backend.delete([lease_key(folder, lease.row, lease.number)], durability="process")


def _stands(backend: Backend, folder: str, lease: Lease) -> bool:
    """Whether the lease is still the one under its number: numbers begin anew for a free row."""
    return load_lease(backend, folder, lease.row, lease.number) == lease
