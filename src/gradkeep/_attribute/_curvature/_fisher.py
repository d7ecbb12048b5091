"""Products with the empirical Fisher matrix, from kept gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep import query
from gradkeep._attribute._fisher._stream import parts
from gradkeep.query import _operators
from gradkeep.query._factors import dtype_of

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep._attribute._curvature._space import Space
    from gradkeep.query import Gradients


def fisher_product(
    space: Space, train: Gradients, vectors: Tensor, *, memory_budget: int | str | None
) -> Tensor:
    """F v = mean over rows of g (g . v), for vectors `[K, P]`; two passes over the rows."""
    directions = space.directions(vectors)
    shares = query.along(train, directions, memory_budget=memory_budget) / len(train)
    found = []
    for name, form in train.forms.items():
        summed = torch.zeros(len(vectors), directions.layers[name].shape[1], dtype=torch.float64)
        for part in parts(train, name, memory_budget, held=16 * summed.numel()):
            weights = shares[:, part.start : part.stop].to(dtype_of(part.factors))
            if part.slopes is not None:
                weights = weights * part.slopes.to(weights.dtype)
            summed += _operators.total(form, part.factors, weights)
        found.append(summed)
    return torch.cat(found, 1)
