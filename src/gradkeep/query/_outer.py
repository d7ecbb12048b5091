"""Linear layers: products of prefixes times products of suffixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradkeep.query._factors import OuterRows
from gradkeep.query._inner import inner, pairwise, squared_lengths
from gradkeep.query._segments import (
    Spans,
    join_offsets,
    pad,
    row_of,
    spans,
    sum_columns,
    sum_pairs,
    sum_rows,
)
from gradkeep.query._tiles import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query._forms import Outer


def spans_of(rows: OuterRows) -> Spans:
    """Where each row's positions are."""
    return spans(rows.offsets, len(rows.x))


def factored(form: Outer, queries: OuterRows, train: OuterRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]`: sum over t, t' of `(x_t . x'_t' + bias) (g_t . g'_t')`.

    2 T T' (d_in + d_out) operations a pair, in two matrix products for all pairs of a tile.
    """
    plus_one = form.bias and not form.ones

    def product(left: slice, right: slice) -> Tensor:
        inputs = pairwise(queries.x[left], train.x[right])
        grads = pairwise(queries.g[left], train.g[right])
        return grads.addcmul_(inputs, grads) if plus_one else grads.mul_(inputs)

    return sum_pairs(spans_of(queries), spans_of(train), product, like=train.x, scratch=scratch)


def restore(form: Outer, rows: OuterRows) -> Tensor:
    """Gradients `[B, P]`: `g^T x` of each row, then the bias; 2 T d_in d_out operations a row."""
    parts = spans_of(rows)
    out = rows.x.new_empty(len(rows), _size(form))
    weight, bias = split(form, out)
    left, right = (rows.g, rows.x[:, : form.d_in])
    if form.transposed:
        left, right = right, left
    if parts.uniform == 1:
        torch.mul(left[:, :, None], right[:, None, :], out=weight)
    else:
        torch.bmm(pad(left, parts).transpose(1, 2), pad(right, parts), out=weight)
    if bias is not None:
        bias.copy_(sum_rows(_bias_terms(form, rows), parts))
    return out


def squared_norms(form: Outer, rows: OuterRows) -> Tensor:
    """Squared lengths `[B]` from each row's Gram matrices, or restored where T is large."""
    parts = spans_of(rows)
    if parts.uniform == 1:
        inputs = squared_lengths(rows.x)
        if form.bias and not form.ones:
            inputs = inputs + 1
        return inputs * squared_lengths(rows.g)
    out = rows.x.new_empty(len(rows))
    if len(rows) == 0:
        return out
    both = form.d_in + form.d_out
    gram = parts.longest * both < form.d_in * form.d_out
    needed = parts.longest * (3 * parts.longest + both) if gram else _size(form)
    for start, stop in tiles(len(rows), needed, rows.x.element_size(), CACHED):
        some = take(rows, start, stop)
        out[start:stop] = _gram_norms(form, some) if gram else squared_lengths(restore(form, some))
    return out


def total(form: Outer, rows: OuterRows, weights: Tensor) -> Tensor:
    """Weighted sums `[K, P]`: `(w g)^T x` over the positions of the rows with a weight.

    2 S d_in d_out operations for each of K, or once if no row has a weight in two sums.
    """
    parts = spans_of(rows)
    out = rows.x.new_zeros(len(weights), _size(form))
    where = row_of(parts, rows.x.device)
    terms = _bias_terms(form, rows) if form.bias else None
    for one, into in zip(weights, out, strict=True):
        each = one[where]
        x, g = rows.x[:, : form.d_in], rows.g
        chosen = each.nonzero()[:, 0]
        weight, bias = split(form, into[None])
        if bias is not None and terms is not None:
            bias[0] = each[chosen] @ terms[chosen]
        if len(chosen) < len(each):
            x, g, each = x[chosen], g[chosen], each[chosen]
        g = g * each[:, None]
        torch.mm(*((x.t(), g) if form.transposed else (g.t(), x)), out=weight[0])
    return out


def squares(form: Outer, rows: OuterRows, weights: Tensor) -> Tensor | None:
    """Weighted sums of squared gradients `[K, P]`, if each row has one position: of squares."""
    if spans_of(rows).uniform != 1:
        return None
    return total(form, OuterRows(rows.x.square(), rows.g.square()), weights)


def half(form: Outer, rows: OuterRows, directions: Tensor, *, scratch: int) -> Tensor:
    """Products with dense directions W `[K, P]`: sum over t of `g_t . (W x_t)`, as `[K, B]`.

    2 K T d_in d_out operations a row, and never a gradient.
    """
    parts = spans_of(rows)
    out = rows.x.new_zeros(len(directions), len(rows))
    left, right = (rows.g, rows.x[:, : form.d_in])
    if form.transposed:
        left, right = right, left
    terms = _bias_terms(form, rows) if form.bias else None
    values = max(1, min(scratch // 4, CACHED) // rows.x.element_size() // left.shape[1])
    # Many positions at a time and few directions: matrix products of a good shape.
    positions = max(parts.longest, min(1024, values))
    # Weights that a bias follows are laid out anew, one half of the temporaries.
    room = scratch // 2 // (rows.x.element_size() * _size(form))
    kinds = max(1, min(values // positions, room))
    for first in range(0, len(directions), kinds):
        weight, bias = split(form, directions[first : first + kinds])
        matrix = weight.reshape(-1, weight.shape[2]).t()
        for start, stop in parts.tiles(positions):
            at = slice(parts.bounds[start], parts.bounds[stop])
            moved = (right[at] @ matrix).view(-1, len(weight), left.shape[1])
            summed = moved.mul_(left[at, None, :]).sum(2)
            if bias is not None and terms is not None:
                summed.addmm_(terms[at], bias.t())
            out[first : first + kinds, start:stop] = sum_columns(summed.t(), parts.cut(start, stop))
    return out


def concat(parts: Sequence[OuterRows]) -> OuterRows:
    """Rows of several parts, one after the other."""
    x = torch.cat([part.x for part in parts])
    g = torch.cat([part.g for part in parts])
    if all(part.offsets is None for part in parts):
        return OuterRows(x, g)
    return OuterRows(x, g, join_offsets([_offsets(part) for part in parts]))


def take(rows: OuterRows, start: int, stop: int) -> OuterRows:
    """A view of some rows."""
    if rows.offsets is None:
        return OuterRows(rows.x[start:stop], rows.g[start:stop])
    offsets = rows.offsets[start : stop + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    return OuterRows(rows.x[low:high], rows.g[low:high], offsets - low)


def split(form: Outer, dense: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views of dense gradients `[B, P]`: the weights in their layout, and the biases `[B, d_out]`."""
    shape = (form.d_in, form.d_out) if form.transposed else (form.d_out, form.d_in)
    weight = dense[:, : form.d_in * form.d_out].view(-1, *shape)
    return weight, dense[:, form.d_in * form.d_out :] if form.bias else None


def beside(form: Outer, rows: OuterRows) -> int:
    """Values of the temporaries of a row while it is restored."""
    parts = spans_of(rows)
    return form.d_out if parts.uniform is not None else parts.longest * (form.d_in + form.d_out)


def _size(form: Outer) -> int:
    return form.d_in * form.d_out + (form.d_out if form.bias else 0)


def _offsets(rows: OuterRows) -> Tensor:
    return torch.arange(len(rows) + 1) if rows.offsets is None else rows.offsets


def _bias_terms(form: Outer, rows: OuterRows) -> Tensor:
    """What each position adds to the gradient of the bias, `[S, d_out]`."""
    return rows.g * rows.x[:, form.d_in :] if form.ones else rows.g


def _gram_norms(form: Outer, rows: OuterRows) -> Tensor:
    parts = spans_of(rows)
    x, g = pad(rows.x, parts), pad(rows.g, parts)
    inputs, grads = torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2))
    if form.bias and not form.ones:
        inputs.add_(1)
    return inner(inputs.flatten(1), grads.flatten(1))
