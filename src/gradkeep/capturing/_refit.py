"""Dense gradients in the form of factors that a layer's other rows have, where that form can hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.capturing.rules._gradients import LayerGradients
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors._form import AnyForm


def in_form(piece: LayerGradients, form: AnyForm) -> LayerGradients:
    """The same gradients in that form, exactly; unchanged where they have factors or it has no room."""
    if piece.form.kind == form.kind:
        return piece
    if isinstance(form, Dense):
        return LayerGradients(form, DenseRows(piece.form.restore(piece.rows)))
    if not isinstance(piece.rows, DenseRows):
        return piece
    values = piece.rows.values
    if isinstance(form, Outer) and not form.ones:
        return LayerGradients(form, _outer(form, values))
    if isinstance(form, Lookup):
        return LayerGradients(form, _lookup(form, values))
    if isinstance(form, Tied):
        return LayerGradients(form, _tied(form, values))
    return piece


def _outer(form: Outer, values: Tensor) -> OuterRows:
    """A position for each input of the layer, and one that makes up for the bias: none if it is zero."""
    rows, used = len(values), _nonzero(values)
    size = form.d_in * form.d_out
    shape = (-1, form.d_in, form.d_out) if form.transposed else (-1, form.d_out, form.d_in)
    weight = values[used, :size].reshape(shape)
    g = weight if form.transposed else weight.mT  # [U, d_in, d_out]
    x = torch.eye(form.d_in, dtype=values.dtype, device=values.device).expand(len(g), -1, -1)
    if form.bias:
        rest = values[used, size:] - g.sum(1)
        g = torch.cat([g, rest.unsqueeze(1)], 1)
        x = torch.cat([x, x.new_zeros(len(g), 1, form.d_in)], 1)
    each = torch.zeros(rows, dtype=torch.int64)
    each[used.cpu()] = g.shape[1]
    return OuterRows(x.reshape(-1, form.d_in), g.reshape(-1, form.d_out), _offsets(each))


def _lookup(form: Lookup, values: Tensor) -> LookupRows:
    """A token for each row of the table that is not zero."""
    table = values[:, : form.rows * form.width].reshape(len(values), form.rows, form.width)
    used = (table != 0).any(2)
    row, ids = used.nonzero(as_tuple=True)
    return LookupRows(ids, table[row, ids], _offsets(used.sum(1).cpu()))


def _tied(form: Tied, values: Tensor) -> TiedRows:
    """The table as tokens; what is left is the bias, as a position without an input."""
    size = form.lookup.rows * form.lookup.width
    outer = torch.zeros_like(values)
    outer[:, size:] = values[:, size:]
    return TiedRows(_lookup(form.lookup, values), _outer(form.outer, outer))


def _nonzero(values: Tensor) -> Tensor:
    return (values != 0).any(1)


def _offsets(each: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)])
