"""Multiplying kept gradients tile by tile, layer by layer, inside a byte budget."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradkeep.errors import QueryError
from gradkeep.query import _operators
from gradkeep.query._choose import choose
from gradkeep.query._factors import OuterRows, positions_of
from gradkeep.query._forms import Conv, Dense, Outer, size_of
from gradkeep.query._load import Load
from gradkeep.query._machine import machine
from gradkeep.query._memory import Shares, shares
from gradkeep.query._products import Plan, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form
    from gradkeep.query._gradients import Gradients, Some
    from gradkeep.query._ways import How

Wanted = str | Mapping[str, str] | None
"""A way to multiply all layers, or one for each glob of layers; None: the planner's choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One layer, or layers that share a prefix, as both sides see it."""

    layers: tuple[str, ...]
    form: Form
    how: How
    mixed: bool = False
    """Kept in two different forms: both are restored."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Queries and training rows captured at the same checkpoint, with the weight of their products."""

    queries: Gradients
    train: Gradients
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """The products `[L or 1, q, n]` of some queries with some training rows."""

    query_start: int
    train_start: int
    values: torch.Tensor


class Engine:
    """A question about some pairs, planned; `tiles` computes it."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        plan: Wanted = None,
        memory_budget: int | str | None = None,
        per_layer: bool = False,
        answer: int,
        positions: Sequence[int] | None = None,
    ) -> None:
        check_pairs(pairs)
        self.pairs, self.per_layer = list(pairs), per_layer
        first = pairs[0]
        self.positions = list(range(len(first.queries))) if positions is None else list(positions)
        self.num_train = len(first.train)
        probes = [_probe(pair) for pair in pairs]
        self.shares: Shares = shares(
            memory_budget,
            answer=answer,
            mapped=max(_mapped(pair.train) for pair in pairs),
            query_row=max(probe.query_row for probe in probes),
            train_row=max(probe.train_row for probe in probes),
            queries=len(self.positions),
            rows=self.num_train,
        )
        self.sides: list[list[Side]] = []
        steps: list[Step] = []
        for pair, probe in zip(self.pairs, probes, strict=True):
            sides, told = self._sides(pair, probe, plan)
            self.sides.append(sides)
            steps += told
        self.plan = Plan(
            steps=tuple(steps),
            query_rows=self.shares.query_rows,
            train_rows=self.shares.train_rows,
            scratch=self.shares.scratch,
            memory=self.shares.total,
        )

    def tiles(self) -> Iterator[Tile]:
        """All products, tile by tile; of several pairs, their weighted sum."""
        step = self.shares.query_rows
        for begin in range(0, len(self.positions), step):
            chosen = self.positions[begin : begin + step]
            asked = [
                _Asked(pair, sides, chosen, self.shares)
                for pair, sides in zip(self.pairs, self.sides, strict=True)
            ]
            for parts in self._train():
                total: torch.Tensor | None = None
                for one, part in zip(asked, parts, strict=True):
                    values = one.against(part, per_layer=self.per_layer)
                    total = values if total is None else total.add_(values)
                assert total is not None
                yield Tile(begin, parts[0].start, total)

    def _train(self) -> Iterator[list[Some]]:
        """Tiles of training rows: streamed, or for several checkpoints read side by side."""
        rows = self.shares.train_rows
        if len(self.pairs) == 1:
            for part in self.pairs[0].train.stream(rows):
                yield [part]
            return
        for start in range(0, self.num_train, rows):
            stop = min(start + rows, self.num_train)
            yield [
                dataclasses.replace(pair.train.rows(range(start, stop)), start=start, stop=stop)
                for pair in self.pairs
            ]

    def _sides(self, pair: Pair, probe: _Probe, plan: Wanted) -> tuple[list[Side], list[Step]]:
        speeds = machine()
        sides, steps = [], []
        groups: dict[tuple[str, str], int] = {}
        """Where the layers stand that read these two prefixes."""
        for name, form in pair.train.forms.items():
            other = pair.queries.forms[name]
            forced = _forced(name, plan)
            if not _same_form(form, other):
                steps.append(Step(name, f"{other.kind} and {form.kind}", "restore", 0.0))
                sides.append(Side((name,), _dense(form), "dense", mixed=True))
                continue
            load = Load(
                n_train=min(self.num_train, self.shares.train_rows),
                n_query=min(len(self.positions), self.shares.query_rows),
                t_train=probe.train_positions[name],
                t_query=probe.query_positions[name],
            )
            choice = choose(form, load, speeds, force=forced, scratch=self.shares.scratch)
            tiles = (self.num_train / load.n_train) * (len(self.positions) / load.n_query)
            steps.append(Step(name, form.kind, choice.how, choice.cost.seconds * tiles))
            shared = _shared_prefixes(form, other)
            if shared is not None and choice.how == "factored" and not self.per_layer:
                if shared in groups:
                    before = sides[groups[shared]]
                    layers = (*before.layers, name)
                    sides[groups[shared]] = dataclasses.replace(before, layers=layers)
                    continue
                groups[shared] = len(sides)
            sides.append(Side((name,), form, choice.how))
        return sides, steps


class _Asked:
    """A tile of queries in memory, restored where that is how their layer is multiplied."""

    def __init__(
        self, pair: Pair, sides: Sequence[Side], positions: Sequence[int], split: Shares
    ) -> None:
        self.pair, self.sides, self.scratch = pair, sides, split.scratch
        some = pair.queries.rows(positions)
        self.slopes = _slopes(pair.queries, positions)
        self.train_slopes = pair.train.slopes()
        self.factors: list[Factors | torch.Tensor] = []
        left = split.restored
        for side in sides:
            form = pair.queries.forms[side.layers[0]]
            rows = _joined(form, [some.factors[name] for name in side.layers])
            needed = len(positions) * size_of(side.form) * 4
            restorable = side.mixed or (side.how in ("half", "restore") and needed <= left)
            if restorable:
                left -= needed
                self.factors.append(_operators.restore(form, rows))
            else:
                self.factors.append(rows)

    def against(self, part: Some, *, per_layer: bool) -> torch.Tensor:
        """The products `[L or 1, q, n]` with some training rows."""
        found: list[torch.Tensor] = []
        for side, queries in zip(self.sides, self.factors, strict=True):
            form = self.pair.train.forms[side.layers[0]]
            rows = _joined(form, [part.factors[name] for name in side.layers])
            values = self._one(side, form, queries, rows).float()
            if found and not per_layer:
                found[0].add_(values)
            else:
                found.append(values)
        total = torch.stack(found)
        total *= self.pair.weight
        if self.slopes is not None:
            total *= self.slopes.unsqueeze(1)
        if self.train_slopes is not None:
            total *= self.train_slopes[part.start : part.stop]
        return total

    def _one(
        self, side: Side, form: Form, queries: Factors | torch.Tensor, rows: Factors
    ) -> torch.Tensor:
        if not isinstance(queries, torch.Tensor):
            form = _widened(form, rows)
            return _operators.dot(form, queries, rows, how=side.how, scratch=self.scratch)
        if side.mixed:
            return queries @ _operators.restore(form, rows).to(queries.dtype).t()
        return _operators.against(form, rows, queries, scratch=self.scratch, how=side.how)


@dataclass(frozen=True, slots=True)
class _Probe:
    """The sizes of a few rows of both sides."""

    query_row: float
    train_row: float
    query_positions: Mapping[str, float]
    train_positions: Mapping[str, float]


def _probe(pair: Pair) -> _Probe:
    query_row, query_positions = _sizes(pair.queries)
    train_row, train_positions = _sizes(pair.train)
    return _Probe(query_row, train_row, query_positions, train_positions)


def _sizes(side: Gradients) -> tuple[float, dict[str, float]]:
    """Bytes per row in memory, and positions per row and layer, from rows spread over the block."""
    count = min(len(side), 16)
    if not count:
        raise QueryError("there are no rows to ask about", found=repr(side))
    names = {name for form in side.forms.values() for name in form.arrays}
    arrays = [array for array in side.block.schema.arrays if array.name in names]
    if not any(array.ragged for array in arrays):  # all rows are alike: nothing needs to be read
        whole = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)
        return float(whole), {name: _fixed_positions(form) for name, form in side.forms.items()}
    some = side.rows([index * len(side) // count for index in range(count)])
    size = sum(_operators.nbytes(rows) for rows in some.factors.values()) / count
    return size, {name: positions_of(rows) / count for name, rows in some.factors.items()}


def _fixed_positions(form: Form) -> float:
    return float(form.positions) if isinstance(form, Conv) else 1.0


def _mapped(side: Gradients) -> int:
    """Bytes of the largest segment: while it is read, its pages are in memory."""
    return max((entry.bytes for entry in side.block.manifest.segments), default=0)


def check_pairs(pairs: Sequence[Pair]) -> None:
    """Raise unless queries and training rows can be compared."""
    if not pairs:
        raise QueryError("no gradients to compare")
    for pair in pairs:
        queries, train = pair.queries, pair.train
        if queries.weights != train.weights:
            raise QueryError(
                "queries and training rows were captured at different weights",
                found=f"{queries.key.checkpoint} and {train.key.checkpoint}",
                expected="one checkpoint",
                fix=f"capture {queries.key.split} at checkpoint {train.key.checkpoint!r} too",
            )
        if list(queries.forms) != list(train.forms):
            differing = sorted(set(queries.forms) ^ set(train.forms))
            raise QueryError(
                "queries and training rows hold different layers",
                found=", ".join(differing[:8]),
                fix="pass layers= with those that both have, or capture both alike",
            )
        for name, form in train.forms.items():
            if form.parameters != queries.forms[name].parameters:
                raise QueryError(
                    f"layer {name} has other parameters in the queries",
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
                    fix="capture the same data in the same order at every checkpoint",
                )


def _forced(layer: str, plan: Wanted) -> str | None:
    if plan is None or isinstance(plan, str):
        return plan
    for pattern, name in plan.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return name
    return None


def _same_form(one: Form, other: Form) -> bool:
    """Whether both are kept alike, whatever their arrays are called."""
    if isinstance(one, Outer) and isinstance(other, Outer):
        return (one.ones, one.bias) == (other.ones, other.bias)
    if one.kind != other.kind:
        return False
    return isinstance(one, Dense) or one == other


def _shared_prefixes(train: Form, queries: Form) -> tuple[str, str] | None:
    """What two sides of a linear layer read; layers with the same can be multiplied as one."""
    if isinstance(train, Outer) and isinstance(queries, Outer) and not train.ones:
        return f"{train.prefix} {train.bias}", queries.prefix
    return None


def _dense(form: Form) -> Dense:
    return Dense(form.parameters, "", size_of(form))


def _joined(form: Form, parts: Sequence[Factors]) -> Factors:
    """Layers that share a prefix as one layer with all their outputs."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    assert isinstance(first, OuterRows)
    suffixes = [part.g for part in parts if isinstance(part, OuterRows)]
    return OuterRows(first.x, torch.cat(suffixes, 1), first.offsets)


def _widened(form: Form, rows: Factors) -> Form:
    if isinstance(form, Outer) and isinstance(rows, OuterRows):
        return dataclasses.replace(form, d_out=rows.g.shape[1])
    return form


def _slopes(side: Gradients, positions: Sequence[int]) -> torch.Tensor | None:
    slopes = side.slopes()
    return None if slopes is None else slopes[list(positions)]
