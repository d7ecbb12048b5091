"""The second record of rows in files of their own, and of failed attempts.

Such a record is an empty file under `heads/` whose name has the row and the digest of what was put.
It is put after the row, without an fsync: one that a power cut takes is no damage, and none can be
torn. What is removed on purpose loses its record first, so a record without its file means a loss.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradkeep.store._keys import HEADS
from gradkeep.store.rows._leases import ROWS_PER_FOLDER

if TYPE_CHECKING:
    from collections.abc import Collection

    from gradkeep.store.backends._backend import Backend

_NAME = re.compile(r"(\d{6,18})-[0-9a-f]{32}")


def row_record_key(folder: str, part: str, row: int, digest: str) -> str:
    """Return the name of the record of a row (part `rows`) or of a failed attempt (part `failed`)."""
    return f"{HEADS}/{folder}/{part}/{row // ROWS_PER_FOLDER:06d}/{row:06d}-{digest}"


def record_row(backend: Backend, folder: str, part: str, row: int, digest: str) -> str:
    """Record what was put, and return the name of the record."""
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
    wanted = None if rows is None else set(rows)
    if wanted is None:
        buckets = [entry.name for entry in backend.list(place) if entry.is_folder]
    else:
        buckets = [f"{one:06d}" for one in sorted({row // ROWS_PER_FOLDER for row in wanted})]
    found = []
    for bucket in buckets:
        for entry in backend.list(f"{place}/{bucket}"):
            match = _NAME.fullmatch(entry.name)
            if match is not None and (wanted is None or int(match[1]) in wanted):
                found.append(f"{place}/{bucket}/{entry.name}")
    return found
