"""Second moments of a convolution's patches: laid out a tile at a time, or from products of pixels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from gradkeep.factors._arithmetic import CACHED, squared, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradkeep.factors._convolution import Convolution


WIDE = 4096
"""A side longer than this keeps its own coordinates: only the diagonal of its moments is made, unless a
linear layer has fewer positions than that (`RowSpace`)."""


def whole(size: int) -> bool:
    """Whether all moments of a side of this length are made."""
    return size <= WIDE


def zeros(groups: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """An empty sum for each group, `[groups, d, d]` or a diagonal `[groups, d]`."""
    shape = (groups, size, size) if whole(size) else (groups, size)
    return torch.zeros(shape, dtype=dtype)


def moment(values: Tensor, like: Tensor) -> Tensor:
    """Sum of v v^T over `[S, d]`, or its diagonal."""
    return values.square().sum(0) if like.dim() == 1 else squared(values)


class PatchMoments:
    """Sums over rows and positions of v v^T of patches v, or of their squares where v is long."""

    def __init__(self, form: Convolution) -> None:
        self.form = form
        self.right = zeros(form.groups, width(form))

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 8 * self.right.numel()

    @staticmethod
    def operations(form: Convolution) -> int:
        """Products a row and group, of which the mirrored ones are not made."""
        return form.positions * width(form) ** 2 * 5 // 8

    def add(self, wide: Tensor) -> None:
        """Add rows `[B, C, *size]`."""
        for groups in by_channels(self.form, wide):
            for into, patches in zip(self.right, groups, strict=True):
                into += moment(patches, into)

    def moments(self) -> Tensor:
        """`[groups, d, d]` or their diagonals `[groups, d]`, columns as the weight's."""
        at = order(self.form)
        return self.right[:, at] if self.right.dim() == 2 else self.right[:, at][:, :, at]


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


_SUMMED = 1 << 14
"""Positions of which float32 sums are added up in float64."""


class ShiftMoments:
    """Sums over rows and positions of v v^T of patches v of a convolution without stride and groups.

    Over all positions that read a pixel at all, the products of two taps only depend on how far the
    taps are apart: half of these correlations are the weight gradient of a convolution of the pixels
    with themselves, S C^2 k (2 k - 1)^(axes - 1) products a row. The positions beside the layer's own
    are then taken off: they read few taps.
    """

    def __init__(self, form: Convolution) -> None:
        self.form = form
        channels = form.channels
        self.near = torch.zeros(channels, channels, *_shifts(form), dtype=torch.float64)
        self.edges = torch.zeros(*(*form.kernel, channels) * 2, dtype=torch.float64)
        self.sums = torch.zeros(1, channels, *form.size, dtype=torch.float64)
        self.rows = 0

    @staticmethod
    def possible(form: Convolution) -> bool:
        """Whether all positions are one pixel apart, and see all channels."""
        return form.groups == 1 and math.prod(form.stride) == 1 and form.positions > 0

    @staticmethod
    def operations(form: Convolution) -> int:
        """Products a row; of the edges, the mirrored ones are not made."""
        near = math.prod(form.size) * form.channels**2 * math.prod(_shifts(form))
        return near + sum(
            math.prod(strip.positions) * (form.channels * math.prod(strip.taps)) ** 2 * 5 // 8
            for strip in _strips(form)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 8 * (self.near.numel() + self.edges.numel() + self.sums.numel())

    def add(self, wide: Tensor) -> None:
        """Add rows `[B, C, *size]`."""
        form = self.form
        self.rows += len(wide)
        self.sums += wide.sum(0)
        # Few positions at a time, each sum of which is one of float32.
        for start, stop in tiles(len(wide), math.prod(form.size), 1, _SUMMED):
            some = wide[start:stop]
            self.near += _correlations(form, some)
            for strip in _strips(form):
                found = squared(strip.patches(some)).view(*(*strip.taps, form.channels) * 2)
                own = (
                    *(slice(low, low + n) for low, n in zip(strip.tap, strip.taps, strict=True)),
                )
                self.edges[*own, :, *own, :] += found

    def moments(self) -> Tensor:
        """`[1, d, d]`, columns as the weight's."""
        form, axes = self.form, len(self.form.size)
        inner, columns = form.channels, form.channels * form.taps
        mirrored = self.near.transpose(0, 1)[:, :, 1:].flip(tuple(range(2, 2 + axes)))
        near = torch.cat([mirrored, self.near], 2).view(inner, inner, -1)
        found = near[:, :, _apart(form)]  # [C, C, taps, taps]
        edges = self.edges.view(form.taps, inner, form.taps, inner)
        found = found.permute(0, 2, 1, 3) - edges.permute(1, 0, 3, 2)
        out = torch.zeros(1, *[columns + (form.bias == "narrow")] * 2, dtype=torch.float64)
        out[0, :columns, :columns] = found.reshape(columns, columns)
        if form.bias == "narrow":
            ones = form.patches(self.sums).flatten(2 + axes).sum(-1).flatten()
            out[0, :columns, columns] = out[0, columns, :columns] = ones
            out[0, columns, columns] = self.rows * form.positions
        return out


@dataclass(frozen=True, slots=True)
class _Strip:
    """Positions beside the layer's own, and the taps that read any pixel there."""

    start: tuple[int, ...]
    positions: tuple[int, ...]
    tap: tuple[int, ...]
    """The first tap."""
    taps: tuple[int, ...]
    form: Convolution

    def patches(self, wide: Tensor) -> Tensor:
        """Those of rows `[B, C, *size]`, by taps and channels, `[B * positions, taps * C]`."""
        amounts: list[int] = []
        for axis, spread in enumerate(self.form.dilation):
            low = self.start[axis] + self.tap[axis] * spread - self.form.padding[axis]
            length = self.positions[axis] + (self.taps[axis] - 1) * spread
            amounts = [-low, low + length - self.form.size[axis], *amounts]
        pixels = F.pad(wide, amounts).movedim(1, -1).contiguous()
        steps = pixels.stride()[1:-1]
        spread_ = [step * far for step, far in zip(steps, self.form.dilation, strict=True)]
        read = pixels.as_strided(
            (len(wide), *self.positions, *self.taps, self.form.channels),
            (pixels.stride(0), *steps, *spread_, 1),
        )
        return read.reshape(-1, math.prod(self.taps) * self.form.channels)


def _strips(form: Convolution) -> Iterator[_Strip]:
    """Every position that is not the layer's own but reads a pixel, once."""
    lows, highs = [], []
    for axis, size in enumerate(form.size):
        far = (form.kernel[axis] - 1) * form.dilation[axis]
        lows.append(min(0, form.padding[axis] - far))
        highs.append(max(form.out[axis], size + form.padding[axis]))
    for axis in range(len(form.size)):
        for low, high in ((lows[axis], 0), (form.out[axis], highs[axis])):
            if low >= high:
                continue
            begins = low - form.padding[axis]
            ends = high - form.padding[axis]
            step, size = form.dilation[axis], form.size[axis]
            reading = [
                tap
                for tap in range(form.kernel[axis])
                if begins + tap * step < size and ends + tap * step > 0
            ]
            if not reading:
                continue
            before, after = form.out[:axis], range(axis + 1, len(form.size))
            yield _Strip(
                start=(*(0 for _ in before), low, *(lows[a] for a in after)),
                positions=(*before, high - low, *(highs[a] - lows[a] for a in after)),
                tap=tuple(reading[0] if a == axis else 0 for a in range(len(form.size))),
                taps=tuple(
                    reading[-1] - reading[0] + 1 if a == axis else taps
                    for a, taps in enumerate(form.kernel)
                ),
                form=form,
            )


def _shifts(form: Convolution) -> tuple[int, ...]:
    """How many ways two taps can be apart, the first axis in one direction only."""
    return (form.kernel[0], *(2 * taps - 1 for taps in form.kernel[1:]))


def _apart(form: Convolution) -> Tensor:
    """Which of all ways `[taps, taps]` every two taps are apart."""
    taps = torch.tensor(list(itertools.product(*map(range, form.kernel))))
    ways = torch.zeros(len(taps), len(taps), dtype=torch.int64)
    for axis, length in enumerate(form.kernel):
        between = taps[None, :, axis] - taps[:, None, axis] + length - 1
        ways = ways * (2 * length - 1) + between
    return ways


def _correlations(form: Convolution, wide: Tensor) -> Tensor:
    """Sums over rows and pixels u of `x[c, u] x[c', u + dilation * shift]`, `[C, C, *shifts]`."""
    amounts: list[int] = []
    for axis, taps in enumerate(form.kernel):
        far = (taps - 1) * form.dilation[axis]
        amounts = [far if axis else 0, far, *amounts]
    axes = len(form.size)
    found: Tensor = torch.ops.aten.convolution_backward(
        wide,
        F.pad(wide, amounts),
        wide.new_empty(1).expand(form.channels, form.channels, *_shifts(form)),
        None,
        [1] * axes,
        [0] * axes,
        form.dilation,
        False,
        [0] * axes,
        1,
        (False, True, False),
    )[1]
    return found
