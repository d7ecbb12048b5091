"""What does not fit into the machine is refused before it is begun."""

from __future__ import annotations

import os

from gradkeep._budgets import format_bytes
from gradkeep.errors import AttributionError


def require_room(needed: int, what: str, *, fix: str) -> None:
    """Raise if so many bytes are more than the machine has.

    >>> require_room(1 << 60, "a matrix", fix="make it smaller")
    Traceback (most recent call last):
    gradkeep.errors.AttributionError: a matrix does not fit into memory...
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise AttributionError(
            f"{what} does not fit into memory",
            found=f"{format_bytes(needed)} needed",
            expected=f"less than the machine's {format_bytes(there)}",
            fix=fix,
        )
