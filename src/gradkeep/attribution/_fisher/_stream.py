"""One layer of a capture, some rows at a time, inside a byte budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.attribution._fisher._layout import SCRATCH, size_kept
from gradkeep.attribution._projections._rows import widened
from gradkeep.query import _operators
from gradkeep.query._factors import ConvRows, OuterRows, dtype_of
from gradkeep.query._memory import shares as divided
from gradkeep.query._tiles import tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.query import Gradients
    from gradkeep.query._factors import Factors


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows `start` to `stop` of one layer."""

    start: int
    stop: int
    factors: Factors
    slopes: Tensor | None
    """`[B]`: what the gradients are still to be multiplied with."""


def only(gradients: Gradients, layer: str) -> Gradients:
    """The gradients of one layer; only its arrays are read."""
    return dataclasses.replace(gradients, forms={layer: gradients.forms[layer]})


def parts(
    gradients: Gradients, layer: str, memory_budget: int | str | None, *, held: int
) -> Iterator[Part]:
    """All rows of a layer in order, while `held` bytes are taken by something else."""
    one = only(gradients, layer)
    probe = one.rows([0]).factors[layer]
    split = divided(
        memory_budget,
        answer=held,
        mapped=max((entry.bytes for entry in one.block.manifest.segments), default=0),
        query_row=0,
        train_row=_operators.nbytes(probe),
        queries=1,
        rows=len(one),
    )
    slopes = one.slopes()
    for some in one.stream(split.train_rows):
        part = None if slopes is None else slopes[some.start : some.stop]
        yield Part(some.start, some.stop, widened(some.factors[layer]), part)


def weighted(
    gradients: Gradients, layer: str, shares: Tensor, memory_budget: int | str | None
) -> Tensor:
    """Sums `[K, P]` of a layer's gradients, of which each row counts `shares` `[K, N]`; float64."""
    form = gradients.forms[layer]
    out = torch.zeros(len(shares), size_kept(form), dtype=torch.float64)
    for part in parts(gradients, layer, memory_budget, held=16 * out.numel()):
        some = shares[:, part.start : part.stop].to(dtype_of(part.factors))
        if part.slopes is not None:
            some = some * part.slopes.to(some.dtype)
        # Of many positions a sum costs as much as restoring all rows: they are restored once.
        if len(shares) == 1 or not _many_positions(part.factors):
            out += _operators.total(form, part.factors, some)
            continue
        for start, stop in tiles(part.stop - part.start, out.shape[1], 8, SCRATCH):
            taken = _operators.take(form, part.factors, start, stop)
            out += some[:, start:stop] @ _operators.restore(form, taken)
    return out


def _many_positions(rows: Factors) -> bool:
    return isinstance(rows, ConvRows) or (isinstance(rows, OuterRows) and rows.offsets is not None)


def dense_rows(gradients: Gradients, layer: str, positions: list[int]) -> Tensor:
    """The restored gradients `[B, P]` of some rows of a layer."""
    factors = widened(only(gradients, layer).rows(positions).factors[layer])
    dense = _operators.restore(gradients.forms[layer], factors)
    slopes = gradients.slopes()
    return dense if slopes is None else dense * slopes[positions, None].to(dense.dtype)
