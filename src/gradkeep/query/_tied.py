"""A weight used as an embedding and as a linear layer: both uses, and where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.query import _lookup, _outer
from gradkeep.query._factors import LookupRows, OuterRows, TiedRows
from gradkeep.query._segments import sum_pairs
from gradkeep.query._tiles import RESTORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.query._forms import Tied


def factored(form: Tied, queries: TiedRows, train: TiedRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]`: the products of like uses and, both ways, of unlike ones."""
    out = _lookup.factored(form.lookup, queries.lookup, train.lookup, scratch=scratch)
    out += _outer.factored(form.outer, queries.outer, train.outer, scratch=scratch)
    out += cross(form, queries.lookup, train.outer, scratch=scratch)
    out += cross(form, train.lookup, queries.outer, scratch=scratch).t()
    return out


def cross(form: Tied, tokens: LookupRows, uses: OuterRows, *, scratch: int) -> Tensor:
    """Inner products of the embedding's part with the linear layer's part.

    The sum over tokens t and positions t' of `h_t'[id_t] (g_t . x_t')`, where h is the suffix of
    the linear layer; 2 T T' width operations a pair.
    """
    x = uses.x[:, : form.outer.d_in]

    def product(left: slice, right: slice) -> Tensor:
        chosen = uses.g[right].index_select(1, tokens.ids[left])
        return (tokens.g[left] @ x[right].t()).mul_(chosen.t())

    return sum_pairs(
        _lookup.spans_of(tokens), _outer.spans_of(uses), product, like=x, scratch=scratch
    )


def restore(form: Tied, rows: TiedRows) -> Tensor:
    """Gradients `[B, P]`: the sum of both uses, then the bias."""
    out = _outer.restore(form.outer, rows.outer)
    out[:, : form.lookup.rows * form.lookup.width] += _lookup.restore(form.lookup, rows.lookup)
    return out


def squared_norms(form: Tied, rows: TiedRows) -> Tensor:
    """Squared lengths `[B]`: of each use, and twice the product of both."""
    out = _lookup.squared_norms(form.lookup, rows.lookup)
    out = out + _outer.squared_norms(form.outer, rows.outer)
    for row in range(len(rows)):
        one = take(rows, row, row + 1)
        out[row] += 2 * cross(form, one.lookup, one.outer, scratch=RESTORED)[0, 0]
    return out


def total(form: Tied, rows: TiedRows, weights: Tensor) -> Tensor:
    """Weighted sums `[K, P]` of both uses."""
    out = _outer.total(form.outer, rows.outer, weights)
    out[:, : form.lookup.rows * form.lookup.width] += _lookup.total(
        form.lookup, rows.lookup, weights
    )
    return out


def half(form: Tied, rows: TiedRows, directions: Tensor, *, scratch: int) -> Tensor:
    """Products with dense directions `[K, P]`, of both uses."""
    out = _outer.half(form.outer, rows.outer, directions, scratch=scratch)
    weights = directions[:, : form.lookup.rows * form.lookup.width]
    return out.add_(_lookup.half(form.lookup, rows.lookup, weights, scratch=scratch))


def beside(form: Tied, rows: TiedRows) -> int:
    """Values of the temporaries of a row while it is restored: one use beside the other."""
    values = _lookup.beside(form.lookup, rows.lookup) + _outer.beside(form.outer, rows.outer)
    return values + form.lookup.rows * form.lookup.width


def concat(parts: Sequence[TiedRows]) -> TiedRows:
    """Rows of several parts, one after the other."""
    lookup = _lookup.concat([part.lookup for part in parts])
    return TiedRows(lookup, _outer.concat([part.outer for part in parts]))


def take(rows: TiedRows, start: int, stop: int) -> TiedRows:
    """A view of some rows."""
    return TiedRows(_lookup.take(rows.lookup, start, stop), _outer.take(rows.outer, start, stop))
