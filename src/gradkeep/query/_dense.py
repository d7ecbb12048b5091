"""Gradients that are kept as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.query._factors import DenseRows
from gradkeep.query._inner import pairwise, squared_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query._forms import Dense


def restore(form: Dense, rows: DenseRows) -> Tensor:
    """The gradients `[B, P]` themselves."""
    del form
    return rows.values


def squared_norms(form: Dense, rows: DenseRows) -> Tensor:
    """Squared lengths `[B]`; 2 P operations a row."""
    del form
    return squared_lengths(rows.values)


def total(form: Dense, rows: DenseRows, weights: Tensor) -> Tensor:
    """Weighted sums `[K, B] @ [B, P]`."""
    del form
    return weights @ rows.values


def dense(form: Dense, queries: DenseRows, train: DenseRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, P] @ [P, N]`; 2 P operations a pair, no temporaries."""
    del form, scratch
    return pairwise(queries.values, train.values)


def half(form: Dense, rows: DenseRows, directions: Tensor, *, scratch: int) -> Tensor:
    """Products with dense directions, `[K, P] @ [P, B]`."""
    return dense(form, DenseRows(directions), rows, scratch=scratch)


def beside(form: Dense, rows: DenseRows) -> int:
    """Values of the temporaries of a row while it is restored."""
    del form, rows
    return 0


def concat(parts: Sequence[DenseRows]) -> DenseRows:
    """Rows of several parts, one after the other."""
    return DenseRows(torch.cat([part.values for part in parts]))


def take(rows: DenseRows, start: int, stop: int) -> DenseRows:
    """A view of some rows."""
    return DenseRows(rows.values[start:stop])
