"""How much memory capturing one sample takes, and how many samples fit a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradkeep._budgets import format_bytes
from gradkeep.errors import BudgetError

if TYPE_CHECKING:
    from gradkeep.capturing._first_batch import PreparedCapture

_SHARE_OF_SEGMENTS = 4
"""A quarter of a budget goes to the two segments that are being filled and written."""


_PASSING, _COPIES = 3, 3
_NEAR = 64 << 20
_LEAST_ROWS = 8


def row_footprint(prepared: PreparedCapture, batch: Any, rows: int) -> int:
    """Bytes that one sample occupies at the peak: what backward needs, gradients, and a copy.

    Measured on a batch: the tensors that autograd saves, twice (for gradients beside them), and
    the factors in the form they arise and the form they are kept in.
    """
    saved = sum(_saved(prepared, batch))
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    stored = prepared.row_bytes * rows
    return int((2 * saved + 2 * factors + 2 * stored) / max(1, rows)) + 1


def coordinate_footprint(prepared: PreparedCapture, coordinates: int, batch: Any, rows: int) -> int:
    """The same of a capture of so many coordinates a row: factors go as soon as these are made.

    What autograd saves, the gradients at the largest of it on their way, and the coordinates by layer,
    all together and once more while they are rounded.
    """
    saved = _saved(prepared, batch)
    passing = sum(saved) + _PASSING * max(saved, default=0)
    return passing // max(1, rows) + _COPIES * 4 * coordinates + 1


def _saved(prepared: PreparedCapture, batch: Any) -> list[int]:
    """Bytes of each tensor but the weights that autograd saves for the backward pass."""
    seen: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in prepared.tracer.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        prepared.tracer.target(prepared.tracer.model, batch).sum()
    return [size for pointer, size in seen.items() if pointer not in weights]


def rows_within(budget: int, footprint: int, *, beside: int = 0) -> int:
    """How many samples at once fit the budget; an error that names the least budget if none does.

    `beside` is what is held whatever the number of samples.
    """
    rows = (budget - budget // _SHARE_OF_SEGMENTS - beside) // footprint
    if rows < 1:
        least = (footprint + beside) * _SHARE_OF_SEGMENTS // (_SHARE_OF_SEGMENTS - 1) + 1
        raise BudgetError(
            "the memory budget is below what one sample needs",
            found=format_bytes(budget),
            expected=f"at least {format_bytes(least)}",
            fix=f"pass memory_budget={least} or more, or fewer layers",
        )
    return int(rows)


def rows_at_once(prepared: PreparedCapture, rows: int) -> int:
    """How many samples to run at once: so few that their factors stay near the cache.

    Larger batches do not run faster, and each of their fresh pages costs a fault. A handful of
    samples is needed to keep the multiplications busy.
    """
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    return max(_LEAST_ROWS, int(_NEAR / max(1.0, factors / max(1, rows))))


def segment_bytes(budget: int | None) -> int:
    """Bytes of one segment: small enough to lose little work, and two of them to fit the budget."""
    usual = 32 << 20
    return usual if budget is None else max(1, min(usual, budget // _SHARE_OF_SEGMENTS // 2))
