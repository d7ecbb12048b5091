"""Convolutions and transposed ones, 1d to 3d: raw pixels in, the output's gradient out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from gradkeep.capturing.rules._gradients import LayerGradients, by_sample, runs_as
from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._dense import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._gradients import SampleAxis
    from gradkeep.factors._form import Parameter

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TURNED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_convolution(module: nn.Module) -> bool:
    """The convolutions of torch, whatever their stride, padding, dilation and groups."""
    return runs_as(module, *_PLAIN, *_TURNED)


def convolution_gradients(
    name: str,
    module: nn.Module,
    parameters: tuple[Parameter, ...],
    calls: Sequence[LayerCall],
    *,
    rows: int,
    axis: SampleAxis,
) -> LayerGradients:
    """One call: the pixels. Several calls, or several images per sample: their summed gradients."""
    if len(calls) == 1 and axis == "first":
        call = calls[0]
        return _pixels(name, module, parameters, call.input, call.suffix(), call.original)
    total: torch.Tensor | None = None
    for call in calls:
        images, suffixes = by_sample(call.input, rows, axis), by_sample(call.suffix(), rows, axis)
        if axis == "first":
            images, suffixes = images.unsqueeze(1), suffixes.unsqueeze(1)
        for position in range(images.shape[1]):
            one = _pixels(
                name, module, parameters, images[:, position], suffixes[:, position], None
            )
            gradient = one.form.restore(one.rows)
            total = gradient if total is None else total + gradient
    assert total is not None
    form = Dense(parameters, f"{name}.gradient", total.shape[1])
    return LayerGradients(form, DenseRows(total))


def _pixels(
    name: str,
    module: Any,
    parameters: tuple[Parameter, ...],
    images: torch.Tensor,
    suffix: torch.Tensor,
    source: torch.Tensor | None,
) -> LayerGradients:
    images = images.to(suffix.dtype)
    turned = isinstance(module, _TURNED)
    padding = _before(module)
    if module.padding_mode != "zeros":
        # The layer pads its input itself; what it then sees is the input.
        images = F.pad(images, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding, source = (0,) * len(padding), None
    wide, narrow = (suffix, images) if turned else (images, suffix)
    prefix, ending = f"{name}.prefix", f"{name}.suffix"
    form = Convolution(
        parameters,
        wide=ending if turned else prefix,
        narrow=prefix if turned else ending,
        channels=wide.shape[1],
        filters=narrow.shape[1],
        size=tuple(wide.shape[2:]),
        out=tuple(narrow.shape[2:]),
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        padding=padding,
        dilation=tuple(module.dilation),
        groups=module.groups,
        bias=None if len(parameters) == 1 else "wide" if turned else "narrow",
    )
    assert math.prod(parameters[0].shape) <= form.gradient_size
    return LayerGradients(form, ConvolutionRows(wide, narrow), source)


def _before(module: Any) -> tuple[int, ...]:
    """The zeros before the first pixel, per dimension."""
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        pairs = zip(module.dilation, module.kernel_size, strict=True)
        return tuple(dilation * (size - 1) // 2 for dilation, size in pairs)
    return tuple(module.padding)
