"""What may stand for a missing row: NaN, when it was asked for, and nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.errors import InvalidRows
from gradkeep.store._batch import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.store._encoding import AnyArray
    from gradkeep.store._schema import Array


def check_fill(fill: float, arrays: Sequence[Array], *, path: str) -> None:
    """Refuse to fill with a number, and to fill arrays that cannot hold NaN."""
    whole = [array.name for array in arrays if array.dtype[:5] != "float" or array.ragged]
    if not math.isnan(fill) or whole:
        raise InvalidRows(
            "only NaN may stand for a missing row, and only in float arrays of fixed shape",
            path=path,
            found=f"fill={fill!r}" + (f" for {', '.join(whole)}" if whole else ""),
            fix="pass fill=float('nan') and name only float arrays",
        )


def filled(found: Column, there: AnyArray) -> Column:
    """The found rows where `there [B]` is true, NaN elsewhere."""
    array = found.array
    values = np.full((len(there), *array.shape), np.nan, array.dtype)
    values[there] = found.decode()
    return Column(array.as_plain(), values)
