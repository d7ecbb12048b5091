"""Arithmetic of rows: lengths, inner products, tiles, and rows with differing numbers of positions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


CACHED = 1 << 21
"""Bytes of one temporary that several operators pass over: what stays in the cache."""
RESTORED = 1 << 26
"""Bytes of restored gradients: enough rows for a matrix product of a good shape."""
_PIECE = 1 << 16
_SHORT_PIECE = 1 << 11
_FEW = 1 << 12
"""Below so many products at once, a library sums each of them in one go, without blocks."""
_BANDS, _LEAST, _MOST = 4, 64, 192
"""How many bands a product is cut into, and rows of a band: many bands leave more of the mirrored
half out, but a product of few rows is slow."""


def tiles(count: int, values: int, itemsize: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Rows `(start, stop)` of so many values each that fit into `scratch` bytes, at least one.

    Tiles of one size: products of a few rows that are left over take long for what they are.

    >>> list(tiles(5, 10, 4, 80)), list(tiles(9, 10, 4, 320))
    ([(0, 2), (2, 4), (4, 5)], [(0, 5), (5, 9)])
    """
    most = max(1, scratch // max(1, values * itemsize))
    step = -(-count // max(1, -(-count // most))) or 1
    for start in range(0, count, step):
        yield start, min(start + step, count)


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared lengths `[B]` of rows `[B, P]`."""
    return inner(rows, rows)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[B]` of the rows of `[B, P]` and `[B, P]`."""
    products: Tensor = torch.linalg.vecdot(left, right)
    return products


def pairwise(left: Tensor, right: Tensor) -> Tensor:
    """Inner products `[K, B]` of all rows of `[K, P]` with all rows of `[B, P]`.

    Long rows are summed in pieces: one sum over millions of values loses a digit of float32.
    """
    piece = _SHORT_PIECE if len(left) * len(right) < _FEW else _PIECE
    out = left[:, :piece] @ right[:, :piece].t()
    for start in range(piece, left.shape[1], piece):
        out += left[:, start : start + piece] @ right[:, start : start + piece].t()
    return out


def squared(values: Tensor) -> Tensor:
    """V^T V `[d, d]` of V `[S, d]`.

    It is symmetric: a band of rows is multiplied from the diagonal on, and mirrored, which is
    little more than half of the 2 S d^2 operations.
    """
    size = values.shape[1]
    # Products whose sides are multiples of 16 are up to twice as fast.
    step = min(_MOST, max(_LEAST, math.ceil(size / _BANDS / 16) * 16))
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
    """Where each of B rows starts and ends: `bounds[i]` to `bounds[i + 1]`."""

    bounds: tuple[int, ...]
    uniform: int | None
    """T, if all rows have the same."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """The most positions of a row."""
        if self.uniform is not None:
            return self.uniform
        return max(end - start for start, end in itertools.pairwise(self.bounds))

    def cut(self, start: int, stop: int) -> Spans:
        """The spans of some of the rows, counted from the first of them."""
        if self.uniform is not None and self.bounds[0] == 0:
            return Spans(self.bounds[: stop - start + 1], self.uniform)
        base = self.bounds[start]
        return Spans(tuple(at - base for at in self.bounds[start : stop + 1]), self.uniform)

    def tiles(self, positions: int) -> Iterator[tuple[int, int]]:
        """Consecutive rows `(start, stop)` of at most so many positions together, at least one row.

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
    """The spans of offsets `[B + 1]`; without them, of `count` rows of one position."""
    if offsets is None:
        return Spans(tuple(range(count + 1)), 1)
    bounds = tuple(offsets.tolist())
    found = {end - start for start, end in itertools.pairwise(bounds)} or {0}
    return Spans(bounds, found.pop() if len(found) == 1 else None)


def row_of(parts: Spans, device: torch.device) -> Tensor:
    """The row of every position, `[S]` int64."""
    bounds = torch.tensor(parts.bounds)
    return torch.repeat_interleave(torch.arange(len(parts)), bounds.diff()).to(device)


def sum_rows(values: Tensor, parts: Spans) -> Tensor:
    """Sums over each row's positions: `[S, M]` -> `[B, M]`."""
    if parts.uniform == 1:
        return values
    if parts.uniform is not None:
        return values.view(len(parts), parts.uniform, values.shape[1]).sum(1)
    out = values.new_empty(len(parts), values.shape[1])
    for row, (start, end) in enumerate(itertools.pairwise(parts.bounds)):
        torch.sum(values[start:end], 0, out=out[row])
    return out


def sum_columns(values: Tensor, parts: Spans) -> Tensor:
    """Sums over each row's positions, which lie along the columns: `[M, S]` -> `[M, B]`."""
    if parts.uniform == 1:
        return values
    if parts.uniform is not None:
        return values.view(len(values), len(parts), parts.uniform).sum(2)
    # A product with a matrix of zeros and ones would be as fast, but would carry a not-a-number
    # of one row into all others.
    lengths = torch.tensor(parts.bounds).diff().to(values.device)
    turned = values.t().contiguous()
    summed = torch.segment_reduce(turned, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)
    return summed.t()


def pad(values: Tensor, parts: Spans) -> Tensor:
    """Rows of equal length, zeros behind the shorter ones: `[S, M]` -> `[B, T, M]`."""
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
    """Sums of `product(query positions, train positions)` over each pair of rows, `[Q, N]`.

    The product is asked for in tiles `[S_q, S_n]` of whole rows, so that its temporaries, about
    three of the size of a tile, stay below `scratch` bytes and inside the cache.
    """
    out = like.new_empty(len(queries), len(train))
    values = max(1, min(scratch // 3, CACHED) // like.element_size())
    wide = min(train.bounds[-1], max(train.longest, min(2048, values))) or 1
    for first, last in queries.tiles(max(1, values // wide)):
        left = slice(queries.bounds[first], queries.bounds[last])
        high = max(1, left.stop - left.start)
        for start, stop in train.tiles(max(1, values // high)):
            right = slice(train.bounds[start], train.bounds[stop])
            summed = sum_rows(product(left, right), queries.cut(first, last))
            out[first:last, start:stop] = sum_columns(summed, train.cut(start, stop))
    return out
