"""Iterate over the rows of one layer, and sum them with weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.factors._convolution import ConvolutionRows
from gradkeep.factors._form import Form, has_factors
from gradkeep.factors._outer import OuterRows
from gradkeep.query._engine import stream_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.query import Gradients


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """Rows `start` to `stop` of one layer."""

    start: int
    stop: int
    factors: GradientRows
    slopes: Tensor | None
    """`[B]`: factors that the gradients are still to be multiplied with."""


def only_layer(gradients: Gradients, layer: str) -> Gradients:
    """Restrict gradients to one layer; only its arrays are read."""
    return dataclasses.replace(gradients, forms={layer: gradients.forms[layer]})


def row_parts(
    gradients: Gradients, layer: str, memory_budget: float | str | None, *, held: int
) -> Iterator[RowPart]:
    """Iterate over all rows of a layer in order, while `held` bytes are in use elsewhere."""
    one = only_layer(gradients, layer)
    slopes = one.slopes()
    for some in one.stream(stream_shares(one, memory_budget, answer=held).train_rows):
        part = None if slopes is None else slopes[some.start : some.stop]
        yield RowPart(some.start, some.stop, some.factors[layer].widened(), part)


def held_rows(
    gradients: Gradients,
    layer: str,
    memory_budget: float | str | None,
    *,
    held: int,
    free_bytes: int,
) -> list[RowPart] | None:
    """Read all rows of a layer to iterate over them again; None if they take too many bytes.

    Opening and checking the segments of a capture costs as much as reading one layer.
    """
    one = only_layer(gradients, layer)
    # Raises for a budget that is too small.
    count = stream_shares(one, memory_budget, answer=held).train_rows
    if one.rows([0]).factors[layer].widened().nbytes * len(one) > free_bytes:
        return None
    parts, slopes = [], one.slopes()
    for some in one.stream(count):
        rows = some.factors[layer].widened()
        free_bytes -= rows.nbytes
        if free_bytes < 0:  # rows that follow have more positions than the first
            return None
        part = None if slopes is None else slopes[some.start : some.stop]
        parts.append(RowPart(some.start, some.stop, rows, part))
    return parts


def joined(form: AnyForm, parts: Iterable[RowPart]) -> Iterator[RowPart]:
    """Join rows into parts of some thousand positions: products of few are slow."""
    if not has_factors(form) or form.kind not in _JOINED:
        yield from parts
        return
    few: list[RowPart] = []
    for part in parts:
        few.append(part)
        if sum(one.factors.positions for one in few) >= 4096:
            yield _as_one(form, few)
            few = []
    if few:
        yield _as_one(form, few)


def _as_one(form: AnyForm, parts: list[RowPart]) -> RowPart:
    if len(parts) == 1:
        return parts[0]
    slopes = [part.slopes for part in parts if part.slopes is not None]
    return RowPart(
        parts[0].start,
        parts[-1].stop,
        _JOINED[form.kind]([part.factors for part in parts]),
        torch.cat(slopes) if slopes else None,
    )


def _joined_conv(parts: list[ConvolutionRows]) -> ConvolutionRows:
    wide, narrow = ([getattr(one, side) for one in parts] for side in ("wide", "narrow"))
    return ConvolutionRows(torch.cat(wide), torch.cat(narrow))


_JOINED: dict[str, Callable[[list[Any]], GradientRows]] = {
    "outer": OuterRows.stacked,
    "conv": _joined_conv,
}


def weighted(
    gradients: Gradients, layer: str, shares: Tensor, memory_budget: float | str | None
) -> Tensor:
    """Return sums `[K, P]` of a layer's gradients with the weights `shares` `[K, N]`, in float64."""
    form = gradients.forms[layer]
    out = torch.zeros(len(shares), form.restored_size, dtype=torch.float64)
    for part in row_parts(gradients, layer, memory_budget, held=16 * out.numel()):
        some = shares[:, part.start : part.stop].to(part.factors.example.dtype)
        if part.slopes is not None:
            some = some * part.slopes.to(some.dtype)
        out += weighted_part(form, part.factors, some)
    return out


def weighted_part(form: AnyForm, rows: GradientRows, shares: Tensor) -> Tensor:
    """Return sums `[K, P]` of the gradients of some rows with the weights `shares` `[K, B]`."""
    # With many positions a sum costs as much as restoring all rows, so restore them once.
    shared = has_factors(form) and not form.sparse and rows.positions > len(rows)
    if len(shares) > 1 and shared:
        return Form.weighted_sum(form, rows, shares)
    return form.weighted_sum(rows, shares)


def dense_rows(gradients: Gradients, layer: str, positions: list[int]) -> Tensor:
    """Return the restored gradients `[B, P]` of some rows of a layer."""
    factors = only_layer(gradients, layer).rows(positions).factors[layer].widened()
    dense = gradients.forms[layer].restore(factors)
    slopes = gradients.slopes()
    return dense if slopes is None else dense * slopes[positions, None].to(dense.dtype)
