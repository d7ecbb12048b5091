"""Budgets as people write them: `2GiB`, `500 MB`, `1000000`."""

from __future__ import annotations

import re

from gradkeep._errors import BudgetError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes from a number with a unit.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 kB"), parse_bytes(7)
    (2147483648, 1500, 7)
    """
    if isinstance(text, int):
        return text
    found = _WRITTEN.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise BudgetError(
            "this is not a number of bytes",
            found=repr(text),
            expected="a number with a unit such as 2GiB, 500MB or 1000000",
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])


def format_bytes(count: float) -> str:
    """Bytes for people.

    >>> format_bytes(10061179152)
    '10.06 GB'
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
