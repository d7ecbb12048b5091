"""Products of the kernel with vectors, made from factors: the kernel itself is never held."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution.kronecker._row_parts import weighted_part
from gradkeep.factors._cost import MachineSpeeds, ProductSize
from gradkeep.query import along
from gradkeep.query._engine import GradientPair, ProductEngine, memory_shares
from gradkeep.query._planner import choose_compute
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from gradkeep.query import Gradients
    from gradkeep.query._engine import ComputeWish

_BLOCK = 2048
"""Rows whose products with all rows before them are made at a time."""
_PROBED = 16
"""Rows that are looked at for their number of positions."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelProducts:
    """K v of many vectors at once, in two ways that differ by layer.

    Of `paired` layers the products of all pairs of rows are made anew and multiplied with the vectors:
    N^2 / 2 pairs, however many vectors there are. Of `moved` ones the gradients are summed with the
    vectors as weights, and every row is multiplied with the sums: 4 N P operations a vector.
    """

    train: Gradients
    paired: tuple[str, ...]
    moved: tuple[str, ...]
    compute: ComputeWish = None

    @property
    def moved_values(self) -> int:
        """Values of one vector's sum of gradients."""
        return sum(self.train.forms[name].restored_size for name in self.moved)

    def times(self, vectors: Tensor, memory_budget: int) -> Tensor:
        """K v `[N, b]` of vectors `[N, b]`."""
        out = torch.zeros_like(vectors)
        if self.paired:
            self._add_paired(vectors, out, memory_budget)
        if self.moved:
            self._add_moved(vectors, out, memory_budget)
        return out

    def _add_paired(self, vectors: Tensor, out: Tensor, memory_budget: int) -> None:
        train = only_layers(self.train, self.paired)
        for start in range(0, len(train), _BLOCK):
            stop = min(start + _BLOCK, len(train))
            for row, first, part in lower_rows(train, start, stop, self.compute, memory_budget):
                ours, theirs = slice(row, row + len(part)), slice(first, first + part.shape[1])
                out[ours].addmm_(part, vectors[theirs])
                # The kernel is symmetric: pairs with rows before the block count for both.
                before = part[:, : max(0, start - first)]
                if before.shape[1]:
                    out[first : first + before.shape[1]].addmm_(before.t(), vectors[ours])

    def _add_moved(self, vectors: Tensor, out: Tensor, memory_budget: int) -> None:
        train = only_layers(self.train, self.moved)
        slopes = train.slopes()
        weights = vectors.t() if slopes is None else vectors.t() * slopes
        sums = {
            name: torch.zeros(len(weights), form.restored_size)
            for name, form in train.forms.items()
        }
        for some in train.stream(rows_at_once(train, memory_budget)):
            part = weights[:, some.start : some.stop]
            for name, form in train.forms.items():
                rows = some.factors[name].widened()
                sums[name] += weighted_part(form, rows, part.to(rows.example.dtype)).float()
        directions = Directions(tuple(range(len(weights))), sums, train.forms, train.weights)
        held = 4 * (out.numel() + len(weights) * self.moved_values)
        out += along(train, directions, memory_budget=memory_budget + held).t()


def lower_rows(
    train: Gradients, start: int, stop: int, compute: ComputeWish, memory_budget: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Products of rows `start` to `stop` with all rows before `stop`: (row, first column, `[b, n]`)."""
    engine = ProductEngine(
        [GradientPair(train, train)],
        compute=compute,
        memory_budget=memory_budget,
        answer=0,
        positions=range(start, stop),
        stop=stop,
    )
    for tile in engine.tiles():
        yield (
            start + tile.query_start,
            tile.train_start,
            tile.values[0, :, : stop - tile.train_start],
        )


def rows_at_once(train: Gradients, memory_budget: int) -> int:
    """Rows whose factors are in memory at the same time."""
    probe = train.rows([0])
    split = memory_shares(
        memory_budget,
        answer=0,
        mapped=max((entry.bytes for entry in train.block.manifest.segments), default=0),
        query_row=0,
        train_row=sum(rows.nbytes for rows in probe.factors.values()),
        queries=1,
        rows=len(train),
    )
    return split.train_rows


def only_layers(gradients: Gradients, layers: tuple[str, ...]) -> Gradients:
    """The gradients of some layers; only their arrays are read."""
    return dataclasses.replace(gradients, forms={name: gradients.forms[name] for name in layers})


def pair_seconds(train: Gradients, compute: ComputeWish, memory_budget: int) -> dict[str, float]:
    """Predicted seconds of the products of all pairs of rows, each pair once, by layer."""
    engine = ProductEngine(
        [GradientPair(train, train)], compute=compute, memory_budget=memory_budget, answer=0
    )
    return {step.layer: step.predicted_seconds / 2 for step in engine.plan.steps}


def moved_seconds(train: Gradients, vectors: int) -> dict[str, float]:
    """Predicted seconds to move so many vectors through all rows, there or back, by layer."""
    count, speeds = min(len(train), _PROBED), MachineSpeeds()
    some = train.rows([at * len(train) // count for at in range(count)])
    found = {}
    for name, form in train.forms.items():
        load = ProductSize(len(train), vectors, t_train=some.factors[name].positions / count)
        costs = choose_compute(form, load, speeds).alternatives
        ways = [cost.seconds for way, cost in costs.items() if way in ("half", "restored", "dense")]
        found[name] = min(ways)
    return found


def cheapest_products(
    train: Gradients,
    vectors: int,
    compute: ComputeWish,
    pairs: Mapping[str, float],
) -> tuple[KernelProducts, float]:
    """The cheapest way for each layer with so many vectors, and its predicted seconds."""
    moved = {name: 2 * each for name, each in moved_seconds(train, vectors).items()}
    better = tuple(name for name in train.forms if pairs[name] < moved[name])
    others = tuple(name for name in train.forms if name not in better)
    whole = 2.0 * len(train) ** 2 * vectors / MachineSpeeds().flops
    mixed = whole + sum(pairs[name] for name in better) + sum(moved[name] for name in others)
    if better and mixed < sum(moved.values()):
        return KernelProducts(train, better, others, compute), mixed
    return KernelProducts(train, (), tuple(train.forms), compute), sum(moved.values())
