"""Parse and format budgets: `2GiB`, `500 MB`, `1000000`, or a fraction such as `0.5`."""

from __future__ import annotations

import re

from gradkeep.errors import BudgetError

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
_BYTES = "a number of bytes such as 2GiB, 500MB or 1000000"


def parse_bytes(budget: str | float) -> int:
    """Parse a budget in bytes; fractions raise.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 kB"), parse_bytes(7), parse_bytes(1e6)
    (2147483648, 1500, 7, 1000000)
    """
    size = parse_budget(budget)
    if isinstance(size, float):
        raise BudgetError(
            "a fraction is not possible here",
            code="budget.fraction",
            found=repr(budget),
            expected=_BYTES,
        )
    return size


def parse_budget(budget: str | float) -> int | float:
    """Parse bytes as an int, or a fraction of the unlimited peak as a float above 0 and at most 1.

    A float, or text with a point and no unit, is a fraction unless it is above 1.

    >>> parse_budget("2GiB"), parse_budget(0.5), parse_budget("0.5"), parse_budget(1), parse_budget(1.0)
    (2147483648, 0.5, 0.5, 1, 1.0)
    """
    if isinstance(budget, bool) or not isinstance(budget, str | int | float):
        raise _not_a_budget(budget)
    if isinstance(budget, str):
        written = _WRITTEN.fullmatch(budget)
        if written is None or written[2].lower() not in _UNITS:
            raise _not_a_budget(budget)
        number = float(written[1])
        if not written[2] and "." in written[1] and 0 < number <= 1:
            return number
        bytes_ = number * _UNITS[written[2].lower()]
    else:
        if isinstance(budget, float) and 0 < budget <= 1:
            return budget
        if isinstance(budget, float) and not budget.is_integer():
            raise _not_a_budget(budget)  # 1.5 is neither a fraction nor a number of bytes
        bytes_ = budget
    if not 1 <= bytes_ < float("inf"):
        raise BudgetError(
            "a budget must be positive and finite",
            code="budget.not_positive",
            found=repr(budget),
            expected=f"{_BYTES}, or a fraction above 0 and at most 1 where one is possible",
        )
    return int(bytes_)


def format_bytes(count: float) -> str:
    """Format bytes in decimal units.

    >>> format_bytes(10061179152)
    '10.06 GB'
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def _not_a_budget(budget: object) -> BudgetError:
    return BudgetError(
        "the budget is not a number of bytes",
        code="budget.not_bytes",
        found=repr(budget),
        expected=f"{_BYTES}, or a fraction such as 0.5 where one is possible",
    )
