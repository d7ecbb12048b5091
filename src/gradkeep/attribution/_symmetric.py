"""Products of a matrix with itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BANDS, _LEAST, _MOST = 4, 64, 192
"""How many bands a product is cut into, and rows of a band: many bands leave more of the mirrored
half out, but a product of few rows is slow."""


def squared(values: Tensor) -> Tensor:
    """V^T V `[d, d]` of V `[S, d]`.

    It is symmetric: a band of rows is multiplied from the diagonal on, and mirrored, which is
    little more than half of the 2 S d^2 operations.
    """
    size = values.shape[1]
    # Products whose sides are multiples of 16 are up to twice as fast.
    step = min(_MOST, max(_LEAST, math.ceil(size / _BANDS / 16) * 16))
    if size <= step:
        return values.t() @ values
    out = values.new_empty(size, size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        band = values[:, start:stop].t() @ values[:, start:]
        out[start:stop, start:] = band
        out[stop:, start:stop] = band[:, stop - start :].t()
    return out
