"""Some bytes for each row, by which the best candidates of millions are found before any product is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep.errors import QueryError
from gradkeep.query._engine import GradientPair, ProductEngine
from gradkeep.query._largest import LargestRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._gradients import Gradients
    from gradkeep.store import CaptureKey

    Codes = np.ndarray[Any, np.dtype[np.uint8]]

_SCANNED = 1 << 14
"""Rows whose codes are looked at together: they stay in the cache as numbers."""
_BEGUN, _WIDEST = 100, 1600
"""Candidates for each row that is asked for: how many are ranked first, and how many at most."""


@dataclass(frozen=True, slots=True, eq=False)
class SmallCodes:
    """Where every row's gradient points along leading directions, in four bits each, and its length.

    Made by `gk.query.small_codes`.
    """

    key: CaptureKey
    """The capture whose rows these are."""
    manifest: str
    """The digest of the version of the capture that they were made of."""
    codes: Codes
    """`[N, bytes - 4]`: in each byte level `h - 8` of direction `d` above, level `l` of `d + bytes - 4` below"""
    scales: torch.Tensor
    """`[N]`: the length of each row along all directions together"""
    directions: Mapping[str, torch.Tensor]
    """`[D, P]` by layer, D = 2 (bytes - 4): orthonormal over all layers together"""
    steps: torch.Tensor
    """`[D]`: what one level of each direction is worth, in a row of length one"""
    share: float
    """How much of the squared lengths of the sample's rows lies along the directions, from 0 to 1."""

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return (
            f"SmallCodes({self.key.split} at {self.key.checkpoint}: {len(self)} rows, "
            f"{self.codes.shape[1] + 4} bytes each, {self.share:.2f} of squared lengths)"
        )

    def nearest(self, asked: torch.Tensor, count: int, *, smallest: bool = False) -> torch.Tensor:
        """The rows `[Q, count]` with the largest products by codes, best first, for coordinates `[Q, D]`.

        2 N D operations a query, and one read of all codes.
        """
        best = LargestRows(len(asked), min(count, len(self)))
        # A byte is 16 (h - 8) + l as a signed number: so it serves as it is, and what its lower half
        # adds to the upper one's share is taken from the lower one's weight.
        upper, lower = (asked * self.steps * (-1.0 if smallest else 1.0)).chunk(2, 1)
        fixed = (0.5 * upper - 7.5 * lower).sum(1, keepdim=True)
        upper = upper / 16
        lower = lower - upper
        codes = torch.from_numpy(self.codes.view(np.int8))
        most = min(_SCANNED, len(self))
        halves = torch.empty(most, codes.shape[1], dtype=torch.int8)
        numbers = torch.empty(most, codes.shape[1])
        for start in range(0, len(self), _SCANNED):
            part = codes[start : start + _SCANNED]
            here = numbers[: len(part)]
            values = torch.addmm(fixed, upper, here.copy_(part).t())
            torch.bitwise_and(part, 15, out=halves[: len(part)])
            values.addmm_(lower, here.copy_(halves[: len(part)]).t())
            values *= self.scales[start : start + _SCANNED]
            best.add(values, 0, start)
        return best.rows


def by_codes(
    pair: GradientPair,
    codes: SmallCodes,
    positions: list[int],
    k: int,
    *,
    candidates: int | None,
    smallest: bool,
    memory_budget: float | str | None,
) -> tuple[torch.Tensor, torch.Tensor, ProductEngine]:
    """The best `k` of each query among its candidates: values and rows `[Q, k]`, by exact products.

    Without a number of candidates, twice as many are ranked until none of the last half is among the best.
    """
    _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
    _check_codes(codes, pair.train)
    wide = min(len(pair.train), k * _WIDEST if candidates is None else max(k, candidates))
    begun = min(wide, k * _BEGUN if candidates is None else wide)
    asked = along_directions(pair.queries, codes.directions, positions)
    near = codes.nearest(asked, wide, smallest=smallest)
    best = _Ranking(pair, positions, near, k, smallest=smallest, memory_budget=memory_budget)
    best.rank(list(range(len(positions))), 0, begun)
    start, open_ones = begun, list(range(len(positions)))
    while start < wide and open_ones:
        stop = min(2 * start, wide)
        open_ones = best.rank(open_ones, start, stop)
        start = stop
    return best.values, best.rows, best.engine


class _Ranking:
    """The best rows of each query so far, by exact products."""

    def __init__(
        self,
        pair: GradientPair,
        positions: list[int],
        near: torch.Tensor,
        k: int,
        *,
        smallest: bool,
        memory_budget: float | str | None,
    ) -> None:
        self._pair, self._positions, self._near, self._k = pair, positions, near, k
        self._smallest, self._budget = smallest, memory_budget
        self.values = torch.empty(len(positions), 0)
        """`[Q, k]`"""
        self.rows = torch.empty(len(positions), 0, dtype=torch.int64)
        """`[Q, k]`"""
        self.engine: ProductEngine

    def rank(self, queries: list[int], start: int, stop: int) -> list[int]:
        """Rank candidates `start` to `stop` of some queries too; those queries whose best have changed."""
        near = self._near[queries, start:stop].sort(1).values
        rows = torch.unique(near)
        positions = [self._positions[query] for query in queries]
        self.engine = ProductEngine(
            [self._pair],
            memory_budget=self._budget,
            answer=4 * len(positions) * len(rows),
            positions=positions,
            rows=rows.tolist(),
        )
        values = torch.empty(len(positions), len(rows))
        for tile in self.engine.tiles():
            part = tile.values[0]
            here = slice(tile.query_start, tile.query_start + len(part))
            values[here, tile.train_start : tile.train_start + part.shape[1]] = part
        own = values.gather(1, torch.searchsorted(rows, near))
        before = self.rows[queries]
        both, both_rows = torch.cat([self.values[queries], own], 1), torch.cat([before, near], 1)
        by_row = both_rows.argsort(1)  # of equal products earlier rows come first
        both, both_rows = both.gather(1, by_row), both_rows.gather(1, by_row)
        order = both.sort(dim=1, descending=not self._smallest, stable=True).indices[:, : self._k]
        kept, kept_rows = both.gather(1, order), both_rows.gather(1, order)
        if self.values.shape[1] < kept.shape[1]:  # the first ones, of all queries
            self.values, self.rows = kept, kept_rows
            return queries
        self.values[queries], self.rows[queries] = kept, kept_rows
        changed = (kept_rows != before).any(1).tolist()
        return [query for query, new in zip(queries, changed, strict=True) if new]


def _check_codes(codes: SmallCodes, train: Gradients) -> None:
    if codes.key != train.key or codes.manifest != train.block.manifest.digest:
        raise QueryError(
            "these codes are of other rows",
            found=f"{codes.key.split} at {codes.key.checkpoint}, {len(codes)} rows",
            expected=f"{train.key.split} at {train.key.checkpoint}, {len(train)} rows, version "
            f"{train.block.version}",
            fix="gk.query.small_codes(train)",
        )
    if list(codes.directions) != list(train.forms):
        raise QueryError(
            "these codes are of other layers", fix="gk.query.small_codes(train) of these layers"
        )


def along_directions(
    gradients: Gradients, directions: Mapping[str, torch.Tensor], positions: list[int]
) -> torch.Tensor:
    """The coordinates `[B, D]` of the rows at some positions."""
    found = sketched(gradients, gradients.rows(positions).factors, directions)
    slopes = gradients.slopes_at(positions)
    return (found if slopes is None else found * slopes).t()


def sketched(
    gradients: Gradients, factors: Mapping[str, Any], directions: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Products `[D, B]` of some rows with all directions, good to a hundredth."""
    total: torch.Tensor | None = None
    for name, form in gradients.forms.items():
        rows = factors[name].widened()
        moved = directions[name].to(rows.example.dtype)
        found = form.sketched(rows, moved, scratch=1 << 26).float()
        total = found if total is None else total.add_(found)
    assert total is not None
    return total
