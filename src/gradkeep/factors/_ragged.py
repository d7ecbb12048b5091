"""Rows with differing numbers of positions, kept one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.factors._arithmetic import CACHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
        return max(end - start for start, end in pairwise(self.bounds))

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
    found = {end - start for start, end in pairwise(bounds)} or {0}
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
    for row, (start, end) in enumerate(pairwise(parts.bounds)):
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
