"""Gradients restored a tile of rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.query._tiles import RESTORED, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def restored(
    count: int, values: int, itemsize: int, scratch: int, restore: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, int, Tensor]]:
    """`(start, stop, gradients [stop - start, P])`, with about `scratch` bytes for each tile.

    `values` counts what a row needs while it is restored, its gradient and all beside it.
    """
    for start, stop in tiles(count, values, itemsize, min(scratch, RESTORED)):
        yield start, stop, restore(start, stop)
