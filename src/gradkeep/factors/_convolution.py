"""Convolutions: sums over taps of products of shifted pixels and positions.

Gradients of kernels are computed by torch's own backward pass, for a batch or for every row. For every row it is
one call as well: a batch of B images is one image with B groups, whose kernels' gradients are those of the rows.
If channels fill the processor's vectors that costs little more than the gradient of the batch, and no patches are
built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradkeep.factors._arithmetic import CACHED, squared_lengths, tiles
from gradkeep.factors._form import Compute, FactoredForm, GradientRows, OuterProducts, Parameter
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._pixel_gram import (
    norm_passes,
    pixel_gram,
    pixel_norms,
)
from gradkeep.factors._weights import WeightBlock, WeightMatrix, WeightVector

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionRows(GradientRows):
    """Raw pixels of B rows."""

    wide: Tensor
    """`[B, C, *size]`"""
    narrow: Tensor
    """`[B, D, *out]`"""

    @property
    def positions(self) -> float:
        """Number of positions of all rows together."""
        return float(self.narrow[:, 0].numel())


@dataclass(frozen=True, slots=True)
class Convolution(FactoredForm[ConvolutionRows]):
    """Convolutions: `W[d, c, a]` = sum over i of `narrow[d, i] * wide[c, stride*i + dilation*a - padding]`.

    For a convolution the wide array is the input `[C, *size]` and the narrow one the output's gradient `[D, *out]`;
    for a transposed one they are swapped. Positions outside of `wide` count as zero. With groups, `c` runs over
    the channels of the group of `d`: the weight is `[D, C / groups, *kernel]`.
    """

    kind: ClassVar[str] = "conv"
    computes: ClassVar[tuple[Compute, ...]] = ("factored", "gram", "half", "restored")
    rows_type: ClassVar[type[Any]] = ConvolutionRows
    parameters: tuple[Parameter, ...]
    wide: str
    narrow: str
    channels: int
    """C, the channels of the wide array."""
    filters: int
    """D, the channels of the narrow array."""
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros before the first position of the wide array; those after it follow from `out`."""
    dilation: tuple[int, ...]
    groups: int = 1
    bias: Literal["narrow", "wide"] | None = None
    """Array that is summed over its positions for the gradient of the bias."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the factors."""
        return (self.wide, self.narrow)

    @property
    def positions(self) -> int:
        """T, the number of positions of the narrow array."""
        return math.prod(self.out)

    @property
    def taps(self) -> int:
        """Number of offsets of the kernel."""
        return math.prod(self.kernel)

    @property
    def weight_size(self) -> int:
        """Number of values of the weight."""
        return self.filters * (self.channels // self.groups) * self.taps

    @property
    def restored_size(self) -> int:
        """P, the bias included."""
        bias = {"narrow": self.filters, "wide": self.channels, None: 0}[self.bias]
        return self.weight_size + bias

    @property
    def transposed(self) -> bool:
        """True for a transposed convolution, whose patches are those of the suffix."""
        return self.wide.endswith("suffix")

    def as_outer(
        self, rows: ConvolutionRows, *, prefix: str, suffix: str
    ) -> tuple[Outer, OuterRows] | None:
        """Return a linear layer on patches, if there is one group and the bias reads the same positions."""
        if self.groups > 1 or self.bias == "wide" or self.positions == 1:
            return None
        linear, (only,) = self.unfolded(rows)
        return replace(linear, parameters=self.parameters, prefix=prefix, suffix=suffix), only

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return a matrix for each group, with the bias as last column or separate."""
        inner = self.channels // self.groups * self.taps
        high = self.filters // self.groups
        if self.bias == "narrow":
            return (WeightMatrix(self.groups, high, inner + 1, bias=self.weight_size),)
        weight = WeightMatrix(self.groups, high, inner)
        if self.bias == "wide":
            return (weight, WeightVector(self.channels, self.weight_size))
        return (weight,)

    def products(
        self, queries: ConvolutionRows, train: ConvolutionRows, compute: Compute, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]`, by patches or by the Gram matrix of pixels."""
        if compute == "gram":
            out = pixel_gram(self, queries, train, scratch=scratch)
        else:
            out = self._patch_products(queries, train, scratch=scratch)
        if self.bias == "wide":
            out += self._sums(queries) @ self._sums(train).t()
        return out

    def _patch_products(
        self, queries: ConvolutionRows, train: ConvolutionRows, *, scratch: int
    ) -> Tensor:
        """Return inner products `[Q, N]` of patches, as of a linear layer on them.

        2 T^2 (C / groups * taps + D / groups) operations per pair and group.
        """
        out = train.wide.new_zeros(len(queries), len(train))
        for first, last in self._tiles(queries, scratch // 3):
            linear, ours = self.unfolded(queries.take(first, last))
            for start, stop in self._tiles(train, scratch // 3):
                theirs = self.unfolded(train.take(start, stop))[1]
                for one, other in zip(ours, theirs, strict=True):
                    out[first:last, start:stop] += linear.products(
                        one, other, "factored", scratch=scratch // 3
                    )
        return out

    def restore(self, rows: ConvolutionRows) -> Tensor:
        """Return gradients `[B, P]`: for each row and group, the narrow array times the patches.

        2 T D C / groups * taps operations per row.
        """
        count, groups = len(rows), self.groups
        weights = self.weight_size
        out = rows.wide.new_empty(count, self.restored_size)
        narrow = rows.narrow.reshape(count, groups, self.filters // groups, self.positions)
        inner = self.channels // groups * self.taps
        into = out[:, :weights].view(count, groups, narrow.shape[2], inner)
        if rows_can_be_groups(self, rows):
            row_gradients(self, rows, out[:, :weights])
        else:
            # One tile of patches at a time, which stays in the cache.
            for start, stop in self._tiles(rows, CACHED):
                read, some = self.columns(rows.wide[start:stop]), narrow[start:stop]
                if inner % 16 and some.shape[2] % 16 == 0:
                    # Products whose last side is a multiple of 16 are faster.
                    into[start:stop] = (read @ some.mT).mT
                else:
                    torch.matmul(some, read.mT, out=into[start:stop])
        if self.bias is not None:
            out[:, weights:] = self._sums(rows)
        return out

    def between(
        self, rows: ConvolutionRows, block: WeightBlock, row_vectors: Tensor, col_vectors: Tensor
    ) -> Tensor:
        """Return L^T W R `[B, G, r, c]` of restored rows, or by convolution, whichever is less work.

        With many positions rows are restored first, and multiplied once instead of T times.
        """
        if isinstance(block, WeightVector):
            sums = self._sums(rows)
            return (sums @ row_vectors[0].to(sums.dtype))[:, None, :, None] * col_vectors[0].to(
                sums.dtype
            )
        groups, dtype = self.groups, rows.wide.dtype
        inner, high = self.channels // groups, self.filters // groups
        high_size, wide = row_vectors.shape[2], col_vectors.shape[2]
        positions, cols = self.positions, col_vectors.shape[1]
        moved_first = positions * (cols * wide + high * high_size + high_size * wide)
        if high * cols * (positions + wide) + high * high_size * wide < moved_first:
            return FactoredForm.between(self, rows, block, row_vectors, col_vectors)
        sides = col_vectors.mT.to(dtype)
        filters = sides[:, :, : inner * self.taps].reshape(groups * wide, inner, *self.kernel)
        ones = sides[:, :, -1].reshape(-1) if self.bias == "narrow" else None
        out = rows.wide.new_empty(len(rows), groups, high_size, wide)
        values = groups * wide * self.positions + self.padded_values
        for start, stop in tiles(len(rows), values, rows.wide.element_size(), 2 * CACHED):
            count = stop - start
            moved = _CONVOLVE[len(self.size)](
                self.padded(rows.wide[start:stop]),
                filters,
                ones,
                stride=self.stride,
                dilation=self.dilation,
                groups=groups,
            )
            g = rows.narrow[start:stop].reshape(count, groups, high, self.positions)
            rotated = row_vectors.mT.to(dtype) @ g
            out[start:stop] = rotated @ moved.reshape(count, groups, wide, -1).mT
        return out

    def squared_norms(self, rows: ConvolutionRows) -> Tensor:
        """Return squared norms `[B]`, from products of pixels or restored rows, whichever is less work.

        The choice depends on the shape alone, so that a resumed capture stores the same bytes.
        """
        products, touched = norm_passes(self)
        # Reading a value takes as long as 40 operations; writing and reading one of a gradient, 120.
        if products + 40 * touched >= self.weight_size * (2 * self.positions + 120):
            return FactoredForm.squared_norms(self, rows)
        out, certain = pixel_norms(self, rows)
        if self.bias == "wide":
            out += squared_lengths(self._sums(rows))
        if not certain.all():
            uncertain = (~certain).nonzero()[:, 0]
            some = ConvolutionRows(rows.wide[uncertain], rows.narrow[uncertain])
            out[uncertain] = FactoredForm.squared_norms(self, some)
        return out

    def weighted_sum(self, rows: ConvolutionRows, weights: Tensor) -> Tensor:
        """Return weighted sums `[K, P]`: the weight gradient of a batch whose narrow arrays are scaled.

        2 B T D C / groups * taps operations for each of K, or once if no row is in two sums.
        """
        out = rows.wide.new_zeros(len(weights), self.restored_size)
        sums = None if self.bias is None else self._sums(rows)
        wide = self.padded(rows.wide)
        for one, into in zip(weights, out, strict=True):
            chosen = one.nonzero()[:, 0]
            if len(chosen) == 0:
                continue
            share, image, narrow = one[chosen], wide, rows.narrow
            if len(chosen) < len(one):
                image, narrow = image[chosen], narrow[chosen]
            if sums is not None:
                into[self.weight_size :] = share @ sums[chosen]
            scaled = narrow * share.view(-1, *[1] * (narrow.dim() - 1))
            into[: self.weight_size] = kernel_gradient(self, image, scaled).flatten()
        return out

    def half(self, rows: ConvolutionRows, directions: Tensor, *, scratch: int) -> Tensor:
        """Return products `[K, B]` with dense directions W `[K, P]`: the convolution with W, times the narrow array.

        2 K T D C / groups * taps operations per row, without a gradient.
        """
        groups, count = self.groups, len(directions)
        out = rows.wide.new_zeros(count, len(rows))
        item = rows.wide.element_size()
        free_bytes = scratch // 4 // (item * self.weight_size)
        kinds = min(scratch // 4, CACHED) // (item * self.filters * self.positions)
        kinds = max(1, min(count, kinds, free_bytes))
        shape = (groups, self.filters // groups, self.channels // groups, *self.kernel)
        for first in range(0, count, kinds):
            kernel = directions[first : first + kinds, : self.weight_size].view(-1, *shape)
            some = len(kernel)
            kernel = kernel.transpose(0, 1).reshape(-1, *shape[2:])
            values = some * self.filters * self.positions + self.padded_values
            for start, stop in tiles(len(rows), values, item, min(scratch // 2, 4 * CACHED)):
                moved = _CONVOLVE[len(self.size)](
                    self.padded(rows.wide[start:stop]),
                    kernel,
                    stride=self.stride,
                    dilation=self.dilation,
                    groups=groups,
                )
                moved = moved.reshape(stop - start, groups, some, -1)
                narrow = rows.narrow[start:stop].reshape(stop - start, groups, 1, -1)
                out[first : first + some, start:stop] = moved.mul_(narrow).sum((1, 3)).t()
        if self.bias is not None:
            out += directions[:, self.weight_size :] @ self._sums(rows).t()
        return out

    def temporaries(self, rows: ConvolutionRows) -> int:
        """Return the temporary values per row while it is restored: its patches, and the padded array."""
        return self.patch_values + self.padded_values

    def _sums(self, rows: ConvolutionRows) -> Tensor:
        """Return the gradients of the bias."""
        return (rows.wide if self.bias == "wide" else rows.narrow).flatten(2).sum(2)

    def _tiles(self, rows: ConvolutionRows, scratch: int) -> list[tuple[int, int]]:
        """Return ranges of rows whose patches, twice while they are built, fit."""
        values = 2 * self.patch_values
        return list(tiles(len(rows), values, rows.wide.element_size(), scratch))

    def padded(self, wide: Tensor) -> Tensor:
        """Pad the wide array with zeros, and cut it after the last position that is read."""
        amounts: list[int] = []
        for length, size, before in zip(self.reach, self.size, self.padding, strict=True):
            amounts = [before, max(0, length - size - before), *amounts]
        if any(amounts):
            wide = F.pad(wide, amounts)
        for axis, length in enumerate(self.reach, start=2):
            wide = wide.narrow(axis, 0, length)
        return wide

    @property
    def reach(self) -> list[int]:
        """Size of the padded array, up to the last position that is read."""
        return [
            (out - 1) * step + (taps - 1) * spread + 1
            for out, step, taps, spread in zip(
                self.out, self.stride, self.kernel, self.dilation, strict=True
            )
        ]

    def patches(self, wide: Tensor) -> Tensor:
        """Return a view `[B, C, *kernel, *out]` of the padded array: what each tap reads at each position."""
        whole = self.padded(wide)
        axes = range(2, whole.dim())
        taps = [whole.stride(axis) * self.dilation[axis - 2] for axis in axes]
        steps = [whole.stride(axis) * self.stride[axis - 2] for axis in axes]
        shape = (*whole.shape[:2], *self.kernel, *self.out)
        return whole.as_strided(shape, (*whole.stride()[:2], *taps, *steps))

    def columns(self, wide: Tensor) -> Tensor:
        """Return patches as matrices `[B, groups, C / groups * taps, T]`."""
        shape = (len(wide), self.groups, self.channels // self.groups * self.taps, self.positions)
        return self.patches(wide).reshape(shape)

    def unfolded(self, rows: ConvolutionRows) -> tuple[Outer, list[OuterRows]]:
        """Return the convolution as a linear layer on patches, one per group, with T positions per row."""
        count, groups, length = len(rows), self.groups, self.positions
        inner, outer = self.channels // groups, self.filters // groups
        linear = Outer((), "", "", inner * self.taps, outer, bias=self.bias == "narrow")
        axes = len(self.size)
        order = [0, *range(2 + axes, 2 + 2 * axes), 1, *range(2, 2 + axes)]
        x = self.patches(rows.wide).permute(order).reshape(count * length, groups, -1)
        g = rows.narrow.flatten(2).transpose(1, 2).reshape(count * length, groups, outer)
        offsets = torch.arange(count + 1) * length
        return linear, [OuterRows(x[:, i], g[:, i], offsets) for i in range(groups)]

    @property
    def patch_values(self) -> int:
        """Number of values of a row's patches."""
        return self.channels * self.taps * self.positions + self.filters * self.positions

    @property
    def padded_values(self) -> int:
        """Number of values of a row's padded array."""
        lengths = zip(self.reach, self.size, self.padding, strict=True)
        return self.channels * math.prod(max(long, size + before) for long, size, before in lengths)

    def outer_products(self, rows: ConvolutionRows, *, scratch: int) -> Iterator[OuterProducts]:
        """Yield for each group the narrow array times patches, some rows at a time."""
        for start, stop in tiles(
            len(rows), 2 * self.patch_values, rows.wide.element_size(), scratch
        ):
            _, groups = self.unfolded(rows.take(start, stop))
            for number, group in enumerate(groups):
                first = number * group.g.shape[1]
                yield OuterProducts(start, group.x, group.spans, row_factor=group.g, first=first)

    def bias_gradients(self, rows: ConvolutionRows) -> Tensor | None:
        """Return `[B, D]` or, for a transposed convolution, `[B, C]`; None without a bias."""
        return None if self.bias is None else self._sums(rows)


def kernel_gradient(form: Convolution, image: Tensor, narrow: Tensor) -> Tensor:
    """Return the gradient `[D, C / groups, *kernel]` of padded images and their narrow arrays."""
    axes = len(form.size)
    return _backward(form, image, narrow, form.groups, [0] * axes)


def rows_can_be_groups(form: Convolution, rows: ConvolutionRows) -> bool:
    """Return True if computing the kernels of all rows at once is faster than patches.

    The choice depends on the shape alone, so that a resumed capture stores the same bytes.
    """
    channels, filters = form.channels, form.filters
    # Channels fill vectors of 8 numbers. For larger kernels patches are as fast, unless there are
    # many times as many positions as taps.
    most_bytes = 160 << 10 if form.positions >= 16 * form.taps else 96 << 10
    return (
        len(form.size) == 2
        and form.groups == 1
        and min(channels, filters) >= 8
        and channels % 8 == filters % 8 == 0
        and 4 * form.weight_size <= most_bytes
        and form.positions >= 2 * form.taps
        and rows.wide.device.type == "cpu"
        and rows.wide.dtype == rows.narrow.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def row_gradients(form: Convolution, rows: ConvolutionRows, into: Tensor) -> None:
    """Write the kernel's gradient of each row into `[B, D * C * taps]`.

    2 T D C taps operations per row.
    """
    sizes = zip(form.size, form.padding, form.reach, strict=True)
    plain = all(
        size + 2 * zeros - length in range(step)
        for (size, zeros, length), step in zip(sizes, form.stride, strict=True)
    )  # torch pads both sides equally
    # Bytes of kernels that one call writes: more leave the cache.
    for start, stop in tiles(len(rows), form.weight_size, 4, 1 << 20):
        wide, narrow = rows.wide[start:stop], rows.narrow[start:stop]
        wide = wide if plain else form.padded(wide)
        count = stop - start
        gradients = _backward(
            form,
            wide.reshape(1, count * form.channels, *wide.shape[2:]),
            narrow.reshape(1, count * form.filters, *form.out),
            count,
            list(form.padding) if plain else [0, 0],
        )
        into[start:stop] = gradients.view(count, form.weight_size)


def _backward(
    form: Convolution, image: Tensor, narrow: Tensor, groups: int, padding: list[int]
) -> Tensor:
    shape = (narrow.shape[1], image.shape[1] // groups, *form.kernel)
    gradients = torch.ops.aten.convolution_backward(
        narrow,
        image,
        narrow.new_empty(1).expand(shape),
        None,
        form.stride,
        padding,
        form.dilation,
        False,
        [0] * len(form.size),
        groups,
        (False, True, False),
    )
    weight: Tensor = gradients[1]
    return weight
