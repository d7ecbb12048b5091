"""Embeddings: only positions with equal ids meet."""

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
    spans,
    squared_lengths,
    sum_columns,
    sum_rows,
)
from gradkeep.factors._cost import (
    FOLD,
    RUN,
    TOUCH,
    TURN,
    WRITE,
    Cost,
    ProductSize,
    calls,
    elementwise,
    matrix_product,
)
from gradkeep.factors._form import (
    Compute,
    Form,
    GradientRows,
    OuterProducts,
    Parameter,
    PositionProducts,
)
from gradkeep.factors._outer import summed_products
from gradkeep.factors._weights import WeightBlock, WeightMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.factors._form import ArraySource

_BLOCK = 1 << 15
"""Multiplications from which the pairs of one id are worth a matrix product of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupRows(GradientRows):
    """Tokens of B rows one after the other, S = sum of T_i in all."""

    ids: Tensor
    """`[S]` int64"""
    g: Tensor
    """`[S, width]`"""
    offsets: Tensor
    """`[B + 1]` int64 on the CPU"""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def spans(self) -> Spans:
        """Where each row's tokens are."""
        return spans(self.offsets, len(self.ids))

    @property
    def positions(self) -> float:
        """The number of tokens of all rows together."""
        return float(len(self.g))

    def take(self, start: int, stop: int) -> LookupRows:
        """A view of some rows."""
        offsets = self.offsets[start : stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        return LookupRows(self.ids[low:high], self.g[low:high], offsets - low)


@dataclass(frozen=True, slots=True)
class Lookup(Form[LookupRows]):
    """Embeddings: row `prefix[t]` of the gradient `[rows, width]` gains `suffix[t]`."""

    kind: ClassVar[str] = "lookup"
    computes: ClassVar[tuple[Compute, ...]] = ("factored", "half", "restored")
    rows_type: ClassVar[type[Any]] = LookupRows
    factored: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    parameters: tuple[Parameter, ...]
    prefix: str
    suffix: str
    rows: int
    width: int

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that hold the factors."""
        return (self.prefix, self.suffix)

    @property
    def restored_size(self) -> int:
        """P, nearly all of it zeros."""
        return self.rows * self.width

    def read(self, source: ArraySource) -> LookupRows:
        """The rows that some arrays hold."""
        offsets = source.offsets(self.suffix)
        assert offsets is not None
        return LookupRows(source.tensor(self.prefix), source.tensor(self.suffix), offsets)

    def tensors(self, rows: LookupRows) -> dict[str, Tensor]:
        """Ids and suffixes by the names of their arrays."""
        return {self.prefix: rows.ids, self.suffix: rows.g}

    def offsets(self, rows: LookupRows, array: str) -> Tensor | None:
        """Where each row's tokens begin and end."""
        del array
        return rows.offsets

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """The table."""
        return (WeightMatrix(1, self.rows, self.width),)

    def products(
        self, queries: LookupRows, train: LookupRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Inner products `[Q, N]`: sum over t, t' with equal ids of `g_t . g'_t'`.

        Tokens are sorted by id. Frequent ids are matrix products, the pairs of rare ones a list;
        2 width operations for every pair of equal tokens and none for others.
        """
        out = train.g.new_zeros(len(queries), len(train))
        left, right = _SortedTokens(queries), _SortedTokens(train)
        common = left.ids[torch.isin(left.ids, right.ids, assume_unique=True)]
        ours, theirs = torch.searchsorted(left.ids, common), torch.searchsorted(right.ids, common)
        pairs = (left.counts[ours] * right.counts[theirs]).tolist()
        heavy = [count * self.width >= _BLOCK for count in pairs]
        for one, other, large in zip(ours.tolist(), theirs.tolist(), heavy, strict=True):
            if large:
                _add_block(out, left, one, right, other, scratch)
        rare = ~torch.tensor(heavy, dtype=torch.bool, device=common.device)
        _add_list(out, left, ours[rare], right, theirs[rare], scratch)
        return out

    def coalesced(self, rows: LookupRows) -> LookupRows:
        """The same gradients with every id at most once in a row."""
        keys = row_of(rows.spans, rows.ids.device) * self.rows + rows.ids
        found, place = torch.unique(keys, return_inverse=True)
        g = rows.g.new_zeros(len(found), self.width).index_add_(0, place, rows.g)
        lengths = torch.bincount(found // self.rows, minlength=len(rows)).cpu()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return LookupRows(found % self.rows, g, offsets)

    def restore(self, rows: LookupRows) -> Tensor:
        """Gradients `[B, rows * width]`, nearly all zeros."""
        out = rows.g.new_zeros(len(rows) * self.rows, self.width)
        where = row_of(rows.spans, rows.ids.device) * self.rows + rows.ids
        return out.index_add_(0, where, rows.g).view(len(rows), self.rows * self.width)

    def between(self, rows: LookupRows, block: WeightBlock, left: Tensor, right: Tensor) -> Tensor:
        """`left^T W right` `[B, 1, r, c]`: tokens read rows of `left`; T c (width + r) products a row."""
        del block
        moved = rows.g @ right[0].to(rows.g.dtype)
        return summed_products(left[0].to(moved.dtype)[rows.ids], moved, rows.spans)

    def squared_norms(self, rows: LookupRows) -> Tensor:
        """Squared lengths `[B]`: of each row's sums over equal ids; 4 T width operations a row."""
        once = self.coalesced(rows)
        return sum_rows(squared_lengths(once.g)[:, None], once.spans)[:, 0]

    def weighted_sum(self, rows: LookupRows, weights: Tensor) -> Tensor:
        """Weighted sums `[K, rows * width]`; 2 S width operations for each of K."""
        out = rows.g.new_zeros(len(weights), self.rows, self.width)
        where = row_of(rows.spans, rows.ids.device)
        for one, into in zip(weights, out, strict=True):
            share = one[where]
            chosen = share.nonzero()[:, 0]
            into.index_add_(0, rows.ids[chosen], rows.g[chosen] * share[chosen, None])
        return out.flatten(1)

    def weighted_squares(self, rows: LookupRows, weights: Tensor) -> Tensor:
        """Weighted sums of squared gradients `[K, rows * width]`."""
        once = self.coalesced(rows)
        return self.weighted_sum(LookupRows(once.ids, once.g.square(), once.offsets), weights)

    def half(self, rows: LookupRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Products with dense directions W `[K, rows * width]`: sum over t of `g_t . W[id_t]`."""
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
        """`g_t . W[id_t]` of every kept token, `[K, S]`; 2 K S width operations."""
        table = directions.view(len(directions), self.rows, self.width)
        out = rows.g.new_empty(len(directions), len(rows.g))
        for one, into in zip(table, out, strict=True):
            torch.sum(one[rows.ids] * rows.g, 1, out=into)
        return (PositionProducts(out, rows.spans),)

    def temporaries(self, rows: LookupRows) -> int:
        """Values of the temporaries of a row while it is restored: its places, as integers."""
        return 6 * rows.spans.longest

    def outer_products(self, rows: LookupRows, *, scratch: int) -> Iterator[OuterProducts]:
        """The row of the table that each token reads, times its suffix."""
        del scratch
        yield OuterProducts(0, rows.g, rows.spans, ids=rows.ids)

    def products_cost(self, load: ProductSize, compute: Compute) -> Cost:
        """Pairs of equal tokens, if words are as frequent as in natural text (Zipf)."""
        del compute
        ours, theirs = load.query_positions, load.train_positions
        equal = min(1.0, 1.6 / (1 + math.log(self.rows)) ** 2)
        pairs = ours * theirs * equal
        cost = matrix_product(math.sqrt(pairs), math.sqrt(pairs), self.width)
        cost += elementwise((ours + theirs) * 8 + pairs, TOUCH + RUN)
        cost += elementwise((ours + theirs) * self.width, TOUCH + RUN / self.width)
        return cost + calls(4 * min(self.rows, ours, theirs))

    def half_cost(self, load: ProductSize) -> Cost:
        """A gathered copy of the directions, which is written and read again, one pass and a sum."""
        values = load.n_query * load.train_positions * self.width
        return elementwise(values, 2 * TURN + TOUCH + FOLD)

    def restore_cost(self, rows: float, positions: float) -> Cost:
        """All values written."""
        del positions
        return elementwise(rows * self.gradient_size, WRITE)


class _SortedTokens:
    """Tokens in the order of their ids."""

    def __init__(self, rows: LookupRows) -> None:
        self.g = rows.g
        ids, self.order = torch.sort(rows.ids)
        self.row = row_of(rows.spans, rows.ids.device)[self.order]
        self.ids, self.counts = torch.unique_consecutive(ids, return_counts=True)
        self.starts = self.counts.cumsum(0) - self.counts

    def tokens(self, which: int) -> slice:
        """Where the tokens of one id are in the order."""
        start = int(self.starts[which])
        return slice(start, start + int(self.counts[which]))


def _add_block(
    out: Tensor, left: _SortedTokens, one: int, right: _SortedTokens, other: int, scratch: int
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
    out: Tensor,
    left: _SortedTokens,
    ours: Tensor,
    right: _SortedTokens,
    theirs: Tensor,
    scratch: int,
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
