"""Convolutions without patches: the products of all pixels, summed along the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.query._phases import gram_tile, phases

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.query._factors import ConvRows
    from gradkeep.query._forms import Conv

    Taps = dict[int, list[int]]


def dot(form: Conv, queries: ConvRows, train: ConvRows, *, scratch: int) -> Tensor:
    """Inner products `[Q, N]` of gradients, a bias of the narrow array included.

    With `P[s, s'] = x_s . x'_s'` over pixels and `R[t, t'] = g_t . g'_t'` over positions, the sum
    over taps a of `P[t + a, t' + a] R[t, t']`, and for the bias that of `R[t, t']`. The sum over
    taps is done first and one axis at a time, `k + k` additions instead of `k k`. A stride parts
    the pixels into phases that never meet, so that all sums are of neighbours.
    2 (S^2 C / prod(stride) + T^2 D) operations a pair.
    """
    out = train.wide.new_zeros(len(queries), len(train))
    item = train.wide.element_size()
    high, step = gram_tile(form, len(queries), len(train), itemsize=item, scratch=scratch)
    # For one group and one tile of queries the arrays are laid out one after the other, so that
    # the second takes the place of the first.
    at_once = high < len(queries) or form.groups > 1
    for start in range(0, len(train), step):
        right = [train.wide[start : start + step], train.narrow[start : start + step]]
        if at_once:
            right = [turn(form, part) for part in right]
        for first in range(0, len(queries), high):
            left = [
                turn(form, part[first : first + high]) for part in (queries.wide, queries.narrow)
            ]
            out[first : first + high, start : start + step] = _tile(form, left, right)
    return out


def turn(form: Conv, array: Tensor) -> Tensor:
    """`[B, C, *size]` -> `[groups, *size, B, C / groups]`, in which the rows are the inner axis."""
    count, size = len(array), array.shape[2:]
    parts = array.reshape(count, form.groups, -1, *size)
    order = [1, *range(3, 3 + len(size)), 0, 2]
    return parts.permute(order).contiguous()


def _tile(form: Conv, left: list[Tensor], right: list[Tensor]) -> Tensor:
    axes = len(form.size)
    out = None
    for group in range(form.groups):
        near = _near(form, left[0][group], _of_group(form, right[0], group))
        grads = products(left[1][group], _of_group(form, right[1], group), axes)
        both = grads.addcmul_(near, grads) if form.bias == "narrow" else grads.mul_(near)
        summed = both.sum([*range(axes), *range(axes + 1, 2 * axes + 1)])
        out = summed if out is None else out.add_(summed)
    assert out is not None
    return out


def _near(form: Conv, left: Tensor, right: Tensor) -> Tensor:
    """The products of pixels, summed over the taps."""
    axes = len(form.size)
    near = None
    for phase, taps in phases(form):
        sums = products(left[phase], right[phase], axes)
        for axis in range(axes):
            sums = _along(sums, taps[axis], axis, axes, form.out[axis])
        near = sums if near is None else near.add_(sums)
    assert near is not None
    return near


def _of_group(form: Conv, array: Tensor, group: int) -> Tensor:
    """The part of a group, laid out anew unless it is already."""
    turned = array if array.dim() > len(form.size) + 2 else turn(form, array)
    return turned[group]


def products(left: Tensor, right: Tensor, axes: int) -> Tensor:
    """`[*size, Q, C]`, `[*size, N, C]` -> the products over C of all pairs `[*size, Q, *size, N]`."""
    matrix = left.reshape(-1, left.shape[-1]) @ right.reshape(-1, right.shape[-1]).t()
    return matrix.view(*left.shape[:-1], *right.shape[:-1])


def _along(sums: Tensor, shifts: list[int], axis: int, axes: int, length: int) -> Tensor:
    """Sums over the shifts of one axis, on both sides; what lies outside counts as zero."""
    other = axes + 1 + axis
    size = sums.shape[axis]

    def part(of: Tensor, start: int, stop: int) -> Tensor:
        return of.narrow(axis, start, stop - start).narrow(other, start, stop - start)

    # A shift that stays inside for all positions spares the zeros to add to.
    whole = [shift for shift in shifts if shift >= 0 and shift + length <= size]
    if whole:
        first = part(sums, whole[0], whole[0] + length)
        if len(shifts) == 1:
            return first
        out = first.clone(memory_format=torch.contiguous_format)
    else:
        shape = list(sums.shape)
        shape[axis] = shape[other] = length
        out = sums.new_zeros(shape)
    for shift in shifts:
        low, high = max(0, -shift), min(length, size - shift)
        if low < high and shift not in whole[:1]:
            part(out, low, high).add_(part(sums, low + shift, high + shift))
    return out
