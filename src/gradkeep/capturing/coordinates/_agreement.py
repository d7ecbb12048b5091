"""How well kept coordinates rank rows, beside scores from whole gradients, on a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradkeep._ranks import rank_correlation
from gradkeep.factors._arithmetic import pairwise
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, packed_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.coordinates._choice import ChosenCoordinates, LeadingLayer
    from gradkeep.capturing.coordinates._keep import Keep
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.factors._weights import LayerProjection

_MOST, _LEAST = 16, 8
_HELD = 512 << 20
"""Bytes of whole gradients that are held at a time; a model of which eight rows take more is not
compared."""


def measure_agreement(
    tracer: Tracer,
    sample: Iterable[Any],
    layers: Mapping[LayerUnit, LeadingLayer],
    chosen: ChosenCoordinates,
    keep: Keep,
    device: torch.device,
    *,
    budget: int | None = None,
) -> tuple[float | None, int]:
    """The mean over rows of the rank correlation of kept and full scores of all others, and how many.

    The full score of a layer is that of its leading coordinates, weighed as they are kept, and of the
    rest of the gradient with the mean eigenvalue of the rest. What is asked about is not rounded. Of
    a `budget` of bytes at most a half is taken.
    """
    parts: list[Traced] = []
    rows, size = 0, sum(4 * unit.size for unit in tracer.units)
    held = _HELD if budget is None else min(_HELD, budget // 2)
    if _LEAST * size > held:
        return None, 0
    for batch in sample:
        traced = tracer.run(batch, device=device)
        parts.append(traced)
        rows += len(traced.measured.losses)
        if rows >= _MOST or (rows + 4) * size > held:
            break
    if rows < _LEAST:
        return None, rows
    return _compared(parts, rows, tracer, layers, chosen, keep), rows


@torch.no_grad()
def _compared(
    parts: list[Traced],
    rows: int,
    tracer: Tracer,
    layers: Mapping[LayerUnit, LeadingLayer],
    chosen: ChosenCoordinates,
    keep: Keep,
) -> float:
    full = torch.zeros(rows, rows, dtype=torch.float64)
    for unit in tracer.units:
        full += _full(parts, unit, layers.get(unit), keep).double().cpu()
    kept = torch.cat(
        [
            torch.cat([_coordinates(part, unit, projection) for part in parts])
            for unit, projection in chosen.layers.items()
        ],
        1,
    ).cpu()
    scores = pairwise(kept, _rounded(kept, keep, chosen.group)).double()
    slopes = [tracer.loss_slopes(part.measured) for part in parts]
    if slopes[0] is not None:
        share = torch.cat([slope.double().cpu() for slope in slopes if slope is not None])
        full, scores = full * share, scores * share
    found = [
        rank_correlation(_without(full[row], row), _without(scores[row], row))
        for row in range(rows)
    ]
    return sum(found) / rows


def _full(parts: list[Traced], unit: LayerUnit, layer: LeadingLayer | None, keep: Keep) -> Tensor:
    """The scores `[S, S]` of one layer."""
    form = parts[0].pieces[unit].form
    dense = torch.cat([form.restore(part.pieces[unit].rows.widened()) for part in parts])
    if layer is None or not keep.whitened or layer.mean <= 0:
        return pairwise(dense, dense)
    added = keep.damping * layer.mean
    out = pairwise(dense, dense) / (layer.rest + added)
    for block, piece in zip(layer.blocks, form.weight_blocks(), strict=True):
        left, right = block.left.to(dense), block.right.to(dense)
        found = (left.mT @ piece.matrices(dense) @ right).flatten(1)
        gain = 1 / (block.values + added) - 1 / (layer.rest + added)
        out += pairwise(found * gain.to(found), found)
    return out


def _coordinates(part: Traced, unit: LayerUnit, projection: LayerProjection) -> Tensor:
    piece = part.pieces[unit]
    return projection.applied(piece.form, piece.rows.widened()).float()


def _rounded(values: Tensor, keep: Keep, group: int) -> Tensor:
    """What is left of coordinates `[S, K]` once they are kept."""
    if keep.bits not in PACKED:
        return values
    scales = bit_scales(values, keep.bits, group)
    assert scales is not None
    form = Bits((), "", "scale", values.shape[1], keep.bits, group=group)
    return form.restore(BitRows(packed_bits(values, scales, keep.bits, group), scales))


def _without(values: Tensor, row: int) -> Any:
    return torch.cat([values[:row], values[row + 1 :]]).numpy()
