"""The last resort: run the whole model for one sample at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing._batches import rows_of
from gradkeep.capturing._piece import Piece
from gradkeep.factors import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.capturing._units import Unit


def pieces(
    units: Sequence[Unit],
    target: Callable[[nn.Module, Any], torch.Tensor],
    model: nn.Module,
    batch: Any,
    *,
    rows: int,
) -> dict[Unit, Piece]:
    """The dense gradients of these units' parameters, by autograd on batches of one.

    `target(model, batch) -> [B]` is what is differentiated. Cost: one forward and backward pass of
    the model per sample.
    """
    weights = [weight for unit in units for weight in unit.weights]
    found: list[torch.Tensor] = []
    for row in range(rows):
        value = target(model, rows_of(batch, row, row + 1)).sum()
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
        flat = [
            torch.zeros_like(weight).reshape(-1) if gradient is None else gradient.reshape(-1)
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
        found.append(torch.cat(flat))
    stacked = torch.stack(found)
    result = {}
    at = 0
    for unit in units:
        size = sum(parameter.size for parameter in unit.parameters)
        form = Dense(unit.parameters, f"{unit.name}.gradient", size)
        result[unit] = Piece(form, DenseRows(stacked[:, at : at + size]))
        at += size
    return result
