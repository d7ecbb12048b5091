"""Embeddings: only positions with equal ids meet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.query._factors import LookupRows
from gradkeep.query._inner import inner, squared_lengths
from gradkeep.query._segments import (
    Spans,
    join_offsets,
    row_of,
    spans,
    sum_columns,
    sum_rows,
)
from gradkeep.query._tiles import CACHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query._forms import Lookup

_BLOCK = 1 << 15
"""Multiplications from which the pairs of one id are worth a matrix product of their own."""


def spans_of(rows: LookupRows) -> Spans:
    """Where each row's tokens are."""
    return spans(rows.offsets, len(rows.ids))


def factored(form: Lookup, queries: LookupRows, train: LookupRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]`: sum over t, t' with equal ids of `g_t . g'_t'`.

    Tokens are sorted by id. Frequent ids are matrix products, the pairs of rare ones a list;
    2 width operations for every pair of equal tokens and none for others.
    """
    out = train.g.new_zeros(len(queries), len(train))
    left, right = _Sorted(queries), _Sorted(train)
    common = left.ids[torch.isin(left.ids, right.ids, assume_unique=True)]
    ours, theirs = torch.searchsorted(left.ids, common), torch.searchsorted(right.ids, common)
    pairs = (left.counts[ours] * right.counts[theirs]).tolist()
    heavy = [count * form.width >= _BLOCK for count in pairs]
    for one, other, large in zip(ours.tolist(), theirs.tolist(), heavy, strict=True):
        if large:
            _add_block(out, left, one, right, other, scratch)
    rare = ~torch.tensor(heavy, dtype=torch.bool, device=common.device)
    _add_list(out, left, ours[rare], right, theirs[rare], scratch)
    return out


class _Sorted:
    """Tokens in the order of their ids."""

    def __init__(self, rows: LookupRows) -> None:
        self.g = rows.g
        ids, self.order = torch.sort(rows.ids)
        self.row = row_of(spans_of(rows), rows.ids.device)[self.order]
        self.ids, self.counts = torch.unique_consecutive(ids, return_counts=True)
        self.starts = self.counts.cumsum(0) - self.counts

    def tokens(self, which: int) -> slice:
        """Where the tokens of one id are in the order."""
        start = int(self.starts[which])
        return slice(start, start + int(self.counts[which]))


def _add_block(
    out: Tensor, left: _Sorted, one: int, right: _Sorted, other: int, scratch: int
) -> None:
    """Adds the products of all pairs of tokens with one id."""
    width = out.shape[1]
    ours, theirs = left.tokens(one), right.tokens(other)
    values = min(scratch // 6, CACHED) // out.element_size()
    tokens = max(1, values // max(1, right.g.shape[1]))
    high = min(tokens, max(1, math.isqrt(values)))
    across = min(tokens, max(1, values // high))
    for first in range(ours.start, ours.stop, high):
        some = slice(first, min(first + high, ours.stop))
        grads = left.g[left.order[some]]
        for start in range(theirs.start, theirs.stop, across):
            those = slice(start, min(start + across, theirs.stop))
            block = grads @ right.g[right.order[those]].t()
            where = left.row[some, None] * width + right.row[those]
            out.view(-1).index_add_(0, where.flatten(), block.flatten())


def _add_list(
    out: Tensor, left: _Sorted, ours: Tensor, right: _Sorted, theirs: Tensor, scratch: int
) -> None:
    """Adds the products of a list of pairs of tokens, some ids at a time."""
    across = right.counts[theirs]
    pairs = left.counts[ours] * across
    ends = Spans((0, *pairs.cumsum(0).tolist()), None)
    limit = min(scratch // 3, CACHED) // out.element_size() // max(1, right.g.shape[1])
    for start, stop in ends.tiles(max(1, limit)):
        some = slice(start, stop)
        kind = torch.repeat_interleave(torch.arange(start, stop, device=ours.device), pairs[some])
        begin = torch.tensor(ends.bounds[start:stop], device=ours.device) - ends.bounds[start]
        place = torch.arange(len(kind), device=ours.device) - begin[kind - start]
        one = left.starts[ours][kind] + place // across[kind]
        other = right.starts[theirs][kind] + place % across[kind]
        products = inner(left.g[left.order[one]], right.g[right.order[other]])
        out.view(-1).index_add_(0, left.row[one] * out.shape[1] + right.row[other], products)


def coalesced(form: Lookup, rows: LookupRows) -> LookupRows:
    """The same gradients with every id at most once in a row."""
    keys = row_of(spans_of(rows), rows.ids.device) * form.rows + rows.ids
    found, place = torch.unique(keys, return_inverse=True)
    g = rows.g.new_zeros(len(found), form.width).index_add_(0, place, rows.g)
    lengths = torch.bincount(found // form.rows, minlength=len(rows)).cpu()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return LookupRows(found % form.rows, g, offsets)


def restore(form: Lookup, rows: LookupRows) -> Tensor:
    """Gradients `[B, rows * width]`, nearly all zeros."""
    out = rows.g.new_zeros(len(rows) * form.rows, form.width)
    where = row_of(spans_of(rows), rows.ids.device) * form.rows + rows.ids
    return out.index_add_(0, where, rows.g).view(len(rows), form.rows * form.width)


def squared_norms(form: Lookup, rows: LookupRows) -> Tensor:
    """Squared lengths `[B]`: of each row's sums over equal ids; 4 T width operations a row."""
    once = coalesced(form, rows)
    return sum_rows(squared_lengths(once.g)[:, None], spans_of(once))[:, 0]


def total(form: Lookup, rows: LookupRows, weights: Tensor) -> Tensor:
    """Weighted sums `[K, rows * width]`; 2 S width operations for each of K."""
    out = rows.g.new_zeros(len(weights), form.rows, form.width)
    where = row_of(spans_of(rows), rows.ids.device)
    for one, into in zip(weights, out, strict=True):
        share = one[where]
        chosen = share.nonzero()[:, 0]
        into.index_add_(0, rows.ids[chosen], rows.g[chosen] * share[chosen, None])
    return out.flatten(1)


def squares(form: Lookup, rows: LookupRows, weights: Tensor) -> Tensor:
    """Weighted sums of squared gradients `[K, rows * width]`."""
    once = coalesced(form, rows)
    return total(form, LookupRows(once.ids, once.g.square(), once.offsets), weights)


def half(form: Lookup, rows: LookupRows, directions: Tensor, *, scratch: int) -> Tensor:
    """Products with dense directions W `[K, rows * width]`: sum over t of `g_t . W[id_t]`."""
    parts = spans_of(rows)
    out = rows.g.new_empty(len(directions), len(rows))
    table = directions.view(len(directions), form.rows, form.width)
    values = max(1, min(scratch // 3, CACHED) // rows.g.element_size() // form.width)
    kinds = max(1, min(len(directions), values // max(1, parts.longest)))
    for first in range(0, len(directions), kinds):
        some = table[first : first + kinds]
        for start, stop in parts.tiles(max(1, values // len(some))):
            at = slice(parts.bounds[start], parts.bounds[stop])
            products = some[:, rows.ids[at]].mul_(rows.g[at]).sum(2)
            out[first : first + kinds, start:stop] = sum_columns(products, parts.cut(start, stop))
    return out


def beside(form: Lookup, rows: LookupRows) -> int:
    """Values of the temporaries of a row while it is restored: its places, as integers."""
    del form
    return 6 * spans_of(rows).longest


def concat(parts: Sequence[LookupRows]) -> LookupRows:
    """Rows of several parts, one after the other."""
    ids = torch.cat([part.ids for part in parts])
    g = torch.cat([part.g for part in parts])
    return LookupRows(ids, g, join_offsets([part.offsets for part in parts]))


def take(rows: LookupRows, start: int, stop: int) -> LookupRows:
    """A view of some rows."""
    offsets = rows.offsets[start : stop + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    return LookupRows(rows.ids[low:high], rows.g[low:high], offsets - low)
