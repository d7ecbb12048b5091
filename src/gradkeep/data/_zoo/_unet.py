"""U-Net: down four times, up four times, with a bridge at each level."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from gradkeep.data._zoo._images import convolution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _UNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        # The deepest level is no wider than the one above: going up by interpolation adds no
        # channels of its own.
        widths.append(widths[-1])
        self.first = _twice(3, widths[0])
        self.down = nn.ModuleList(_twice(*pair) for pair in itertools.pairwise(widths))
        above = [*widths[2::-1], widths[0]]
        self.up = nn.ModuleList(
            _twice(2 * width, target)
            for width, target in zip(reversed(widths[:-1]), above, strict=True)
        )
        self.last = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.first(x)]
        for layers in self.down:
            levels.append(layers(functional.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for layers in self.up:
            beside = levels.pop()
            # To the size of the other side of the bridge: it may be odd.
            x = functional.interpolate(
                x, size=beside.shape[-2:], mode="bilinear", align_corners=True
            )
            x = layers(torch.cat([beside, x], 1))
        made: torch.Tensor = self.last(x)
        return made


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Finds a mask in random pictures."""
    model = _UNet(int(sizes["channels"]))
    batch, height, width = (int(sizes[key]) for key in ("batch_size", "height", "width"))
    images = torch.randn(batch, 3, height, width)
    masks = torch.rand(batch, 1, height, width)
    return model, lambda: functional.binary_cross_entropy_with_logits(model(images), masks)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(convolution(inputs, outputs, 3), convolution(outputs, outputs, 3))
