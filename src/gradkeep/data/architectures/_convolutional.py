"""Workloads of pictures: densely connected networks and U-Net."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def classify(model: nn.Module, sizes: Mapping[str, int | float]) -> Callable[[], torch.Tensor]:
    """The loss of a classifier on random pictures with random labels."""
    batch, height, width, classes = (
        int(sizes[key]) for key in ("batch_size", "height", "width", "classes")
    )
    images = torch.randn(batch, 3, height, width)
    labels = torch.randint(classes, (batch,))
    return lambda: functional.cross_entropy(model(images), labels)


def convolution(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    valid: bool = False,
) -> nn.Sequential:
    """Convolution, batch normalization, ReLU; the size is kept unless `valid` or strided."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (0, 0) if valid else (sides[0] // 2, sides[1] // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


@dataclass(frozen=True, slots=True)
class _DenseNetSizes:
    growth: int
    blocks: tuple[int, ...]
    first: int
    """Channels after the first convolution."""


_DENSENETS = {
    "densenet100": _DenseNetSizes(12, (16, 16, 16), 24),
    "densenet121": _DenseNetSizes(32, (6, 12, 24, 16), 64),
    "densenet161": _DenseNetSizes(48, (6, 12, 36, 24), 96),
    "densenet169": _DenseNetSizes(32, (6, 12, 32, 32), 64),
    "densenet201": _DenseNetSizes(32, (6, 12, 48, 32), 64),
}


class _DenseLayer(nn.Module):
    """New channels, made from all channels so far and put beside them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], 1)


def densenet_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """`densenet100` is for 32 x 32 pictures, the others begin with a stride of four."""
    plan = _DENSENETS[name]
    channels = plan.first
    layers: list[nn.Module] = []
    if name == "densenet100":
        layers.append(nn.Conv2d(3, channels, 3, padding=1, bias=False))
    else:
        layers += [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
    for number, count in enumerate(plan.blocks):
        if number:
            half = channels // 2
            layers += [
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, half, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            channels = half
        for _ in range(count):
            layers.append(_DenseLayer(channels, plan.growth))
            channels += plan.growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, int(sizes["classes"])))
    return model, classify(model, sizes)


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


def unet_workload(
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
