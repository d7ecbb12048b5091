"""Which pixels of a convolution meet when it moves in strides."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from gradkeep.query._tiles import CACHED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.query._forms import Conv


def phases(form: Conv) -> Iterator[tuple[tuple[slice, ...], tuple[list[int], ...]]]:
    """Pixels that one residue of the stride reads, and how far from the position they are then.

    Pixel `stride * i + dilation * a - padding` is pixel `i + shift` of the phase `residue`.
    """
    per_axis: list[dict[int, list[int]]] = []
    for axis in range(len(form.size)):
        found: dict[int, list[int]] = {}
        for tap in range(form.kernel[axis]):
            shift, residue = divmod(
                tap * form.dilation[axis] - form.padding[axis], form.stride[axis]
            )
            found.setdefault(residue, []).append(shift)
        per_axis.append(found)
    for residues in itertools.product(*per_axis):
        which = tuple(
            slice(residue, None, step) for residue, step in zip(residues, form.stride, strict=True)
        )
        yield which, tuple(taps[r] for taps, r in zip(per_axis, residues, strict=True))


def phase_pixels(form: Conv) -> int:
    """The number of positions of the wide array that lie whole strides apart."""
    return math.prod(-(-size // step) for size, step in zip(form.size, form.stride, strict=True))


def gram_tile(
    form: Conv, queries: int, train: int, *, itemsize: int, scratch: int
) -> tuple[int, int]:
    """How many queries and others meet at a time: about four temporaries of all pairs of pixels,
    and the pixels of both sides laid out anew, twice where strides part them."""
    pairs = min(scratch // 8, CACHED) // itemsize // max(phase_pixels(form), form.positions) ** 2
    each = 2 * itemsize * (form.channels * math.prod(form.size) + form.filters * form.positions)
    wide = max(1, min(train, pairs, scratch // 4 // each))
    return max(1, min(queries, pairs // wide, scratch // 8 // each)), wide
