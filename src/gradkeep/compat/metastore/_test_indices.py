"""Chosen test samples as a person writes them: single numbers and ranges."""

from __future__ import annotations

import re

from gradkeep._arguments import shown
from gradkeep.errors import CaptureError

_PART = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_MOST = 10_000_000


def parse_indices(given: str) -> tuple[int, ...]:
    """The numbers in a list with commas; `a-b` means all from a to b.

    >>> parse_indices("3,17,20-23")
    (3, 17, 20, 21, 22, 23)
    """
    found: dict[int, None] = {}
    for part in given.split(","):
        match = _PART.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last < first + _MOST:
            raise CaptureError(
                f"--test_indices cannot be {shown(given)}",
                found=shown(part),
                expected="numbers and ranges with commas",
                fix="for example --test_indices 3,17,20-29",
            )
        for index in range(first, last + 1):
            if index in found:
                raise CaptureError(
                    f"--test_indices names {index} twice", fix="name every test sample once"
                )
            found[index] = None
    return tuple(found)
