"""How much there is to multiply."""

from __future__ import annotations

from dataclasses import dataclass

SCRATCH = 1 << 28
"""Bytes of temporaries, where nobody sets a bound."""


@dataclass(frozen=True, slots=True)
class Load:
    """How many rows meet how many, and how many positions they have on average."""

    n_train: int
    n_query: int
    t_train: float = 1.0
    t_query: float = 1.0
    scratch: int = SCRATCH
    """Bytes that temporaries may take."""
