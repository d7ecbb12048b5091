"""One layer of a capture, some rows at a time, inside a byte budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.factors import CACHED, ConvolutionRows, OuterRows, tiles
from gradkeep.query import memory_shares as divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors import Rows
    from gradkeep.query import Gradients


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows `start` to `stop` of one layer."""

    start: int
    stop: int
    factors: Rows
    slopes: Tensor | None
    """`[B]`: what the gradients are still to be multiplied with."""


def only(gradients: Gradients, layer: str) -> Gradients:
    """The gradients of one layer; only its arrays are read."""
    return dataclasses.replace(gradients, forms={layer: gradients.forms[layer]})


def parts(
    gradients: Gradients, layer: str, memory_budget: float | str | None, *, held: int
) -> Iterator[Part]:
    """All rows of a layer in order, while `held` bytes are taken by something else."""
    one = only(gradients, layer)
    probe = one.rows([0]).factors[layer]
    split = divided(
        memory_budget,
        answer=held,
        mapped=max((entry.bytes for entry in one.block.manifest.segments), default=0),
        query_row=0,
        train_row=probe.nbytes,
        queries=1,
        rows=len(one),
    )
    slopes = one.slopes()
    for some in one.stream(split.train_rows):
        part = None if slopes is None else slopes[some.start : some.stop]
        yield Part(some.start, some.stop, some.factors[layer].widened(), part)


def weighted(
    gradients: Gradients, layer: str, shares: Tensor, memory_budget: float | str | None
) -> Tensor:
    """Sums `[K, P]` of a layer's gradients, of which each row counts `shares` `[K, N]`; float64."""
    form = gradients.forms[layer]
    out = torch.zeros(len(shares), form.restored_size, dtype=torch.float64)
    for part in parts(gradients, layer, memory_budget, held=16 * out.numel()):
        some = shares[:, part.start : part.stop].to(part.factors.example.dtype)
        if part.slopes is not None:
            some = some * part.slopes.to(some.dtype)
        # Of many positions a sum costs as much as restoring all rows: they are restored once.
        if len(shares) == 1 or not _many_positions(part.factors):
            out += form.weighted_sum(part.factors, some)
            continue
        for start, stop in tiles(part.stop - part.start, out.shape[1], 8, 8 * CACHED):
            taken = part.factors.take(start, stop)
            out += some[:, start:stop] @ form.restore(taken)
    return out


def _many_positions(rows: Rows) -> bool:
    return isinstance(rows, ConvolutionRows) or (
        isinstance(rows, OuterRows) and rows.offsets is not None
    )


def dense_rows(gradients: Gradients, layer: str, positions: list[int]) -> Tensor:
    """The restored gradients `[B, P]` of some rows of a layer."""
    factors = only(gradients, layer).rows(positions).factors[layer].widened()
    dense = gradients.forms[layer].restore(factors)
    slopes = gradients.slopes()
    return dense if slopes is None else dense * slopes[positions, None].to(dense.dtype)
