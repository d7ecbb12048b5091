"""Some bytes for each row, by which the best candidates of millions are found before any product is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._surroundings import torch_threads
from gradkeep.errors import QueryError
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._gradients import Gradients
    from gradkeep.store import CaptureKey

    Codes = np.ndarray[Any, np.dtype[np.uint8]]

BESIDE = 6
"""Bytes of a code that say how long the row is, and how much of it lies along the directions."""
_SCANNED = 1 << 14
"""Rows whose codes are looked at together: they stay in the cache as numbers."""
_HELD = 1 << 27
"""Bytes that products with all rows may take at a time."""
_STRIDE = 64
_BEGUN, _WIDEST = 100, 1600
"""Candidates for each row that is asked for: how many are ranked first, and how many at most."""


@dataclass(frozen=True, slots=True, eq=False)
class SmallCodes:
    """Where every row's gradient points along leading directions, in four bits each, and how far.

    Made by `gk.query.small_codes`.
    """

    key: CaptureKey
    """The capture whose rows these are."""
    manifest: str
    """The digest of the version of the capture that they were made of."""
    codes: Codes
    """`[N, bytes - 6]`: above in byte `d` level `h - 8` of direction `d`, below `l` of `d + bytes - 6`"""
    lengths: torch.Tensor
    """`[N]`: of the rows"""
    parts: torch.Tensor
    """`[N]` uint16: how much of its squared length lies along the directions, in 65535ths"""
    directions: Mapping[str, torch.Tensor]
    """`[D, P]` by layer, D = 2 (bytes - 6): orthonormal over all layers together"""
    steps: torch.Tensor
    """`[D]`: what one level of each direction is worth, in a row of length one"""
    share: float
    """How much of the squared lengths of the sample's rows lies along the directions, from 0 to 1."""
    spread: float
    """The usual cosine of what two rows of the sample have beside the directions."""

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return (
            f"SmallCodes({self.key.split} at {self.key.checkpoint}: {len(self)} rows, "
            f"{self.codes.shape[1] + BESIDE} bytes each, {self.share:.2f} of squared lengths)"
        )

    def products(self, asked: AskedCoordinates) -> torch.Tensor:
        """The products by codes `[Q, N]`, for rows of length one.

        2 N D operations a query, and one read of all codes.
        """
        # A byte is 16 (h - 8) + l as a signed number: so it serves as it is, and what its lower half
        # adds to the upper one's share is taken from the lower one's weight.
        upper, lower = (asked.along * self.steps).chunk(2, 1)
        fixed = (0.5 * upper - 7.5 * lower).sum(1, keepdim=True)
        upper = upper / 16
        lower = lower - upper
        codes = torch.from_numpy(self.codes.view(np.int8))
        most = min(_SCANNED, len(self))
        halves = torch.empty(most, codes.shape[1], dtype=torch.int8)
        numbers = torch.empty(most, codes.shape[1])
        found = torch.empty(len(asked.along), len(self))
        for start in range(0, len(self), _SCANNED):
            part = codes[start : start + _SCANNED]
            here = numbers[: len(part)]
            values = torch.addmm(fixed, upper, here.copy_(part).t())
            torch.bitwise_and(part, 15, out=halves[: len(part)])
            values.addmm_(lower, here.copy_(halves[: len(part)]).t())
            along = self.parts[start : start + _SCANNED].float().div_(65535).sqrt_()
            torch.mul(values, along, out=found[:, start : start + len(part)])
        return found

    def nearest(self, products: torch.Tensor, count: int) -> torch.Tensor:
        """The rows `[Q, count]` with the largest products `[Q, N]` once their lengths count, best first."""
        return _largest(products * self.lengths, count)

    def likeliest(
        self, products: torch.Tensor, asked: AskedCoordinates, above: torch.Tensor, count: int
    ) -> torch.Tensor:
        """The rows `[Q, count]` that are likeliest to have a product above `[Q]`, best first.

        (p - above) / e is what counts, for a product p by codes and its usual error e: of the rounding, and
        of what lies beside the directions. It grows with the row's length.
        """
        rounding = (asked.along * self.steps).square().sum(1, keepdim=True) / 12
        unseen = (self.spread * asked.beyond).square().unsqueeze(1)
        found = torch.empty_like(products)
        for start in range(0, len(self), _SCANNED):
            here = slice(start, min(start + _SCANNED, len(self)))
            along = self.parts[here].float().div_(65535)
            values = products[:, here] - above.unsqueeze(1) / self.lengths[here]
            values /= torch.addcmul(unseen, rounding - unseen, along).sqrt_().clamp_(min=1e-30)
            found[:, here] = values.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        return _largest(found, count)


@dataclass(frozen=True, slots=True, eq=False)
class AskedCoordinates:
    """Queries as codes see them."""

    along: torch.Tensor
    """`[Q, D]`"""
    beyond: torch.Tensor
    """`[Q]`: the length of the rest"""

    @classmethod
    def of(
        cls, queries: Gradients, codes: SmallCodes, positions: list[int], *, smallest: bool
    ) -> Self:
        """Those of the queries at some positions, turned round if the smallest products are asked for."""
        rows, slopes = queries.rows(positions).factors, queries.slopes_at(positions)
        along, squared = coordinates_of(queries, rows, codes.directions, slopes)
        beyond = (squared - along.square().sum(1)).clamp(min=0).sqrt()
        return cls(-along if smallest else along, beyond)


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

    First those with the largest products by codes; then those that are likeliest to be above the `k`-th of
    these. Without a number of candidates, twice as many until none of the last ones is among the best.
    """
    _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
    _check_codes(codes, pair.train)
    wide = min(len(pair.train), k * _WIDEST if candidates is None else max(k, candidates))
    begun = min(wide, k * _BEGUN if candidates is None else max(k, wide // 2))
    begun = wide if wide == len(codes) else begun
    ranked: list[_Ranking] = []
    together = max(1, _HELD // (8 * len(codes)))
    with torch_threads(
        1
    ):  # tiles that stay in the cache: half a second of work, ten by two threads
        for begin in range(0, len(positions), together):
            some = positions[begin : begin + together]
            asked = AskedCoordinates.of(pair.queries, codes, some, smallest=smallest)
            best = _Ranking(pair, some, k, smallest=smallest, memory_budget=memory_budget)
            left = list(range(len(some)))
            products = codes.products(asked)
            near = codes.nearest(products, begun)
            best.rank(left, near)
            if begun < wide:
                last = best.values[:, -1] * (-1 if smallest else 1)
                likely = _without(codes.likeliest(products, asked, last, wide), near)
                start, stop = 0, begun if candidates is None else wide - begun
                while start < stop and left:
                    left = best.rank(left, likely[left, start:stop])
                    start, stop = stop, min(2 * stop, wide - begun)
            ranked.append(best)
    values, rows = [one.values for one in ranked], [one.rows for one in ranked]
    return torch.cat(values), torch.cat(rows), ranked[-1].engine


class _Ranking:
    """The best rows of each query so far, by exact products."""

    def __init__(
        self,
        pair: GradientPair,
        positions: list[int],
        k: int,
        *,
        smallest: bool,
        memory_budget: float | str | None,
    ) -> None:
        self._pair, self._positions, self._k = pair, positions, k
        self._smallest, self._budget = smallest, memory_budget
        self.values = torch.empty(len(positions), 0)
        """`[Q, k]`"""
        self.rows = torch.empty(len(positions), 0, dtype=torch.int64)
        """`[Q, k]`"""
        self.engine: ProductEngine

    def rank(self, queries: list[int], near: torch.Tensor) -> list[int]:
        """Rank candidates `[q, n]` of some queries that were not ranked before; those of the queries whose best have changed."""
        rows = torch.unique(near)
        positions = [self._positions[query] for query in queries]
        self.engine = ProductEngine(
            [self._pair],
            memory_budget=self._budget,
            answer=4 * len(positions) * len(rows),
            positions=positions,
            rows=rows.tolist(),
        )
        own = self.engine.matrix().gather(1, torch.searchsorted(rows, near))
        before = self.rows[queries]
        both, both_rows = torch.cat([self.values[queries], own], 1), torch.cat([before, near], 1)
        by_row = both_rows.argsort(1)  # of equal products earlier rows come first
        both, both_rows = both.gather(1, by_row), both_rows.gather(1, by_row)
        order = both.sort(dim=1, descending=not self._smallest, stable=True).indices[:, : self._k]
        kept, kept_rows = both.gather(1, order), both_rows.gather(1, order)
        if not self.values.shape[1]:  # the first ones, of all queries
            self.values, self.rows = kept, kept_rows
            return queries
        self.values[queries], self.rows[queries] = kept, kept_rows
        changed = (kept_rows != before).any(1).tolist()
        return [query for query, new in zip(queries, changed, strict=True) if new]


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest of `[Q, N]` are, `[Q, count]`, falling; of equal ones the first.

    Most values are below one that a few of them suggest, and are not sorted.
    """
    return torch.stack([_largest_of(one, count) for one in values])


def _largest_of(values: torch.Tensor, count: int) -> torch.Tensor:
    few = values[::_STRIDE]
    wanted = 2 * count // _STRIDE + 8
    if wanted < len(few) // 2:
        limit = few.kthvalue(len(few) - wanted).values
        rows = (values > limit).nonzero().squeeze(1)
        if len(rows) >= count:
            order = values[rows].sort(descending=True, stable=True).indices[:count]
            return rows[order]
    return values.sort(descending=True, stable=True).indices[:count]


def _without(rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Rows `[Q, n - s]` in their order, after those of `[Q, n]` that were seen, `[Q, s]`, are left out."""
    known = torch.stack([torch.isin(a, b) for a, b in zip(rows, seen, strict=True)])
    order = known.byte().sort(dim=1, stable=True).indices
    return rows.gather(1, order[:, : rows.shape[1] - seen.shape[1]])


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


def coordinates_of(
    gradients: Gradients,
    factors: Mapping[str, Any],
    directions: Mapping[str, torch.Tensor],
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products `[B, D]` of rows with all directions, good to a hundredth, and squared lengths `[B]`."""
    along, squared = [], []
    for name, form in gradients.forms.items():
        rows = factors[name].widened()
        moved = directions[name].to(rows.example.dtype)
        along.append(form.sketched(rows, moved, scratch=1 << 26).float())
        squared.append(form.squared_norms(rows).float())
    products, lengths = sum(along[1:], along[0]).t(), torch.stack(squared).sum(0).clamp_(min=0)
    if slopes is None:
        return products, lengths
    return products * slopes.unsqueeze(1), lengths * slopes.square()
