"""Per-sample gradients the slow, obvious way: autograd on one sample at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing import batch_size, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable


def per_sample_gradients(
    model: nn.Module, target: Callable[[nn.Module, Any], torch.Tensor], batch: Any
) -> dict[str, torch.Tensor]:
    """The gradient `[B, *shape]` of each sample's `target(model, batch) -> [B]` per parameter.

    >>> model = nn.Linear(2, 1)
    >>> found = per_sample_gradients(model, lambda m, x: m(x).squeeze(1), torch.ones(3, 2))
    >>> found["weight"].shape
    torch.Size([3, 1, 2])
    """
    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    rows: list[tuple[torch.Tensor, ...]] = []
    for row in range(batch_size(batch)):
        value = target(model, rows_of(batch, row, row + 1)).sum()
        found = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        rows.append(
            tuple(
                torch.zeros_like(weight) if gradient is None else gradient
                for weight, gradient in zip(weights.values(), found, strict=True)
            )
        )
    return {name: torch.stack([row[at] for row in rows]) for at, name in enumerate(weights)}
