"""Products with the empirical Fisher matrix, from kept gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep import query
from gradkeep.attribution._fisher._stream import weighted

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._curvature._space import Space
    from gradkeep.query import Gradients


def fisher_product(
    space: Space, train: Gradients, vectors: Tensor, *, memory_budget: float | str | None
) -> Tensor:
    """F v = mean over rows of g (g . v), for vectors `[K, P]`; two passes over the rows."""
    directions = space.directions(vectors)
    shares = query.along(train, directions, memory_budget=memory_budget) / len(train)
    found = [weighted(train, name, shares, memory_budget) for name in train.forms]
    return torch.cat(found, 1)
