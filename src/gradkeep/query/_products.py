"""Answers: products of gradients with the ids they belong to and the plan they were made by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import format_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gradkeep.query._ways import How

    Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Step:
    """How one layer was multiplied."""

    layer: str
    form: str
    how: How
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What was done, layer by layer, and in how many bytes."""

    steps: tuple[Step, ...]
    query_rows: int
    """Queries held at once."""
    train_rows: int
    """Training rows held at once."""
    scratch: int
    """Bytes of temporaries."""
    memory: int
    """Bytes planned for in all."""

    def __str__(self) -> str:
        rows = [f"{s.layer}: {s.form}, {s.how}, {s.predicted_seconds:.3g} s" for s in self.steps]
        held = (
            f"{self.query_rows} queries against {self.train_rows} rows at a time "
            f"in {format_bytes(self.memory)}"
        )
        return "\n".join([*rows, held])


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """Inner products (or cosines) of gradients `[Q, N]`."""

    values: torch.Tensor
    """`[Q, N]` float32"""
    query_ids: Ids
    train_ids: Ids
    plan: Plan
    layers: tuple[str, ...]
    per_layer: torch.Tensor | None = None
    """`[L, Q, N]`, where it was asked for"""


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """The k largest products of each query."""

    values: torch.Tensor
    """`[Q, k]`, falling"""
    ids: torch.Tensor
    """`[Q, k]` int64: the training rows"""
    query_ids: Ids
    plan: Plan
