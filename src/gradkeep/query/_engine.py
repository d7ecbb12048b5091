"""Multiply stored gradients tile by tile and layer by layer within a memory budget."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradkeep._arguments import check_fields
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.errors import BudgetError, QueryError
from gradkeep.factors import basis_of
from gradkeep.factors._arithmetic import pairwise_joined
from gradkeep.factors._bits import PACKED, BitRows, Bits
from gradkeep.factors._convolution import Convolution
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import dot, dot_directions
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.query._planner import ProductSize, QueryPlan, QueryStep, choose_compute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.factors._form import AnyForm, Compute, GradientRows
    from gradkeep.query._gradients import FactorBatch, Gradients

ComputeSpec = str | Mapping[str, str] | None
"""Algorithm for all layers, or one for each glob of layers; None: chosen by the planner."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerProduct:
    """One layer, or layers that share a prefix, of queries and training rows."""

    layers: tuple[str, ...]
    form: AnyForm
    compute: Compute
    mixed: bool = False
    """True if both sides are stored in different forms: both are restored."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientPair:
    """Queries and training rows at the same checkpoint, with the weight of their products."""

    queries: Gradients
    train: Gradients
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, QueryError)


@dataclass(frozen=True, slots=True, eq=False)
class ProductTile:
    """Products `[L or 1, q, n]` of some queries with some training rows."""

    query_start: int
    train_start: int
    values: torch.Tensor


class ProductEngine:
    """Planned products of some pairs; `tiles` computes them."""

    def __init__(
        self,
        pairs: Sequence[GradientPair],
        *,
        compute: ComputeSpec = None,
        memory_budget: float | str | None = None,
        per_layer: bool = False,
        answer: int,
        positions: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        stop: int | None = None,
    ) -> None:
        """Plan products; `positions` selects queries and `rows` training rows, all by default.

        With `stop`, tiles that begin at or after that training row are skipped.
        """
        check_pairs(pairs)
        self.pairs, self.per_layer = list(pairs), per_layer
        first = pairs[0]
        self.positions = list(range(len(first.queries))) if positions is None else list(positions)
        self.rows = None if rows is None else list(rows)
        self.num_train = len(first.train) if self.rows is None else len(self.rows)
        self.num_train = self.num_train if stop is None else min(stop, self.num_train)
        sizes = [(_sizes(pair.queries), _sizes(pair.train)) for pair in pairs]
        self.shares: MemoryShares = memory_shares(
            memory_budget,
            answer=answer,
            mapped=max(pair.train.largest_segment for pair in pairs),
            query_row=max(queries.bytes for queries, _ in sizes),
            train_row=max(train.bytes for _, train in sizes),
            queries=len(self.positions),
            rows=self.num_train,
        )
        self.sides: list[list[LayerProduct]] = []
        steps: list[QueryStep] = []
        for pair, (queries, train) in zip(self.pairs, sizes, strict=True):
            sides, pair_steps = self._sides(pair, queries, train, compute)
            self.sides.append(sides)
            steps += pair_steps
        self.plan = QueryPlan(
            steps=tuple(steps),
            query_rows=self.shares.query_rows,
            train_rows=self.shares.train_rows,
            scratch=self.shares.scratch,
            memory=self.shares.total,
        )

    def tiles(self) -> Iterator[ProductTile]:
        """Iterate over all products by tile; of several pairs, their weighted sum."""
        step = self.shares.query_rows
        for begin in range(0, len(self.positions), step):
            chosen = self.positions[begin : begin + step]
            query_tiles = [
                _QueryTile(pair, sides, chosen, self.shares, self.rows)
                for pair, sides in zip(self.pairs, self.sides, strict=True)
            ]
            for parts in self._train():
                total: torch.Tensor | None = None
                for query_tile, some in zip(query_tiles, parts, strict=True):
                    values = query_tile.against(some, per_layer=self.per_layer)
                    total = values if total is None else total.add_(values)
                assert total is not None
                yield ProductTile(begin, parts[0][0].start, total)

    def matrix(self) -> torch.Tensor:
        """Return all products `[Q, N]`, summed over layers."""
        values = torch.empty(len(self.positions), self.num_train)
        for tile in self.tiles():
            part = tile.values[0]
            here = slice(tile.query_start, tile.query_start + len(part))
            values[here, tile.train_start : tile.train_start + part.shape[1]] = part
        return values

    def _train(self) -> Iterator[list[list[FactorBatch]]]:
        """Iterate over tiles of training rows of each pair: streamed, picked, or of several checkpoints together.

        A streamed tile may consist of rows of several segments.
        """
        rows = self.shares.train_rows
        if len(self.pairs) == 1 and self.rows is None:
            train = self.pairs[0].train
            joinable = any(map(_is_joined, self.sides[0]))
            waiting: list[FactorBatch] = []
            for part in train.stream(rows):
                if part.start >= self.num_train:
                    break
                if waiting and (not joinable or part.stop - waiting[0].start > rows):
                    yield [waiting]
                    waiting = []
                waiting.append(part)
            if waiting:
                yield [waiting]
            return
        for start in range(0, self.num_train, rows):
            stop = min(start + rows, self.num_train)
            chosen = range(start, stop) if self.rows is None else self.rows[start:stop]
            yield [
                [dataclasses.replace(pair.train.rows(chosen), start=start, stop=stop)]
                for pair in self.pairs
            ]

    def _sides(
        self, pair: GradientPair, queries: _RowSizes, train: _RowSizes, compute: ComputeSpec
    ) -> tuple[list[LayerProduct], list[QueryStep]]:
        sides, steps = [], []
        groups: dict[tuple[str, str], int] = {}
        """Index of the product of layers that share these two prefixes."""
        for name, form in pair.train.forms.items():
            other = pair.queries.forms[name]
            forced = _forced(name, compute)
            if not same_layout(form, other):
                steps.append(QueryStep(name, f"{other.kind} and {form.kind}", "restored", 0.0))
                sides.append(LayerProduct((name,), _dense(form), "dense", mixed=True))
                continue
            load = ProductSize(
                n_train=min(self.num_train, self.shares.train_rows),
                n_query=min(len(self.positions), self.shares.query_rows),
                t_train=train.positions[name],
                t_query=queries.positions[name],
                scratch=self.shares.scratch,
            )
            choice = choose_compute(form, load, force=forced)
            tiles = (self.num_train / load.n_train) * (len(self.positions) / load.n_query)
            steps.append(QueryStep(name, form.kind, choice.compute, choice.cost.seconds * tiles))
            shared = _shared_prefix(form, other)
            if shared is not None and choice.compute == "factored" and not self.per_layer:
                if shared in groups:
                    before = sides[groups[shared]]
                    layers = (*before.layers, name)
                    sides[groups[shared]] = dataclasses.replace(before, layers=layers)
                    continue
                groups[shared] = len(sides)
            sides.append(LayerProduct((name,), form, choice.compute))
        return sides, steps


class _QueryTile:
    """Tile of queries in memory, restored for layers that are multiplied that way."""

    def __init__(
        self,
        pair: GradientPair,
        sides: Sequence[LayerProduct],
        positions: Sequence[int],
        split: MemoryShares,
        train: Sequence[int] | None,
    ) -> None:
        self.pair, self.sides, self.scratch = pair, sides, split.scratch
        some = pair.queries.rows(positions)
        self.slopes = pair.queries.slopes_at(positions)
        self.train_slopes = pair.train.slopes() if train is None else pair.train.slopes_at(train)
        self.factors: list[GradientRows | torch.Tensor] = []
        remaining = split.restored
        for side in sides:
            form = pair.queries.forms[side.layers[0]]
            rows = _join_outputs([some.factors[name] for name in side.layers])
            needed = len(positions) * side.form.gradient_size * 4
            restorable = side.mixed or (
                side.compute in ("half", "restored") and needed <= remaining
            )
            if restorable:
                remaining -= needed
                self.factors.append(form.restore(rows))
            else:
                self.factors.append(rows)

    def against(self, parts: Sequence[FactorBatch], *, per_layer: bool) -> torch.Tensor:
        """Compute the products `[L or 1, q, n]` with some consecutive training rows."""
        products: list[torch.Tensor] = []
        for side, queries in zip(self.sides, self.factors, strict=True):
            form = self.pair.train.forms[side.layers[0]]
            rows = [_join_outputs([part.factors[name] for name in side.layers]) for part in parts]
            values = self._multiply_parts(side, form, queries, rows).float()
            if products and not per_layer:
                products[0].add_(values)
            else:
                products.append(values)
        total = torch.stack(products)
        total *= self.pair.weight
        if self.slopes is not None:
            total *= self.slopes.unsqueeze(1)
        if self.train_slopes is not None:
            total *= self.train_slopes[parts[0].start : parts[-1].stop]
        return total

    def _multiply_parts(
        self,
        side: LayerProduct,
        form: AnyForm,
        queries: GradientRows | torch.Tensor,
        parts: list[GradientRows],
    ) -> torch.Tensor:
        if len(parts) > 1 and _is_joined(side):
            outers = [part for part in parts if isinstance(part, OuterRows)]
            if outers:
                parts = [OuterRows.stacked(outers)]
            elif isinstance(form, Bits):
                parts = [BitRows.stacked(parts)]
            # One product with all rows pays for copying them, unless there are few queries.
            elif isinstance(queries, DenseRows) and len(queries) >= 8:
                dense = [part.values for part in parts if isinstance(part, DenseRows)]
                return pairwise_joined(queries.values, dense)
        values = [self._multiply(side, form, queries, rows) for rows in parts]
        return values[0] if len(values) == 1 else torch.cat(values, 1)

    def _multiply(
        self,
        side: LayerProduct,
        form: AnyForm,
        queries: GradientRows | torch.Tensor,
        rows: GradientRows,
    ) -> torch.Tensor:
        if not isinstance(queries, torch.Tensor):
            if len(side.layers) > 1:
                assert isinstance(form, Outer)
                assert isinstance(rows, OuterRows)
                form = dataclasses.replace(form, d_out=rows.g.shape[1])
            return dot(form, queries, rows, compute=side.compute, scratch=self.scratch)
        if side.mixed:
            return queries @ form.restore(rows).to(queries.dtype).t()
        return dot_directions(form, rows, queries, scratch=self.scratch, compute=side.compute)


def same_layout(form: AnyForm, other: AnyForm) -> bool:
    """Return True if rows of both forms can be multiplied, whatever their arrays are called."""
    if isinstance(form, Outer):
        return isinstance(other, Outer) and (form.ones, form.bias) == (other.ones, other.bias)
    if isinstance(form, Dense):
        return isinstance(other, Dense)
    if isinstance(form, Bits):
        # Coordinates in the same basis, rounded alike or not at all.
        if not isinstance(other, Bits) or (form.basis, form.size) != (other.basis, other.size):
            return False
        if other.bits not in PACKED and not other.group:
            return True
        return (form.bits, form.group) == (other.bits, other.group)
    return bool(form == other)


def _shared_prefix(form: AnyForm, other: AnyForm) -> tuple[str, str] | None:
    """Return the prefixes of both sides; layers with equal ones can be joined."""
    if not isinstance(form, Outer) or not isinstance(other, Outer) or form.ones:
        return None
    return f"{form.prefix} {form.bias}", other.prefix


def _join_outputs(parts: Sequence[GradientRows]) -> GradientRows:
    """Join rows of linear layers that share a prefix to those of one layer with all their outputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    outers = [part for part in parts if isinstance(part, OuterRows)]
    return OuterRows(outers[0].x, torch.cat([part.g for part in outers], 1), outers[0].offsets)


def _is_joined(side: LayerProduct) -> bool:
    """Return True if one product with many rows is faster than several with fewer.

    Those of groups of bits begin with tables of the queries, and others with restoring the queries; dense ones are
    fast for many rows only.
    """
    form = side.form
    if isinstance(form, Outer):
        return side.compute == "restored"
    return isinstance(form, Dense) or (isinstance(form, Bits) and form.group > 0)


@dataclass(frozen=True, slots=True)
class _RowSizes:
    """Bytes of a row in memory, and its positions in each layer."""

    bytes: float
    positions: Mapping[str, float]


def _sizes(side: Gradients) -> _RowSizes:
    """Return the mean sizes of rows spread over the block."""
    count = min(len(side), 16)
    if not count:
        raise QueryError("there are no rows", code="query.no_rows", found=repr(side))
    names = {name for form in side.forms.values() for name in form.arrays}
    arrays = [array for array in side.block.schema.arrays if array.name in names]
    if not any(
        array.ragged for array in arrays
    ):  # all rows have the same size: nothing needs to be read
        whole = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)
        positions = {
            name: float(form.positions) if isinstance(form, Convolution) else 1.0
            for name, form in side.forms.items()
        }
        return _RowSizes(float(whole), positions)
    some = side.rows([index * len(side) // count for index in range(count)])
    size = sum(rows.nbytes for rows in some.factors.values()) / count
    return _RowSizes(size, {name: rows.positions / count for name, rows in some.factors.items()})


def check_pairs(pairs: Sequence[GradientPair]) -> None:
    """Raise unless queries and training rows can be compared."""
    if len(pairs) == 0:
        raise QueryError("there are no gradients to compare", code="query.no_gradients")
    for pair in pairs:
        queries, train = pair.queries, pair.train
        if queries.weights != train.weights:
            raise QueryError(
                "queries and training rows were captured with different weights",
                code="query.different_weights",
                found=f"{queries.key.checkpoint} and {train.key.checkpoint}",
                expected="one checkpoint",
                fix=f"Capture {queries.key.split} at checkpoint {train.key.checkpoint!r} too.",
            )
        if list(queries.forms) != list(train.forms):
            differing = sorted(set(queries.forms) ^ set(train.forms))
            raise QueryError(
                "queries and training rows hold different layers",
                code="query.different_layers",
                found=", ".join(differing[:8]),
                fix="Pass layers= that both have, or capture both with the same layers.",
            )
        for name, form in train.forms.items():
            if basis_of(form) != basis_of(queries.forms[name]):
                raise _other_basis(name, queries, train)
            if form.parameters != queries.forms[name].parameters:
                raise QueryError(
                    f"layer {name} has other parameters in the queries",
                    code="query.different_parameters",
                    found=str(queries.forms[name].parameters),
                    expected=str(form.parameters),
                )
    first = pairs[0]
    for pair in pairs[1:]:
        for one, other in ((pair.queries, first.queries), (pair.train, first.train)):
            if len(one) != len(other) or not (one.ids == other.ids).all():
                raise QueryError(
                    f"{one.key.split} holds other rows at {one.key.checkpoint} "
                    f"than at {other.key.checkpoint}",
                    code="query.different_rows",
                    fix="Capture the same data in the same order at every checkpoint.",
                )


def _other_basis(layer: str, queries: Gradients, train: Gradients) -> QueryError:
    kinds = [
        "gradients" if basis_of(side.forms[layer]) is None else "coordinates"
        for side in (queries, train)
    ]
    return QueryError(
        f"layer {layer} is stored in another basis for the queries than for the training rows",
        code="query.different_basis",
        found=f"{kinds[0]} of {queries.key.split}, {kinds[1]} of {train.key.split}",
        expected="both in one basis, or both as gradients",
        fix=f"Capture {queries.key.split} with keep='queries', after {train.key.split} and under the "
        "same name=.",
    )


def _forced(layer: str, compute: ComputeSpec) -> str | None:
    if compute is None or isinstance(compute, str):
        return compute
    for pattern, name in compute.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return name
    return None


def _dense(form: AnyForm) -> Dense:
    return Dense(form.parameters, "", form.gradient_size)


DEFAULT_BUDGET = 1 << 30
"""Default memory budget in bytes."""
_LEAST_SCRATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Division of a memory budget."""

    query_rows: int
    train_rows: int
    scratch: int
    restored: int
    """Bytes for queries that stay restored while training rows are streamed."""
    total: int


def memory_shares(
    budget: float | str | None,
    *,
    answer: int,
    mapped: int,
    query_row: float,
    train_row: float,
    queries: int,
    rows: int,
) -> MemoryShares:
    """Divide a budget: the result and the mapped file first, the rest by fixed shares.

    `query_row` and `train_row` are the bytes of one row's factors in memory. A budget too small for one row of
    each raises an error with the required size.
    """
    limit = DEFAULT_BUDGET if budget is None else parse_bytes(budget)
    least = int(answer + mapped + 2 * query_row + 4 * train_row + 2 * _LEAST_SCRATCH) + 1
    if limit < least:
        if budget is not None:
            raise BudgetError(
                "the memory budget is too small for this query",
                code="budget.query",
                found=format_bytes(limit),
                expected=f"at least {format_bytes(least)}, of which {format_bytes(answer)} for the result",
                fix=f"Pass memory_budget={least} or more, compute only the top k, or use fewer queries "
                "or layers.",
            )
        limit = 2 * least
    rest = limit - answer - mapped
    # Decoding and joining need a temporary second copy of the rows.
    query_rows = max(1, min(queries, int(0.30 * rest / (2 * max(1.0, query_row)))))
    # Products of a few wide rows are slow, and restored queries are read again for each tile.
    train = min(max(64 << 20, 256 * train_row), 0.25 * rest)
    train_rows = max(1, min(rows, int(train / (2 * max(1.0, train_row)))))
    scratch = max(_LEAST_SCRATCH, min(64 << 20, int(0.2 * rest)))
    return MemoryShares(query_rows, train_rows, scratch, restored=int(0.2 * rest), total=limit)


def stream_shares(
    gradients: Gradients, budget: float | str | None, *, answer: int, beside: int = 0
) -> MemoryShares:
    """Divide a budget for a pass over all rows, each with `beside` extra bytes."""
    row = 0
    if len(gradients):
        row = sum(rows.nbytes for rows in gradients.rows([0]).factors.values())
    return memory_shares(
        budget,
        answer=answer,
        mapped=gradients.largest_segment,
        query_row=0,
        train_row=row + beside,
        queries=1,
        rows=len(gradients),
    )
