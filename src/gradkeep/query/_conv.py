"""Convolutions: sums over taps of products of shifted pixels and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gradkeep.query import _gram, _outer
from gradkeep.query._factors import ConvRows
from gradkeep.query._inner import squared_lengths
from gradkeep.query._patches import columns, padded, padded_values, patch_values, unfolded
from gradkeep.query._tiles import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.query._forms import Conv

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def factored(form: Conv, queries: ConvRows, train: ConvRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]` of patches, as of a linear layer on them.

    2 T^2 (C / groups * taps + D / groups) operations a pair and group.
    """
    out = train.wide.new_zeros(len(queries), len(train))
    for first, last in _tiles(form, queries, scratch // 3):
        linear, left = unfolded(form, take(queries, first, last))
        for start, stop in _tiles(form, train, scratch // 3):
            right = unfolded(form, take(train, start, stop))[1]
            for one, other in zip(left, right, strict=True):
                out[first:last, start:stop] += _outer.factored(
                    linear, one, other, scratch=scratch // 3
                )
    if form.bias == "wide":
        out += _sums(form, queries) @ _sums(form, train).t()
    return out


def gram(form: Conv, queries: ConvRows, train: ConvRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]` by the pixel Gram matrix, the bias included."""
    out = _gram.dot(form, queries, train, scratch=scratch)
    if form.bias == "wide":
        out += _sums(form, queries) @ _sums(form, train).t()
    return out


def restore(form: Conv, rows: ConvRows) -> Tensor:
    """Gradients `[B, P]`: of each row and group, the narrow array times the patches.

    2 T D C / groups * taps operations a row.
    """
    count, groups = len(rows), form.groups
    weights = _weights(form)
    out = rows.wide.new_empty(count, _size(form))
    narrow = rows.narrow.reshape(count, groups, form.filters // groups, form.positions)
    inner = form.channels // groups * form.taps
    into = out[:, :weights].view(count, groups, narrow.shape[2], inner)
    # A tile of patches at a time: written and read again while it is in the cache.
    for start, stop in _tiles(form, rows, CACHED):
        read = columns(form, rows.wide[start:stop])
        torch.matmul(narrow[start:stop], read.transpose(2, 3), out=into[start:stop])
    if form.bias is not None:
        out[:, weights:] = _sums(form, rows)
    return out


def squared_norms(form: Conv, rows: ConvRows) -> Tensor:
    """Squared lengths `[B]`, of the patches as of a linear layer, or restored where T is large."""
    out = rows.wide.new_zeros(len(rows))
    inner, outer = form.channels // form.groups * form.taps, form.filters // form.groups
    if form.positions * (inner + outer) >= inner * outer:
        # Patches that are only multiplied once need not be laid out by position.
        for start, stop in tiles(len(rows), _size(form), rows.wide.element_size(), CACHED):
            out[start:stop] = squared_lengths(restore(form, take(rows, start, stop)))
        return out
    for start, stop in _tiles(form, rows, CACHED):
        linear, parts = unfolded(form, take(rows, start, stop))
        for part in parts:
            out[start:stop] += _outer.squared_norms(linear, part)
    if form.bias == "wide":
        out += squared_lengths(_sums(form, rows))
    return out


def total(form: Conv, rows: ConvRows, weights: Tensor) -> Tensor:
    """Weighted sums `[K, P]`: the weight gradient of a batch whose narrow arrays are scaled.

    2 B T D C / groups * taps operations for each of K, or once if no row is in two sums.
    """
    out = rows.wide.new_zeros(len(weights), _size(form))
    sums = None if form.bias is None else _sums(form, rows)
    wide = padded(form, rows.wide)
    for one, into in zip(weights, out, strict=True):
        chosen = one.nonzero()[:, 0]
        if len(chosen) == 0:
            continue
        share, image, narrow = one[chosen], wide, rows.narrow
        if len(chosen) < len(one):
            image, narrow = image[chosen], narrow[chosen]
        if sums is not None:
            into[_weights(form) :] = share @ sums[chosen]
        scaled = narrow * share.view(-1, *[1] * (narrow.dim() - 1))
        into[: _weights(form)] = _weight_gradient(form, image, scaled).flatten()
    return out


def half(form: Conv, rows: ConvRows, directions: Tensor, *, scratch: int) -> Tensor:
    """Products with dense directions W `[K, P]`: the convolution with W, times the narrow array.

    2 K T D C / groups * taps operations a row, and never a gradient; as `[K, B]`.
    """
    groups, count = form.groups, len(directions)
    out = rows.wide.new_zeros(count, len(rows))
    item = rows.wide.element_size()
    room = scratch // 4 // (item * _weights(form))
    kinds = min(scratch // 4, CACHED) // (item * form.filters * form.positions)
    kinds = max(1, min(count, kinds, room))
    shape = (groups, form.filters // groups, form.channels // groups, *form.kernel)
    for first in range(0, count, kinds):
        kernel = directions[first : first + kinds, : _weights(form)].view(-1, *shape)
        some = len(kernel)
        kernel = kernel.transpose(0, 1).reshape(-1, *shape[2:])
        values = some * form.filters * form.positions + padded_values(form)
        for start, stop in tiles(len(rows), values, item, min(scratch // 2, 4 * CACHED)):
            moved = _CONVOLVE[len(form.size)](
                padded(form, rows.wide[start:stop]),
                kernel,
                stride=form.stride,
                dilation=form.dilation,
                groups=groups,
            )
            moved = moved.reshape(stop - start, groups, some, -1)
            narrow = rows.narrow[start:stop].reshape(stop - start, groups, 1, -1)
            out[first : first + some, start:stop] = moved.mul_(narrow).sum((1, 3)).t()
    if form.bias is not None:
        out += directions[:, _weights(form) :] @ _sums(form, rows).t()
    return out


def beside(form: Conv, rows: ConvRows) -> int:
    """Values of the temporaries of a row while it is restored: its patches, and it padded."""
    del rows
    return patch_values(form) + padded_values(form)


def concat(parts: Sequence[ConvRows]) -> ConvRows:
    """Rows of several parts, one after the other."""
    wide = torch.cat([part.wide for part in parts])
    return ConvRows(wide, torch.cat([part.narrow for part in parts]))


def take(rows: ConvRows, start: int, stop: int) -> ConvRows:
    """A view of some rows."""
    return ConvRows(rows.wide[start:stop], rows.narrow[start:stop])


def _weights(form: Conv) -> int:
    return form.filters * (form.channels // form.groups) * form.taps


def _size(form: Conv) -> int:
    return _weights(form) + {"narrow": form.filters, "wide": form.channels, None: 0}[form.bias]


def _sums(form: Conv, rows: ConvRows) -> Tensor:
    """The gradients of the bias."""
    return (rows.wide if form.bias == "wide" else rows.narrow).flatten(2).sum(2)


def _tiles(form: Conv, rows: ConvRows, scratch: int) -> list[tuple[int, int]]:
    """Rows whose patches, twice while they are laid out, fit."""
    values = 2 * patch_values(form)
    return list(tiles(len(rows), values, rows.wide.element_size(), scratch))


def _weight_gradient(form: Conv, image: Tensor, narrow: Tensor) -> Tensor:
    shape = (form.filters, form.channels // form.groups, *form.kernel)
    axes = len(form.size)
    gradients = torch.ops.aten.convolution_backward(
        narrow,
        image,
        narrow.new_empty(1).expand(shape),
        None,
        form.stride,
        [0] * axes,
        form.dilation,
        False,
        [0] * axes,
        form.groups,
        (False, True, False),
    )
    weight: Tensor = gradients[1]
    return weight
