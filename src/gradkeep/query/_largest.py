"""The largest of many values that pass in tiles, in few passes over them."""

from __future__ import annotations

import torch


class LargestRows:
    """The `k` largest values of each query so far, and the rows they belong to.

    Of equal values, those of earlier rows come first: rows must pass in order. Of most tiles a comparison
    shows that no value exceeds what was seen, and nothing is sorted.

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
        queries = torch.arange(query_start, query_start + len(values))
        if row_start >= self._k:  # before, some places are not taken
            above = (values > self.values[queries, -1:]).any(1)
            queries, values = queries[above], values[above]
            if not len(queries):
                return
        places = _largest_places(values, self._k)
        both = torch.cat([self.values[queries], values.gather(1, places)], 1)
        both_rows = torch.cat([self.rows[queries], places + row_start], 1)
        # Earlier rows stand first, and a stable sort leaves equals in place.
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.values[queries] = both.gather(1, order)
        self.rows[queries] = both_rows.gather(1, order)


def _largest_places(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the `k` largest of `[q, n]` are, the first of equal ones, in rising order `[q, k]`."""
    if values.shape[1] <= k:
        return torch.arange(values.shape[1]).expand_as(values)
    found = values.topk(k, dim=1)
    if bool(((values >= found.values[:, -1:]).sum(1) == k).all()):
        return found.indices.sort(dim=1).values
    # Which of equal values topk takes is not said.
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=1).values
