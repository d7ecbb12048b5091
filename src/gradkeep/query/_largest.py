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
            above = values > self.values[queries, -1:]
            counts = above.sum(1)
            found = counts > 0
            queries, values = queries[found], values[found]
            if not len(queries):
                return
            most = int(counts.max())
            if most <= self._k:
                self._merge(queries, *_marked(values, above[found], counts[found], most), row_start)
                return
        places = _largest_places(values, self._k)
        self._merge(queries, values.gather(1, places), places, row_start)

    def _merge(
        self, queries: torch.Tensor, values: torch.Tensor, places: torch.Tensor, row_start: int
    ) -> None:
        both = torch.cat([self.values[queries], values], 1)
        both_rows = torch.cat([self.rows[queries], places + row_start], 1)
        # Earlier rows stand first, and a stable sort leaves equals in place.
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.values[queries] = both.gather(1, order)
        self.rows[queries] = both_rows.gather(1, order)


def _marked(
    values: torch.Tensor, marks: torch.Tensor, counts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The marked values of `[q, n]` and their places `[q, most]`; -inf where a row has fewer."""
    rows, columns = marks.nonzero(as_tuple=True)
    at = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    found = values.new_full((len(values), most), -torch.inf)
    places = torch.zeros(found.shape, dtype=torch.int64)
    found[rows, at], places[rows, at] = values[rows, columns], columns
    return found, places


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
