"""Convolutions as linear layers on patches whose channels lie side by side.

`query` lays patches out as the weight is, one value at a time; for moments the order of the columns
is free, and runs of channels are copied several times faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.factors import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors import Convolution


def by_channels(form: Convolution, wide: Tensor) -> Iterator[list[Tensor]]:
    """Some rows of `[B, C, *size]` at a time, of each group the patches `[b T, width]`.

    Their columns are taps x channels, ones for the bias, and zeros up to a multiple of 16, without
    which matrix products take up to twice as long.
    """
    for start, stop in tiles(len(wide), 2 * form.patch_values, wide.element_size(), 4 * CACHED):
        pixels = form.padded(wide[start:stop]).movedim(1, -1).contiguous()
        yield [_patches(form, pixels, group) for group in range(form.groups)]


def width(form: Convolution) -> int:
    """The number of columns of such patches."""
    return even(form.channels // form.groups * form.taps + (form.bias == "narrow"))


def even(columns: int) -> int:
    """The next multiple of 16."""
    return -(-columns // 16) * 16


def order(form: Convolution) -> Tensor:
    """Where each column of the weight's matrix is among those of such patches."""
    inner = form.channels // form.groups
    columns = torch.arange(inner * form.taps).view(form.taps, inner).t().flatten()
    if form.bias != "narrow":
        return columns
    return torch.cat([columns, torch.tensor([inner * form.taps])])


def _patches(form: Convolution, wide: Tensor, group: int) -> Tensor:
    """Those of one group, from padded pixels `[B, *size, C]`."""
    count, inner, axes = len(wide), form.channels // form.groups, range(1, wide.dim() - 1)
    steps = [wide.stride(axis) * form.stride[axis - 1] for axis in axes]
    taps = [wide.stride(axis) * form.dilation[axis - 1] for axis in axes]
    read = wide[..., group * inner :].as_strided(
        (count, *form.out, *form.kernel, inner),
        (wide.stride(0), *steps, *taps, 1),
        storage_offset=wide.storage_offset() + group * inner,
    )
    columns = inner * form.taps
    made = wide.new_empty(count, *form.out, width(form))
    made[..., :columns].view(read.shape).copy_(read)
    made[..., columns:] = 0
    if form.bias == "narrow":
        made[..., columns] = 1
    return made.view(-1, made.shape[-1])
