"""Find candidates among millions of rows by a few bytes per row, before any exact product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gradkeep import _arguments
from gradkeep._environment import torch_threads
from gradkeep.errors import QueryError
from gradkeep.factors._bits import Bits
from gradkeep.factors._form import dot_directions
from gradkeep.query._engine import GradientPair, ProductEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.query._gradients import Gradients
    from gradkeep.store import CaptureKey

    Codes = np.ndarray[Any, np.dtype[np.uint8]]

BESIDE = 6
"""Bytes of a code for the length of the row and its share along the directions."""
_SCANNED = 1 << 14
"""Rows whose codes are scanned together, so that they stay in the CPU cache."""
_HELD = 1 << 27
"""Most bytes of products with all rows."""
_STRIDE = 64


@dataclass(frozen=True, slots=True, eq=False)
class SmallCodes:
    """Position of every row's gradient along leading directions, in four bits each, and its length.

    Built by `gk.query.small_codes`.

    Attributes:
        key: Capture of the rows.
        manifest: Digest of the version of the capture.
        codes: `[N, bytes - 6]`: the upper half of byte `d` is level `h - 8` of direction `d`, the lower half
            level `l` of direction `d + bytes - 6`.
        lengths: Norms of the rows `[N]`.
        parts: Share `[N]` uint16 of the squared norm along the directions, in 65535ths.
        directions: `[D, P]` by layer, D = 2 (bytes - 6), orthonormal over all layers together.
        steps: Step of a level of each direction `[D]`, for a row of length one.
        share: Mean share of the squared norms of the sample along the directions, 0 to 1.
        spread: Typical cosine of the residuals of two rows of the sample outside the directions.
    """

    key: CaptureKey
    manifest: str
    codes: Codes
    lengths: torch.Tensor
    parts: torch.Tensor
    directions: Mapping[str, torch.Tensor]
    steps: torch.Tensor
    share: float
    spread: float

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return (
            f"SmallCodes({self.key.split} at {self.key.checkpoint}: {len(self)} rows, "
            f"{self.codes.shape[1] + BESIDE} bytes each, {self.share:.2f} of squared lengths)"
        )

    def products(self, queries: QueryCoordinates) -> torch.Tensor:
        """Compute products by codes `[Q, N]` for normalized rows: 2 N D operations per query."""
        # A byte is 16 (h - 8) + l as a signed number and is used as it is; the contribution of its
        # lower half to the upper product is subtracted from the lower weight.
        upper, lower = (queries.along * self.steps).chunk(2, 1)
        fixed = (0.5 * upper - 7.5 * lower).sum(1, keepdim=True)
        upper = upper / 16
        lower = lower - upper
        codes = torch.from_numpy(self.codes.view(np.int8))
        most = min(_SCANNED, len(self))
        halves = torch.empty(most, codes.shape[1], dtype=torch.int8)
        numbers = torch.empty(most, codes.shape[1])
        products = torch.empty(len(queries.along), len(self))
        for start in range(0, len(self), _SCANNED):
            part = codes[start : start + _SCANNED]
            here = numbers[: len(part)]
            values = torch.addmm(fixed, upper, here.copy_(part).t())
            torch.bitwise_and(part, 15, out=halves[: len(part)])
            values.addmm_(lower, here.copy_(halves[: len(part)]).t())
            along = self.parts[start : start + _SCANNED].float().div_(65535).sqrt_()
            torch.mul(values, along, out=products[:, start : start + len(part)])
        return products

    def nearest(self, products: torch.Tensor, count: int) -> torch.Tensor:
        """Return the rows `[Q, count]` with the largest products `[Q, N]` times row lengths, best first."""
        return _largest(products * self.lengths, count)

    def likeliest(
        self, products: torch.Tensor, queries: QueryCoordinates, above: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return the rows `[Q, count]` most likely to have a product above `[Q]`, best first.

        Ranks by (p - above) / e, for a product p by codes and its typical error e: of the rounding, and of the
        residual outside the directions, which grows with the row's length.
        """
        rounding = (queries.along * self.steps).square().sum(1, keepdim=True) / 12
        unseen = (self.spread * queries.beyond).square().unsqueeze(1)
        ratings = torch.empty_like(products)
        for start in range(0, len(self), _SCANNED):
            here = slice(start, min(start + _SCANNED, len(self)))
            along = self.parts[here].float().div_(65535)
            values = products[:, here] - above.unsqueeze(1) / self.lengths[here]
            values /= torch.addcmul(unseen, rounding - unseen, along).sqrt_().clamp_(min=1e-30)
            ratings[:, here] = values.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        return _largest(ratings, count)


@dataclass(frozen=True, slots=True, eq=False)
class QueryCoordinates:
    """Coordinates of queries along the directions of codes."""

    along: torch.Tensor
    """`[Q, D]`"""
    beyond: torch.Tensor
    """`[Q]`: length of the residual"""

    @classmethod
    def of(
        cls, queries: Gradients, codes: SmallCodes, positions: list[int], *, smallest: bool
    ) -> Self:
        """Compute the coordinates of some queries, negated to find the smallest products."""
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
    """Find the best `k` candidates of each query: values and rows `[Q, k]`, by exact products.

    First the rows with the largest products by codes, then those most likely to exceed the `k`-th of these.
    Without `candidates`, twice as many until none of the last ones is among the best.
    """
    _arguments.optional(_arguments.count, "candidates", candidates, error=QueryError, least=1)
    _check_codes(codes, pair.train)
    # Candidates at most, and at first.
    wide = min(len(pair.train), k * 1600 if candidates is None else max(k, candidates))
    begun = min(wide, k * 100 if candidates is None else max(k, wide // 2))
    begun = wide if wide == len(codes) else begun
    ranked: list[_Ranking] = []
    together = max(1, _HELD // (8 * len(codes)))
    # One thread: tiles stay in its cache, and more threads are twenty times slower.
    with torch_threads(1):
        for begin in range(0, len(positions), together):
            some = positions[begin : begin + together]
            queries = QueryCoordinates.of(pair.queries, codes, some, smallest=smallest)
            best = _Ranking(pair, some, k, smallest=smallest, memory_budget=memory_budget)
            remaining = list(range(len(some)))
            products = codes.products(queries)
            near = codes.nearest(products, begun)
            best.rank(remaining, near)
            if begun < wide:
                last = best.values[:, -1] * (-1 if smallest else 1)
                likely = _without(codes.likeliest(products, queries, last, wide), near)
                start, stop = 0, begun if candidates is None else wide - begun
                while start < stop and remaining:
                    remaining = best.rank(remaining, likely[remaining, start:stop])
                    start, stop = stop, min(2 * stop, wide - begun)
            ranked.append(best)
    values, rows = [one.values for one in ranked], [one.rows for one in ranked]
    return torch.cat(values), torch.cat(rows), ranked[-1].engine


class _Ranking:
    """Best rows of each query so far, by exact products."""

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
        """Rank new candidates `[q, n]` of some queries; return the queries whose best rows have changed."""
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
        by_row = both_rows.argsort(1)  # ties go to earlier rows
        both, both_rows = both.gather(1, by_row), both_rows.gather(1, by_row)
        order = both.sort(dim=1, descending=not self._smallest, stable=True).indices[:, : self._k]
        best_values, best_rows = both.gather(1, order), both_rows.gather(1, order)
        if not self.values.shape[1]:  # first call, for all queries
            self.values, self.rows = best_values, best_rows
            return queries
        self.values[queries], self.rows[queries] = best_values, best_rows
        changed = (best_rows != before).any(1).tolist()
        return [query for query, new in zip(queries, changed, strict=True) if new]


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the largest of `[Q, N]`, `[Q, count]`, decreasing, first of ties.

    Most values are below a threshold estimated from a sample, and are not sorted.
    """
    return torch.stack([_largest_of(row, count) for row in values])


def _largest_of(values: torch.Tensor, count: int) -> torch.Tensor:
    few = values[::_STRIDE]
    rank = 2 * count // _STRIDE + 8
    if rank < len(few) // 2:
        limit = few.kthvalue(len(few) - rank).values
        rows = (values > limit).nonzero().squeeze(1)
        if len(rows) >= count:
            order = values[rows].sort(descending=True, stable=True).indices[:count]
            return rows[order]
    return values.sort(descending=True, stable=True).indices[:count]


def _without(rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the rows `[Q, n - s]` of `[Q, n]` that are not in `seen [Q, s]`, in order."""
    known = torch.stack([torch.isin(a, b) for a, b in zip(rows, seen, strict=True)])
    order = known.byte().sort(dim=1, stable=True).indices
    return rows.gather(1, order[:, : rows.shape[1] - seen.shape[1]])


def _check_codes(codes: SmallCodes, train: Gradients) -> None:
    if codes.key != train.key or codes.manifest != train.block.manifest.digest:
        raise QueryError(
            "the codes belong to other rows",
            code="query.codes_of_other_rows",
            found=f"{codes.key.split} at {codes.key.checkpoint}, {len(codes)} rows",
            expected=f"{train.key.split} at {train.key.checkpoint}, {len(train)} rows, version "
            f"{train.block.version}",
            fix="Build them with gk.query.small_codes(train).",
        )
    if list(codes.directions) != list(train.forms):
        raise QueryError(
            "the codes belong to other layers",
            code="query.codes_of_other_layers",
            fix="Build them with gk.query.small_codes(train) for these layers.",
        )


def coordinates_of(
    gradients: Gradients,
    factors: Mapping[str, Any],
    directions: Mapping[str, torch.Tensor],
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute products `[B, D]` of rows with all directions, accurate to 1%, and squared lengths `[B]`."""
    along, squared = [], []
    for name, form in gradients.forms.items():
        rows = factors[name].widened()
        moved = directions[name].to(rows.example.dtype)
        if isinstance(form, Bits):
            products = form.sketched(rows, moved, scratch=1 << 26)
        else:
            products = dot_directions(form, rows, moved, scratch=1 << 26)
        along.append(products.float())
        squared.append(form.squared_norms(rows).float())
    products, lengths = sum(along[1:], along[0]).t(), torch.stack(squared).sum(0).clamp_(min=0)
    if slopes is None:
        return products, lengths
    return products * slopes.unsqueeze(1), lengths * slopes.square()
