"""Convolutions without patches: products of all pixels, summed along the kernel."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from gradkeep.factors._arithmetic import CACHED, inner, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors._convolution import Convolution, ConvolutionRows


def phases(form: Convolution) -> Iterator[tuple[tuple[slice, ...], tuple[list[int], ...]]]:
    """Yield the pixels that one residue of the stride reads, and their shifts from the position.

    Pixel `stride * i + dilation * a - padding` is pixel `i + shift` of the phase `residue`.
    """
    per_axis: list[dict[int, list[int]]] = []
    for axis in range(len(form.size)):
        shifts_by_residue: dict[int, list[int]] = {}
        for tap in range(form.kernel[axis]):
            shift, residue = divmod(
                tap * form.dilation[axis] - form.padding[axis], form.stride[axis]
            )
            shifts_by_residue.setdefault(residue, []).append(shift)
        per_axis.append(shifts_by_residue)
    for residues in itertools.product(*per_axis):
        which = tuple(
            slice(residue, None, step) for residue, step in zip(residues, form.stride, strict=True)
        )
        yield which, tuple(taps[r] for taps, r in zip(per_axis, residues, strict=True))


def phase_pixels(form: Convolution) -> int:
    """Return the number of positions of the wide array that lie whole strides apart."""
    return math.prod(-(-size // step) for size, step in zip(form.size, form.stride, strict=True))


def gram_tile(
    form: Convolution, queries: int, train: int, *, itemsize: int, scratch: int
) -> tuple[int, int]:
    """Return how many queries and training rows are multiplied at a time.

    There are about four temporaries of all pairs of pixels, and copies of the pixels of both sides, twice with
    strides.
    """
    pairs = min(scratch // 8, CACHED) // itemsize // max(phase_pixels(form), form.positions) ** 2
    each = 2 * itemsize * (form.channels * math.prod(form.size) + form.filters * form.positions)
    wide = max(1, min(train, pairs, scratch // 4 // each))
    return max(1, min(queries, pairs // wide, scratch // 8 // each)), wide


def pixel_gram(
    form: Convolution, queries: ConvolutionRows, train: ConvolutionRows, *, scratch: int
) -> Tensor:
    """Return inner products `[Q, N]` of gradients, including a bias of the narrow array.

    With `P[s, s'] = x_s . x'_s'` over pixels and `R[t, t'] = g_t . g'_t'` over positions, the sum over taps a of
    `P[t + a, t' + a] R[t, t']`, and for the bias that of `R[t, t']`. The sum over taps is computed first and one
    axis at a time, `k + k` additions instead of `k k`. A stride splits the pixels into independent phases, so that
    all sums are of neighbors. 2 (S^2 C / prod(stride) + T^2 D) operations per pair.
    """
    out = train.wide.new_zeros(len(queries), len(train))
    item = train.wide.element_size()
    high, step = gram_tile(form, len(queries), len(train), itemsize=item, scratch=scratch)
    # With one group and one tile of queries the arrays are copied one after the other, so that the
    # second reuses the memory of the first.
    at_once = high < len(queries) or form.groups > 1
    for start in range(0, len(train), step):
        theirs = [train.wide[start : start + step], train.narrow[start : start + step]]
        if at_once:
            theirs = [turn(form, part) for part in theirs]
        for first in range(0, len(queries), high):
            ours = [
                turn(form, part[first : first + high]) for part in (queries.wide, queries.narrow)
            ]
            out[first : first + high, start : start + step] = _tile(form, ours, theirs)
    return out


def turn(form: Convolution, array: Tensor) -> Tensor:
    """Permute `[B, C, *size]` to `[groups, *size, B, C / groups]`, with rows as the inner axis."""
    count, size = len(array), array.shape[2:]
    parts = array.reshape(count, form.groups, -1, *size)
    order = [1, *range(3, 3 + len(size)), 0, 2]
    return parts.permute(order).contiguous()


def _tile(form: Convolution, ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    axes = len(form.size)
    out = None
    for group in range(form.groups):
        near = _near(form, ours[0][group], _of_group(form, theirs[0], group))
        grads = _pixel_products(ours[1][group], _of_group(form, theirs[1], group))
        both = grads.addcmul_(near, grads) if form.bias == "narrow" else grads.mul_(near)
        summed = both.sum([*range(axes), *range(axes + 1, 2 * axes + 1)])
        out = summed if out is None else out.add_(summed)
    assert out is not None
    return out


def _near(form: Convolution, ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the products of pixels, summed over the taps."""
    axes = len(form.size)
    near = None
    for phase, taps in phases(form):
        sums = _pixel_products(ours[phase], theirs[phase])
        for axis in range(axes):
            sums = _along(sums, taps[axis], axis, axes + 1 + axis, form.out[axis])
        near = sums if near is None else near.add_(sums)
    assert near is not None
    return near


def _of_group(form: Convolution, array: Tensor, group: int) -> Tensor:
    """Return the part of a group, permuting the array first if needed."""
    turned = array if array.dim() > len(form.size) + 2 else turn(form, array)
    return turned[group]


def _pixel_products(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the products over C of all pairs: `[*size, Q, C]`, `[*size, N, C]` -> `[*size, Q, *size, N]`."""
    matrix = ours.reshape(-1, ours.shape[-1]) @ theirs.reshape(-1, theirs.shape[-1]).t()
    return matrix.view(*ours.shape[:-1], *theirs.shape[:-1])


def _along(sums: Tensor, shifts: list[int], axis: int, other: int, length: int) -> Tensor:
    """Sum over the shifts of one axis and of its counterpart; positions outside count as zero."""
    size = sums.shape[axis]

    def part(of: Tensor, start: int, stop: int) -> Tensor:
        return of.narrow(axis, start, stop - start).narrow(other, start, stop - start)

    # Start from a shift that stays inside for all positions, instead of zeros.
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


def norm_passes(form: Convolution) -> tuple[int, int]:
    """Count operations of the products of a row's own pixels, and the results that are then summed."""
    areas, passes = 0, 3
    for which, shifts in phases(form):
        size = (len(range(*part.indices(n))) for part, n in zip(which, form.size, strict=True))
        areas += math.prod(size) ** 2
        passes += 1 + sum(len(taps) for taps in shifts if len(taps) > 1)
    length = form.positions**2
    # Fewer than 1024 results take no less time.
    results = form.groups * max(phase_pixels(form) ** 2, length, 1024)
    return 2 * (areas * form.channels + length * form.filters), passes * results


def pixel_norms(form: Convolution, rows: ConvolutionRows) -> tuple[Tensor, Tensor]:
    """Return squared norms `[B]` of gradients, including a bias of the narrow array, and which are certain.

    For one row with itself: the sum over taps a, positions t and t' of `P[t + a, t' + a] R[t, t']`. If these nearly
    cancel, few digits of float32 remain. 2 (S^2 C / prod(stride) + T^2 D) operations per row.
    """
    out = rows.wide.new_empty(len(rows))
    most = torch.empty_like(out)
    values = 4 * form.groups * max(phase_pixels(form), form.positions) ** 2
    for start, stop in tiles(len(rows), values, rows.wide.element_size(), 2 * CACHED):
        near = _own_near(form, rows.wide[start:stop])
        grads = _own_products(form, rows.narrow[start:stop]).view(near.shape)
        if form.bias == "narrow":
            near = near.add_(1)
        out[start:stop] = inner(near, grads).view(-1, form.groups).sum(1)
        sizes = (inner(near, near) * inner(grads, grads)).sqrt_()
        most[start:stop] = sizes.view(-1, form.groups).sum(1)
    # Below this share of their largest possible value, sums of products have lost too many
    # digits.
    return out, out > (1 / 32) * most


def _own_near(form: Convolution, wide: Tensor) -> Tensor:
    """Return the products of each row's pixels, summed over the taps, `[B * groups, T * T]`."""
    axes = len(form.size)
    near = None
    for phase, taps in phases(form):
        some = wide[:, :, *phase]
        sums = _own_products(form, some)
        sums = sums.view(len(sums), *some.shape[2:], *some.shape[2:])
        for axis in range(axes):
            sums = _along(sums, taps[axis], 1 + axis, 1 + axes + axis, form.out[axis])
        near = sums if near is None else near.add_(sums)
    assert near is not None
    return near.reshape(len(near), form.positions**2)


def _own_products(form: Convolution, array: Tensor) -> Tensor:
    """Return the products over C of each row's pixels: `[B, C, *size]` -> `[B * groups, S, S]`."""
    count, channels = len(array) * form.groups, array.shape[1] // form.groups
    parts = array.reshape(count, channels, math.prod(array.shape[2:]))
    return torch.bmm(parts.mT, parts)
