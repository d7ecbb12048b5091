"""Where the positions of a convolution read: padding, patches, groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from gradkeep.query._factors import OuterRows
from gradkeep.query._forms import Outer

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.query._factors import ConvRows
    from gradkeep.query._forms import Conv


def padded(form: Conv, wide: Tensor) -> Tensor:
    """The wide array with zeros around it, cut behind the last position that is read."""
    amounts: list[int] = []
    for length, size, before in zip(reach(form), form.size, form.padding, strict=True):
        amounts = [before, max(0, length - size - before), *amounts]
    if any(amounts):
        wide = F.pad(wide, amounts)
    for axis, length in enumerate(reach(form), start=2):
        wide = wide.narrow(axis, 0, length)
    return wide


def reach(form: Conv) -> list[int]:
    """The size of the padded array, up to the last position that is read."""
    return [
        (out - 1) * step + (taps - 1) * spread + 1
        for out, step, taps, spread in zip(
            form.out, form.stride, form.kernel, form.dilation, strict=True
        )
    ]


def patches(form: Conv, wide: Tensor) -> Tensor:
    """A view `[B, C, *kernel, *out]` of the padded array: what each tap reads at each position."""
    whole = padded(form, wide)
    axes = range(2, whole.dim())
    taps = [whole.stride(axis) * form.dilation[axis - 2] for axis in axes]
    steps = [whole.stride(axis) * form.stride[axis - 2] for axis in axes]
    shape = (*whole.shape[:2], *form.kernel, *form.out)
    return whole.as_strided(shape, (*whole.stride()[:2], *taps, *steps))


def columns(form: Conv, wide: Tensor) -> Tensor:
    """Patches as matrices `[B, groups, C / groups * taps, T]`."""
    shape = (len(wide), form.groups, form.channels // form.groups * form.taps, form.positions)
    return patches(form, wide).reshape(shape)


def unfolded(form: Conv, rows: ConvRows) -> tuple[Outer, list[OuterRows]]:
    """The convolution as a linear layer on patches, one for each group, T positions a row."""
    count, groups, length = len(rows), form.groups, form.positions
    inner, outer = form.channels // groups, form.filters // groups
    linear = Outer((), "", "", inner * form.taps, outer, bias=form.bias == "narrow")
    axes = len(form.size)
    order = [0, *range(2 + axes, 2 + 2 * axes), 1, *range(2, 2 + axes)]
    x = patches(form, rows.wide).permute(order).reshape(count * length, groups, -1)
    g = rows.narrow.flatten(2).transpose(1, 2).reshape(count * length, groups, outer)
    offsets = _offsets(count, length)
    return linear, [OuterRows(x[:, i], g[:, i], offsets) for i in range(groups)]


def _offsets(count: int, length: int) -> Tensor:
    return torch.arange(count + 1) * length


def patch_values(form: Conv) -> int:
    """The number of values that a row's patches have."""
    return form.channels * form.taps * form.positions + form.filters * form.positions


def padded_values(form: Conv) -> int:
    """The number of values that a row's padded array has."""
    lengths = zip(reach(form), form.size, form.padding, strict=True)
    return form.channels * math.prod(max(long, size + before) for long, size, before in lengths)
