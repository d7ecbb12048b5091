"""Dividing a byte budget among queries, training rows, temporaries and the answer."""

from __future__ import annotations

from dataclasses import dataclass

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.errors import BudgetError

DEFAULT_BUDGET = 1 << 30
"""Bytes that a question may take, unless it says otherwise."""
_MOST_TRAIN = 64 << 20
_MOST_SCRATCH = 64 << 20
_LEAST_SCRATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How a budget is divided."""

    query_rows: int
    train_rows: int
    scratch: int
    restored: int
    """Bytes for queries that are kept restored while the training rows pass."""
    total: int


def memory_shares(
    budget: float | str | None,
    *,
    answer: int,
    mapped: int,
    query_row: float,
    train_row: float,
    queries: int,
    rows: int,
) -> MemoryShares:
    """The parts of a budget: the answer and the mapped file first, the rest by fixed shares.

    `query_row` and `train_row` are the bytes of one row's factors in memory. A budget too small
    for one row of each is an error that says how much is needed.
    """
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    least = int(answer + mapped + 2 * query_row + 4 * train_row + 2 * _LEAST_SCRATCH) + 1
    if limit < least:
        if budget is not None:
            raise BudgetError(
                "the memory budget is too small for this question",
                found=format_bytes(limit),
                expected=f"at least {format_bytes(least)}, of which the answer takes "
                f"{format_bytes(answer)}",
                fix=f"pass memory_budget={least} or more, ask for the top k only, or for fewer "
                f"queries or layers",
            )
        limit = 2 * least
    rest = limit - answer - mapped
    # Decoding and joining take a second copy of the rows for a moment.
    query_rows = max(1, min(queries, int(0.30 * rest / (2 * max(1.0, query_row)))))
    train = min(_MOST_TRAIN, 0.25 * rest)
    train_rows = max(1, min(rows, int(train / (2 * max(1.0, train_row)))))
    scratch = max(_LEAST_SCRATCH, min(_MOST_SCRATCH, int(0.2 * rest)))
    return MemoryShares(query_rows, train_rows, scratch, restored=int(0.2 * rest), total=limit)
