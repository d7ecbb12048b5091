"""How a fit is divided so that it stays within a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gradkeep._budgets import format_bytes
from gradkeep.datamodels.fitting._counts import pair_dtype
from gradkeep.errors import BudgetError

_STATE = 16
"""Arrays `[targets, examples]` that a solver holds at its peak, temporary ones included."""
_PANEL = 26
"""Bytes per value of a panel of rows: float64 counts, their products, the panel itself."""
_BLOCKS = ((6, 4032), (10, 1024))
"""Bytes per mask bit, and models at once: while pairs are counted, and in other passes."""
_TABLES = 4 << 20
"""Tables, tiles and strips of fixed size."""
_LEAST_ROWS = 8
_MOST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class FitLayout:
    """Whether the counts lie in memory and the matrix is made whole; how many targets are solved
    together; how many rows a panel and how many examples a working set may have."""

    in_memory: bool
    targets: int
    rows: int
    working: int


def fit_layout(
    *,
    models: int,
    examples: int,
    targets: int,
    itemsize: int,
    budget: int | None,
    folds: int = 0,
    predictions: int = 0,
) -> FitLayout:
    """The fastest division that fits into the budget; none is needed for None.

    In memory a fit takes n^2 (2 + 4) bytes in float32 (below 65,536 models), and as many as
    16 n t 4 for the targets solved together. Folds need their own counts, and `predictions` bytes;
    beyond the budget both lie in files.

    >>> fit_layout(models=5000, examples=20000, targets=8, itemsize=4, budget=4 << 30).in_memory
    True
    >>> fit_layout(models=5000, examples=20000, targets=8, itemsize=4, budget=1 << 30).in_memory
    False
    """
    if budget is None:
        return FitLayout(True, targets, _MOST_ROWS, examples)
    each = _STATE * examples * itemsize
    # What is there however the work is divided: sums, warm starts, results; blocks of masks.
    block = max(each_bit * min(models, most) for each_bit, most in _BLOCKS)
    held = _TABLES + examples * (targets * (16 + itemsize) + block)
    pairs = examples * examples * pair_dtype(models).itemsize * (2 if folds else 1)
    whole = (
        held
        + predictions
        + pairs
        + examples * examples * itemsize
        + _PANEL * examples * _LEAST_ROWS
    )
    if budget >= whole + each:
        spare = budget - whole
        rows = max(_LEAST_ROWS, min(_MOST_ROWS, spare // 2 // (_PANEL * examples)))
        count = (budget - whole - _PANEL * examples * (rows - _LEAST_ROWS)) // each
        return FitLayout(True, max(1, min(targets, count)), rows, examples)
    least = held + each + _PANEL * examples * _LEAST_ROWS
    if budget < least:
        raise BudgetError(
            "the memory budget is below the least that this fit can do with",
            found=format_bytes(budget),
            expected=f"{format_bytes(least)} or more ({least} bytes)",
            fix="raise memory_budget, or fit the targets in several parts",
        )
    spare = budget - least
    count = 1 + spare // 4 // each
    rows = _LEAST_ROWS + spare // 4 // (_PANEL * examples)
    working = int((spare / 4 / itemsize) ** 0.5)
    return FitLayout(False, min(targets, count), min(_MOST_ROWS, rows), working)
