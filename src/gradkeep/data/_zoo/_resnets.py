"""Residual networks: the thin ones for 32 x 32 pictures and the wide ones for large pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from gradkeep.data._zoo._images import classify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WIDE = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}


class PaddedShortcut(nn.Module):
    """No parameters: every other pixel, and zeros for the channels that are new."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.new, self.stride = outputs - inputs, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.new // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, half, self.new - half))


class _Block(nn.Module):
    """The layers of a block, added to their input."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.layers, self.shortcut = layers, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """`resnet20` to `resnet1202` have 6n + 2 layers in three stages, the others four stages."""
    classes = int(sizes["classes"])
    model = _wide(name, classes) if name in _WIDE else _thin(int(name[6:]), classes)
    return model, classify(model, sizes)


def _thin(depth: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = 1 if inputs == width else 2
            same: nn.Module = nn.Identity()
            shortcut = same if stride == 1 else PaddedShortcut(inputs, width, stride)
            layers.append(_Block(_basic(inputs, width, stride), shortcut))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def _wide(name: str, classes: int) -> nn.Module:
    bottleneck = name not in ("resnet18", "resnet34")
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = 64
    for stage, count in enumerate(_WIDE[name]):
        width = 64 * 2**stage
        outputs = width * 4 if bottleneck else width
        for number in range(count):
            stride = 2 if stage and number == 0 else 1
            shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != outputs:
                shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
            inside = _narrow(inputs, width, outputs, stride) if bottleneck else None
            layers.append(_Block(inside or _basic(inputs, width, stride), shortcut))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _basic(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
    )


def _narrow(inputs: int, width: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, stride, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )
