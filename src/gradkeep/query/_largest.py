"""The largest of many values that pass in tiles, in few passes over them."""

from __future__ import annotations

import torch


class LargestRows:
    """The `k` largest values of each query so far, and the rows they belong to.

    Of equal values, those of earlier rows come first: rows must pass in order. Most tiles only meet one
    comparison a value, since little of them exceeds what was seen; only columns that do are sorted.

    >>> best = LargestRows(1, 2)
    >>> best.add(torch.tensor([[3.0, 5.0, 5.0]]), 0, 0)
    >>> best.add(torch.tensor([[5.0, 6.0]]), 0, 3)
    >>> best.values, best.rows
    (tensor([[6., 5.]]), tensor([[4, 1]]))
    """

    def __init__(self, queries: int, k: int) -> None:
        self.values = torch.full((queries, k), -torch.inf)
        """`[Q, k]`, falling"""
        self.rows = torch.zeros((queries, k), dtype=torch.int64)
        """`[Q, k]`"""
        self._k = k

    def add(self, values: torch.Tensor, query_start: int, row_start: int) -> None:
        """Look at values `[q, n]` of the queries from `query_start` and the rows from `row_start`."""
        here = slice(query_start, query_start + len(values))
        numbers = torch.arange(row_start, row_start + values.shape[1])
        if row_start >= self._k:  # before, some places are not taken
            above = (values > self.values[here, -1:]).any(0)
            if not bool(above.any()):
                return
            values, numbers = values[:, above], numbers[above]
        both = torch.cat([self.values[here], values], 1)
        both_rows = torch.cat([self.rows[here], numbers.expand_as(values)], 1)
        # Earlier rows stand first, and a stable sort leaves equals in place.
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.values[here] = both.gather(1, order)
        self.rows[here] = both_rows.gather(1, order)
