"""What each token adds to a layer's products with dense directions, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gradkeep.capturing.rules._gradients import by_sample
from gradkeep.capturing.rules._linear import is_linear, linear_gradients
from gradkeep.capturing.rules._norms import norm_terms
from gradkeep.factors._form import widened
from gradkeep.factors._lookup import Lookup, LookupRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._units import LayerUnit


def token_products(
    unit: LayerUnit, calls: Sequence[LayerCall], directions: Tensor, *, rows: int, tokens: int
) -> Tensor | None:
    """`[K, B, T]`: products with directions `[K, P]`, summed over calls; None: it has no such positions.

    Every call must put out one vector for each token, `[B, T, d]`: that of a linear layer, of an
    embedding, of both uses of a tied weight, or of a norm over the last dimension.
    """
    total: Tensor | None = None
    for call in calls:
        found = _one(unit, call, directions, rows, tokens)
        if found is None:
            return None
        total = found if total is None else total + found
    return total


def _one(
    unit: LayerUnit, call: LayerCall, directions: Tensor, rows: int, tokens: int
) -> Tensor | None:
    suffix = by_sample(call.suffix(), rows, unit.axis)
    if suffix.dim() != 3 or suffix.shape[:2] != (rows, tokens):
        return None
    if unit.rule == "norm":
        terms = norm_terms(call, unit.parameters, rows=rows, axis=unit.axis)
        return None if terms is None else torch.einsum("kp,btp->kbt", directions.to(terms), terms)
    if unit.rule in ("embedding", "tied") and isinstance(call.module, nn.Embedding):
        return _looked_up(unit, call, suffix, directions)
    if unit.rule in ("linear", "tied") and is_linear(call.module):
        piece = linear_gradients(
            unit.name, call.module, unit.parameters, [call], rows=rows, axis=unit.axis
        )
        kept = piece.rows.widened()
        parts = piece.form.along_positions(kept, directions.to(kept.example))
        return None if parts is None else parts[0].values.view(-1, rows, tokens)
    return None


def _looked_up(
    unit: LayerUnit, call: LayerCall, suffix: Tensor, directions: Tensor
) -> Tensor | None:
    """Tokens as they were read, equal ones apart."""
    table = call.module
    assert isinstance(table, nn.Embedding)
    rows, tokens, width = suffix.shape
    ids = by_sample(call.input, rows, unit.axis)
    if ids.shape != (rows, tokens):
        return None
    g = widened(suffix)
    if table.padding_idx is not None:
        g = g.masked_fill((ids == table.padding_idx).unsqueeze(2), 0)
    size = table.num_embeddings * width
    form = Lookup(unit.parameters[:1], "", "", table.num_embeddings, width)
    offsets = torch.arange(rows + 1) * tokens
    kept = LookupRows(ids.reshape(-1), g.reshape(-1, width), offsets)
    parts = form.along_positions(kept, directions[:, :size].to(g))
    return None if parts is None else parts[0].values.view(-1, rows, tokens)
