"""The numbers of some rows of one layer, in the form they were kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class OuterRows:
    """Positions of B rows one after the other, S = sum of T_i in all."""

    x: torch.Tensor
    """Prefix `[S, d_in]`, or `[S, d_in + 1]` if the form says `ones`."""
    g: torch.Tensor
    """Suffix `[S, d_out]`"""
    offsets: torch.Tensor | None = None
    """`[B + 1]` int64 on the CPU; None: one position a row, B = S."""

    def __len__(self) -> int:
        return len(self.x) if self.offsets is None else len(self.offsets) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ConvRows:
    """Raw pixels of B rows."""

    wide: torch.Tensor
    """`[B, C, *size]`"""
    narrow: torch.Tensor
    """`[B, D, *out]`"""

    def __len__(self) -> int:
        return len(self.wide)


@dataclass(frozen=True, slots=True, eq=False)
class LookupRows:
    """Tokens of B rows one after the other, S = sum of T_i in all."""

    ids: torch.Tensor
    """`[S]` int64"""
    g: torch.Tensor
    """`[S, width]`"""
    offsets: torch.Tensor
    """`[B + 1]` int64 on the CPU"""

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """Gradients, or sketches of them, of B rows."""

    values: torch.Tensor
    """`[B, P]`"""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class TiedRows:
    """Both uses of a weight by the same B rows."""

    lookup: LookupRows
    outer: OuterRows

    def __len__(self) -> int:
        return len(self.lookup)


Factors = OuterRows | ConvRows | LookupRows | DenseRows | TiedRows


def positions_of(rows: Factors) -> float:
    """The number of positions of all rows together; what has none counts one a row."""
    match rows:
        case OuterRows() | LookupRows():
            return float(len(rows.g))
        case ConvRows():
            return float(rows.narrow[:, 0].numel())
        case TiedRows():
            return positions_of(rows.outer)
        case DenseRows():
            return float(len(rows))


def example_of(rows: Factors) -> torch.Tensor:
    """An array of the rows that has their dtype and device."""
    match rows:
        case OuterRows() | LookupRows():
            return rows.g
        case ConvRows():
            return rows.wide
        case DenseRows():
            return rows.values
        case TiedRows():
            return rows.outer.g


def dtype_of(rows: Factors) -> torch.dtype:
    """The dtype of the factors."""
    return example_of(rows).dtype
