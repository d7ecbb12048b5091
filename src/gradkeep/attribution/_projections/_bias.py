"""Gradients of biases: sums over positions, far smaller than those of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradkeep.query._segments import spans, sum_rows

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.query._factors import ConvRows, OuterRows
    from gradkeep.query._forms import Conv, Outer


def outer_bias(form: Outer, rows: OuterRows) -> Tensor | None:
    """The gradients `[B, d_out]` of a linear layer's bias; None without one."""
    if not form.bias:
        return None
    terms = rows.g * rows.x[:, form.d_in :] if form.ones else rows.g
    return sum_rows(terms, spans(rows.offsets, len(rows.x)))


def conv_bias(form: Conv, rows: ConvRows) -> Tensor | None:
    """The gradients of a convolution's bias, `[B, D]` or, of a transposed one, `[B, C]`."""
    if form.bias is None:
        return None
    return (rows.wide if form.bias == "wide" else rows.narrow).flatten(2).sum(2)
