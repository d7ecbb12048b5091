"""Gradients of a convolution's kernel by torch's own backward pass, for a batch or for every row.

For every row it is one call as well: a batch of B images is one image with B groups, whose kernels' gradients
are those of the rows. If channels fill the processor's vectors that costs little more than the gradient of
the batch, and no patches are built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradkeep.factors._arithmetic import tiles

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.factors._convolution import Convolution, ConvolutionRows

_LANES = 8
_HALF_LARGE, _MANY = 96 << 10, 16
"""Bytes of a kernel above which patches are as fast unless positions are this many times its
taps."""


def kernel_gradient(form: Convolution, image: Tensor, narrow: Tensor) -> Tensor:
    """Return the gradient `[D, C / groups, *kernel]` of padded images and their narrow arrays."""
    axes = len(form.size)
    return _backward(form, image, narrow, form.groups, [0] * axes)


def rows_can_be_groups(form: Convolution, rows: ConvolutionRows) -> bool:
    """Return True if computing the kernels of all rows at once is faster than patches.

    The choice depends on the shape alone, so that a resumed capture stores the same bytes.
    """
    channels, filters = form.channels, form.filters
    many = form.positions >= _MANY * form.taps
    # Fewer than 8 channels do not fill vectors; for kernels of more bytes patches are as fast.
    return (
        len(form.size) == 2
        and form.groups == 1
        and min(channels, filters) >= 8
        and channels % _LANES == filters % _LANES == 0
        and 4 * form.weight_size <= (160 << 10 if many else _HALF_LARGE)
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
