"""Some rows of a loader, spread over its beginning: what a basis is found with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._columns import without_columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.capturing._loader import Batches

_AT_ONCE = 4
"""Rows that are taken from one batch, if there are batches enough."""
_REACH = 64
"""Rows are looked for among so many times as many: a data set may be too long to go through."""


def sample_batches(batches: Batches, rows: int) -> Iterator[Any]:
    """About `rows` rows, a few of each of the chosen batches, which lie evenly.

    Rows that lie together are taken together: they have been padded to one length.
    """
    size = batch_size(batches.first)
    # Of a loader that does not know its rows, the first: beyond them there may be none.
    total = rows if batches.num_rows is None else min(batches.num_rows, rows * _REACH)
    there = max(1, math.ceil(total / size))
    each = min(size, max(_AT_ONCE, math.ceil(rows / there)))
    wanted = min(there, math.ceil(rows / each))
    chosen = {int((2 * number + 1) * there / (2 * wanted)) for number in range(wanted)}
    last = max(chosen)
    for number, (_, batch) in enumerate(batches):
        if number in chosen:
            have = batch_size(batch)
            start = (number * 7) % max(1, have - each + 1)
            yield rows_of(without_columns(batch), start, min(have, start + each))
        if number == last:
            return
