"""Per-sample gradients the slow, obvious way: autograd on one sample at a time."""

import torch
from torch.utils import _pytree as pytree


def per_sample_gradients(model, target, batch):
    """The gradient `[B, *shape]` of each sample's `target(model, batch) -> [B]` per parameter.

    >>> model = torch.nn.Linear(2, 1)
    >>> found = per_sample_gradients(model, lambda m, x: m(x).squeeze(1), torch.ones(3, 2))
    >>> found["weight"].shape
    torch.Size([3, 1, 2])
    """
    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    parts = [part for part in pytree.tree_leaves(batch) if isinstance(part, torch.Tensor)]
    rows = []
    for row in range(len(parts[0])):
        one = pytree.tree_map_only(torch.Tensor, lambda part, at=row: part[at : at + 1], batch)
        value = target(model, one).sum()
        result = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        rows.append(
            [
                torch.zeros_like(weight) if gradient is None else gradient
                for weight, gradient in zip(weights.values(), result, strict=True)
            ]
        )
    return {name: torch.stack([row[at] for row in rows]) for at, name in enumerate(weights)}
