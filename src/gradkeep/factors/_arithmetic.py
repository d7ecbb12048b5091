"""Arithmetic of rows: norms, inner products, tiles, and rows with different numbers of positions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


CACHED = 1 << 21
"""Bytes of a temporary that several operators read: what stays in the cache."""
RESTORED = 1 << 26
"""Bytes of restored gradients: enough rows for a fast matrix product."""


def tiles(count: int, values: int, itemsize: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Split rows of `values` values each into ranges `(start, stop)` that fit into `scratch` bytes.

    At least one row each, and of equal size: products of a few remaining rows are slow.

    >>> list(tiles(5, 10, 4, 80)), list(tiles(9, 10, 4, 320))
    ([(0, 2), (2, 4), (4, 5)], [(0, 5), (5, 9)])
    """
    most = max(1, scratch // max(1, values * itemsize))
    step = -(-count // max(1, -(-count // most))) or 1
    for start in range(0, count, step):
        yield start, min(start + step, count)


def squared_lengths(rows: Tensor) -> Tensor:
    """Return squared norms `[B]` of rows `[B, P]`."""
    return inner(rows, rows)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Return inner products `[B]` of the rows of `[B, P]` and `[B, P]`."""
    products: Tensor = torch.linalg.vecdot(one, other)
    return products


def pairwise(one: Tensor, other: Tensor) -> Tensor:
    """Return inner products `[K, B]` of all rows of `[K, P]` with all rows of `[B, P]`.

    Long rows are summed in pieces: one sum over millions of values loses a digit of float32.
    """
    # With fewer than 4096 products at once, the library sums each of them without blocks.
    piece = 1 << 11 if len(one) * len(other) < 4096 else 1 << 16
    out = one[:, :piece] @ other[:, :piece].t()
    for start in range(piece, one.shape[1], piece):
        out += one[:, start : start + piece] @ other[:, start : start + piece].t()
    return out


def pairwise_joined(one: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return `pairwise` of `[K, P]` with the joined rows of several `[B_i, P]`.

    Products with a few rows at a time are slow. Rows are joined some columns at a time, in the cache.
    """
    bounds = list(itertools.accumulate((len(other) for other in others), initial=0))
    width = one.shape[1]
    out = one.new_zeros(len(one), bounds[-1])
    piece = max(256, CACHED // one.element_size() // max(1, bounds[-1]))
    space = one.new_empty(bounds[-1], min(piece, width))
    for start in range(0, width, piece):
        joined = space[:, : min(piece, width - start)]
        for other, (low, high) in zip(others, itertools.pairwise(bounds), strict=True):
            joined[low:high] = other[:, start : start + piece]
        out.addmm_(one[:, start : start + piece], joined.t())
    return out


def squared(values: Tensor) -> Tensor:
    """Return V^T V `[d, d]` of V `[S, d]`.

    It is symmetric: bands of rows are multiplied from the diagonal on and mirrored, which takes little more than
    half of the 2 S d^2 operations.
    """
    size = values.shape[1]
    # Products whose sides are multiples of 16 are up to twice as fast.
    # Four bands of 64 to 192 rows: more bands skip more of the mirrored half, but products of few
    # rows are slow.
    step = min(192, max(64, math.ceil(size / 4 / 16) * 16))
    if size <= step:
        return values.t() @ values
    out = values.new_empty(size, size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        band = values[:, start:stop].t() @ values[:, start:]
        out[start:stop, start:] = band
        out[stop:, start:stop] = band[:, stop - start :].t()
    return out


@dataclass(frozen=True, slots=True)
class Spans:
    """Start and end of each of B rows: `bounds[i]` to `bounds[i + 1]`."""

    bounds: Sequence[int]
    uniform: int | None
    """T, if all rows have the same number of positions."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """Largest number of positions of a row."""
        if self.uniform is not None:
            return self.uniform
        return max(end - start for start, end in itertools.pairwise(self.bounds))

    def cut(self, start: int, stop: int) -> Spans:
        """Return the spans of some of the rows, relative to the first of them."""
        if self.uniform is not None and self.bounds[0] == 0:
            return Spans(self.bounds[: stop - start + 1], self.uniform)
        base = self.bounds[start]
        return Spans(tuple(at - base for at in self.bounds[start : stop + 1]), self.uniform)

    def tiles(self, positions: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive rows `(start, stop)` with at most `positions` positions together, at least one row.

        >>> list(Spans((0, 2, 4, 9), None).tiles(4))
        [(0, 2), (2, 3)]
        """
        if self.uniform is not None:
            step = max(1, positions // self.uniform if self.uniform else len(self))
            yield from ((at, min(at + step, len(self))) for at in range(0, len(self), step))
            return
        start = 0
        for stop in range(1, len(self) + 1):
            last = stop == len(self)
            if last or self.bounds[stop + 1] - self.bounds[start] > positions:
                yield start, stop
                start = stop


def spans(offsets: Tensor | None, count: int) -> Spans:
    """Return the spans of offsets `[B + 1]`; without offsets, of `count` rows of one position."""
    if offsets is None:
        return Spans(range(count + 1), 1)
    bounds = tuple(offsets.tolist())
    lengths = {end - start for start, end in itertools.pairwise(bounds)} or {0}
    return Spans(bounds, lengths.pop() if len(lengths) == 1 else None)


def row_of(parts: Spans, device: torch.device) -> Tensor:
    """Return the row of every position, `[S]` int64."""
    bounds = torch.tensor(parts.bounds)
    return torch.repeat_interleave(torch.arange(len(parts)), bounds.diff()).to(device)


def sum_rows(values: Tensor, parts: Spans) -> Tensor:
    """Sum over each row's positions: `[S, M]` -> `[B, M]`."""
    if parts.uniform == 1:
        return values
    if parts.uniform is not None:
        return values.view(len(parts), parts.uniform, values.shape[1]).sum(1)
    out = values.new_empty(len(parts), values.shape[1])
    for row, (start, end) in enumerate(itertools.pairwise(parts.bounds)):
        torch.sum(values[start:end], 0, out=out[row])
    return out


def sum_columns(values: Tensor, parts: Spans) -> Tensor:
    """Sum over each row's positions, which lie along the columns: `[M, S]` -> `[M, B]`."""
    if parts.uniform == 1:
        return values
    if parts.uniform is not None:
        return values.view(len(values), len(parts), parts.uniform).sum(2)
    # A product with a matrix of zeros and ones would be as fast, but would spread NaN to other rows.
    lengths = torch.tensor(parts.bounds).diff().to(values.device)
    transposed = values.t().contiguous()
    summed = torch.segment_reduce(
        transposed, "sum", lengths=lengths, axis=0, unsafe=True, initial=0
    )
    return summed.t()


def pad(values: Tensor, parts: Spans) -> Tensor:
    """Pad rows to equal length with zeros: `[S, M]` -> `[B, T, M]`."""
    width = values.shape[1]
    if parts.uniform is not None:
        return values.view(len(parts), parts.uniform, width)
    lengths = torch.tensor(parts.bounds).diff()
    mask = (torch.arange(parts.longest) < lengths[:, None]).to(values.device)
    out = values.new_zeros(len(parts), parts.longest, width)
    out[mask] = values
    return out


def sum_pairs(
    queries: Spans,
    train: Spans,
    product: Callable[[slice, slice], Tensor],
    *,
    like: Tensor,
    scratch: int,
) -> Tensor:
    """Sum `product(query positions, train positions)` over each pair of rows, `[Q, N]`.

    The product is computed in tiles `[S_q, S_n]` of whole rows, so that its temporaries, about three of the size of
    a tile, stay below `scratch` bytes and inside the cache.
    """
    out = like.new_empty(len(queries), len(train))
    values = max(1, min(scratch // 3, CACHED) // like.element_size())
    wide = min(train.bounds[-1], max(train.longest, min(2048, values))) or 1
    for first, last in queries.tiles(max(1, values // wide)):
        ours = slice(queries.bounds[first], queries.bounds[last])
        high = max(1, ours.stop - ours.start)
        for start, stop in train.tiles(max(1, values // high)):
            theirs = slice(train.bounds[start], train.bounds[stop])
            summed = sum_rows(product(ours, theirs), queries.cut(first, last))
            out[first:last, start:stop] = sum_columns(summed, train.cut(start, stop))
    return out
