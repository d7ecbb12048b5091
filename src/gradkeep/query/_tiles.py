"""How much is worked on at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHED = 1 << 21
"""Bytes of one temporary that several operators pass over: what stays in the cache."""
RESTORED = 1 << 26
"""Bytes of restored gradients: enough rows for a matrix product of a good shape."""


def tiles(count: int, values: int, itemsize: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Rows `(start, stop)` of so many values each that fit into `scratch` bytes, at least one.

    >>> list(tiles(5, 10, 4, 80))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, scratch // max(1, values * itemsize))
    for start in range(0, count, step):
        yield start, min(start + step, count)
