"""Embeddings: only positions with equal ids have nonzero products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradkeep.factors._arithmetic import (
    CACHED,
    Spans,
    inner,
    row_of,
    squared_lengths,
    sum_columns,
    sum_rows,
)
from gradkeep.factors._form import (
    Compute,
    FactoredForm,
    OuterProducts,
    Parameter,
    PositionProducts,
    RaggedRows,
)
from gradkeep.factors._outer import summed_products
from gradkeep.factors._weights import WeightBlock, WeightMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, eq=False)
class LookupRows(RaggedRows):
    """Tokens of B rows one after the other, S = sum of T_i in total."""

    ids: Tensor
    """`[S]` int64"""
    g: Tensor
    """`[S, width]`"""
    offsets: Tensor
    """`[B + 1]` int64 on the CPU"""


@dataclass(frozen=True, slots=True)
class Lookup(FactoredForm[LookupRows]):
    """Embeddings: `suffix[t]` is added to row `prefix[t]` of the gradient `[rows, width]`."""

    kind: ClassVar[str] = "lookup"
    computes: ClassVar[tuple[Compute, ...]] = ("factored", "half", "restored")
    rows_type: ClassVar[type[Any]] = LookupRows
    sparse: ClassVar[bool] = True
    parameters: tuple[Parameter, ...]
    prefix: str
    suffix: str
    rows: int
    width: int

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the factors."""
        return (self.prefix, self.suffix)

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return the table."""
        return (WeightMatrix(1, self.rows, self.width),)

    def products(
        self, queries: LookupRows, train: LookupRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]`: sum over t, t' with equal ids of `g_t . g'_t'`.

        Tokens are sorted by id. Frequent ids are matrix products, the pairs of rare ones a list; 2 width operations for
        every pair of equal tokens and none for others.
        """
        out = train.g.new_zeros(len(queries), len(train))
        query_tokens, train_tokens = _SortedTokens(queries), _SortedTokens(train)
        common = query_tokens.ids[
            torch.isin(query_tokens.ids, train_tokens.ids, assume_unique=True)
        ]
        ours, theirs = (
            torch.searchsorted(query_tokens.ids, common),
            torch.searchsorted(train_tokens.ids, common),
        )
        pairs = (query_tokens.counts[ours] * train_tokens.counts[theirs]).tolist()
        # Multiplications from which the pairs of one id are worth their own matrix product.
        heavy = [count * self.width >= 1 << 15 for count in pairs]
        for one, other, large in zip(ours.tolist(), theirs.tolist(), heavy, strict=True):
            if large:
                _add_block(out, query_tokens, one, train_tokens, other, scratch)
        rare = ~torch.tensor(heavy, dtype=torch.bool, device=common.device)
        _add_list(out, query_tokens, ours[rare], train_tokens, theirs[rare], scratch)
        return out

    def coalesced(self, rows: LookupRows) -> LookupRows:
        """Sum equal ids of a row."""
        keys = row_of(rows.spans, rows.ids.device) * self.rows + rows.ids
        unique, place = torch.unique(keys, return_inverse=True)
        g = rows.g.new_zeros(len(unique), self.width).index_add_(0, place, rows.g)
        lengths = torch.bincount(unique // self.rows, minlength=len(rows)).cpu()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return LookupRows(unique % self.rows, g, offsets)

    def restore(self, rows: LookupRows) -> Tensor:
        """Return gradients `[B, rows * width]`, mostly zeros."""
        out = rows.g.new_zeros(len(rows) * self.rows, self.width)
        where = row_of(rows.spans, rows.ids.device) * self.rows + rows.ids
        return out.index_add_(0, where, rows.g).view(len(rows), self.rows * self.width)

    def between(
        self, rows: LookupRows, block: WeightBlock, row_vectors: Tensor, col_vectors: Tensor
    ) -> Tensor:
        """Return L^T W R `[B, 1, r, c]`: tokens read rows of L; T c (width + r) products per row."""
        moved = rows.g @ col_vectors[0].to(rows.g.dtype)
        return summed_products(row_vectors[0].to(moved.dtype)[rows.ids], moved, rows.spans)

    def squared_norms(self, rows: LookupRows) -> Tensor:
        """Return squared norms `[B]` of each row's sums over equal ids; 4 T width operations per row."""
        once = self.coalesced(rows)
        return sum_rows(squared_lengths(once.g)[:, None], once.spans)[:, 0]

    def weighted_sum(self, rows: LookupRows, weights: Tensor) -> Tensor:
        """Return weighted sums `[K, rows * width]`; 2 S width operations for each of K."""
        out = rows.g.new_zeros(len(weights), self.rows, self.width)
        where = row_of(rows.spans, rows.ids.device)
        for one, into in zip(weights, out, strict=True):
            share = one[where]
            chosen = share.nonzero()[:, 0]
            into.index_add_(0, rows.ids[chosen], rows.g[chosen] * share[chosen, None])
        return out.flatten(1)

    def weighted_squares(self, rows: LookupRows, weights: Tensor) -> Tensor:
        """Return weighted sums of squared gradients `[K, rows * width]`."""
        once = self.coalesced(rows)
        return self.weighted_sum(LookupRows(once.ids, once.g.square(), once.offsets), weights)

    def half(self, rows: LookupRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products with dense directions W `[K, rows * width]`: sum over t of `g_t . W[id_t]`."""
        parts = rows.spans
        out = rows.g.new_empty(len(directions), len(rows))
        table = directions.view(len(directions), self.rows, self.width)
        values = max(1, min(scratch // 3, CACHED) // rows.g.element_size() // self.width)
        kinds = max(1, min(len(directions), values // max(1, parts.longest)))
        for first in range(0, len(directions), kinds):
            some = table[first : first + kinds]
            for start, stop in parts.tiles(max(1, values // len(some))):
                at = slice(parts.bounds[start], parts.bounds[stop])
                products = some[:, rows.ids[at]].mul_(rows.g[at]).sum(2)
                out[first : first + kinds, start:stop] = sum_columns(
                    products, parts.cut(start, stop)
                )
        return out

    def along_positions(
        self, rows: LookupRows, directions: Tensor
    ) -> tuple[PositionProducts, ...] | None:
        """Return `g_t . W[id_t]` of every stored token, `[K, S]`; 2 K S width operations."""
        table = directions.view(len(directions), self.rows, self.width)
        out = rows.g.new_empty(len(directions), len(rows.g))
        for one, into in zip(table, out, strict=True):
            torch.sum(one[rows.ids] * rows.g, 1, out=into)
        return (PositionProducts(out, rows.spans),)

    def temporaries(self, rows: LookupRows) -> int:
        """Return the temporary values per row while it is restored: its places, as integers."""
        return 6 * rows.spans.longest

    def outer_products(self, rows: LookupRows, *, scratch: int) -> Iterator[OuterProducts]:
        """Yield the row of the table that each token reads, times its suffix."""
        yield OuterProducts(0, rows.g, rows.spans, ids=rows.ids)


class _SortedTokens:
    """Tokens sorted by id."""

    def __init__(self, rows: LookupRows) -> None:
        self.g = rows.g
        ids, self.order = torch.sort(rows.ids)
        self.row = row_of(rows.spans, rows.ids.device)[self.order]
        self.ids, self.counts = torch.unique_consecutive(ids, return_counts=True)
        self.starts = self.counts.cumsum(0) - self.counts

    def tokens(self, which: int) -> slice:
        """Return the slice of the tokens of one id."""
        start = int(self.starts[which])
        return slice(start, start + int(self.counts[which]))


def _add_block(
    out: Tensor,
    query_tokens: _SortedTokens,
    one: int,
    train_tokens: _SortedTokens,
    other: int,
    scratch: int,
) -> None:
    """Add the products of all pairs of tokens with one id."""
    width = out.shape[1]
    ours, theirs = query_tokens.tokens(one), train_tokens.tokens(other)
    values = min(scratch // 6, CACHED) // out.element_size()
    tokens = max(1, values // max(1, train_tokens.g.shape[1]))
    high = min(tokens, max(1, math.isqrt(values)))
    across = min(tokens, max(1, values // high))
    for first in range(ours.start, ours.stop, high):
        some = slice(first, min(first + high, ours.stop))
        grads = query_tokens.g[query_tokens.order[some]]
        for start in range(theirs.start, theirs.stop, across):
            others = slice(start, min(start + across, theirs.stop))
            block = grads @ train_tokens.g[train_tokens.order[others]].t()
            where = query_tokens.row[some, None] * width + train_tokens.row[others]
            out.view(-1).index_add_(0, where.flatten(), block.flatten())


def _add_list(
    out: Tensor,
    query_tokens: _SortedTokens,
    ours: Tensor,
    train_tokens: _SortedTokens,
    theirs: Tensor,
    scratch: int,
) -> None:
    """Add the products of a list of pairs of tokens, some ids at a time."""
    across = train_tokens.counts[theirs]
    pairs = query_tokens.counts[ours] * across
    ends = Spans((0, *pairs.cumsum(0).tolist()), None)
    limit = min(scratch // 3, CACHED) // out.element_size() // max(1, train_tokens.g.shape[1])
    for start, stop in ends.tiles(max(1, limit)):
        some = slice(start, stop)
        kind = torch.repeat_interleave(torch.arange(start, stop, device=ours.device), pairs[some])
        begin = torch.tensor(ends.bounds[start:stop], device=ours.device) - ends.bounds[start]
        place = torch.arange(len(kind), device=ours.device) - begin[kind - start]
        one = query_tokens.starts[ours][kind] + place // across[kind]
        other = train_tokens.starts[theirs][kind] + place % across[kind]
        products = inner(
            query_tokens.g[query_tokens.order[one]], train_tokens.g[train_tokens.order[other]]
        )
        out.view(-1).index_add_(
            0, query_tokens.row[one] * out.shape[1] + train_tokens.row[other], products
        )
