"""Second moments of a convolution's patches: laid out a tile at a time, or from products of pixels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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


class PixelMoments:
    """Sums over rows of x x^T of pixels as far apart as two taps of one patch.

    The first axis is cut into its lines of K = C / groups * other sizes values: of each, products
    with itself and the next D - 1. The moments of patches are sums of blocks of them. Takes H D K^2
    products a row, and no patch is ever laid out.
    """

    def __init__(self, form: Convolution) -> None:
        self.form = form
        lines, depth, line = _shape(form)
        self.bands = torch.zeros(form.groups, lines, depth, line, line, dtype=torch.float64)
        self.sums = torch.zeros(form.groups, lines, line, dtype=torch.float64)
        self.rows = 0

    @staticmethod
    def operations(form: Convolution) -> int:
        """Products a row and group."""
        lines, depth, line = _shape(form)
        return lines * depth * line * line

    @staticmethod
    def bytes_of(form: Convolution) -> int:
        """Bytes of the sums."""
        return 8 * form.groups * PixelMoments.operations(form)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 8 * (self.bands.numel() + self.sums.numel())

    def add(self, wide: Tensor) -> None:
        """Add rows `[B, C, *size]`."""
        self.rows += len(wide)
        groups, lines, depth, line, _ = self.bands.shape
        x = wide.reshape(len(wide), groups, -1, lines, line * groups // self.form.channels)
        for group in range(groups):
            flat = x[:, group].permute(0, 2, 3, 1).reshape(len(wide), -1)
            self.sums[group] += flat.sum(0).view(lines, line)
            for at in range(lines):
                near = min(depth, lines - at)
                first = flat[:, at * line : (at + 1) * line]
                found = first.t() @ flat[:, at * line : (at + near) * line]
                self.bands[group, at, :near] += found.view(line, near, line).transpose(0, 1)

    def moments(self) -> Tensor:
        """Sums over rows and positions of v v^T `[groups, d, d]`, columns as the weight's."""
        form = self.form
        inner, high = form.channels // form.groups, form.kernel[0]
        rest = _reads(form)
        size = (form.groups, inner, high, len(rest))
        whole = torch.zeros(*size, *size[1:], dtype=torch.float64)
        ones = torch.zeros(size, dtype=torch.float64)
        for a in range(high):
            for b in range(a, high):
                apart = (b - a) * form.dilation[0]
                lines = _lines(form, a, b)
                if apart >= self.bands.shape[2] or not len(lines):
                    continue
                summed = self.bands[:, lines, apart].sum(1)
                summed = summed.view(form.groups, -1, inner, summed.shape[1] // inner, inner)
                for i, one in enumerate(rest):
                    for j, other in enumerate(rest):
                        both = (one >= 0) & (other >= 0)
                        block = summed[:, one[both], :, other[both]].sum(0)
                        whole[:, :, a, i, :, b, j] = block
                        whole[:, :, b, j, :, a, i] = block.mT
            near = self.sums[:, _lines(form, a, a)].sum(1).view(form.groups, -1, inner)
            for i, one in enumerate(rest):
                ones[:, :, a, i] = near[:, one[one >= 0]].sum(1)
        columns = inner * form.taps
        whole = whole.view(form.groups, columns, columns)
        if form.bias != "narrow":
            return whole
        out = torch.zeros(form.groups, columns + 1, columns + 1, dtype=torch.float64)
        out[:, :columns, :columns] = whole
        out[:, :columns, columns] = out[:, columns, :columns] = ones.view(form.groups, columns)
        out[:, columns, columns] = self.rows * form.positions
        return out


def _shape(form: Convolution) -> tuple[int, int, int]:
    """Lines H, how many of them a patch reaches over D, and values of a line K."""
    lines = form.size[0]
    depth = min(lines, (form.kernel[0] - 1) * form.dilation[0] + 1)
    return lines, depth, form.channels // form.groups * math.prod(form.size[1:])


def _tap_places(form: Convolution, axis: int) -> Tensor:
    """Which place `[taps, out]` along an axis each tap reads at each position; -1: outside."""
    taps = torch.arange(form.kernel[axis]).unsqueeze(1) * form.dilation[axis]
    found = torch.arange(form.out[axis]) * form.stride[axis] - form.padding[axis] + taps
    return torch.where((found >= 0) & (found < form.size[axis]), found, -1)


def _lines(form: Convolution, a: int, b: int) -> Tensor:
    """The lines that tap a of the first axis reads where tap b reads one too."""
    places = _tap_places(form, 0)
    return places[a][(places[a] >= 0) & (places[b] >= 0)]


def _reads(form: Convolution) -> Tensor:
    """Which pixel of a line `[taps, positions]` each tap of the other axes reads; -1: outside."""
    found = torch.zeros(1, 1, dtype=torch.int64)
    for axis in range(1, len(form.size)):
        next_ = _tap_places(form, axis)
        joined = found[:, None, :, None] * form.size[axis] + next_[None, :, None, :]
        outside = (found < 0)[:, None, :, None] | (next_ < 0)[None, :, None, :]
        shape = (len(found) * len(next_), found.shape[1] * next_.shape[1])
        found = torch.where(outside, -1, joined).reshape(shape)
    return found


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
