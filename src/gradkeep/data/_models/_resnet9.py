"""ResNet-9, the small residual network that trains on CIFAR-10 in few epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    import torch


class _Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn(self.conv(x)))


class ResNet9(nn.Module):
    """Eight convolutions, two pairs of them residual, and `fc`; 6,573,130 parameters as it is."""

    def __init__(self, *, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.prep = _Convolution(3, width)
        self.layer1 = _Convolution(width, 2 * width)
        self.residual1 = nn.Sequential(*(_Convolution(2 * width, 2 * width) for _ in range(2)))
        self.layer2 = _Convolution(2 * width, 4 * width)
        self.layer3 = _Convolution(4 * width, 8 * width)
        self.residual3 = nn.Sequential(*(_Convolution(8 * width, 8 * width) for _ in range(2)))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[N, classes]` of pictures `[N, 3, H, W]`, sides at least 8."""
        x = functional.max_pool2d(self.layer1(self.prep(x)), 2)
        x = x + self.residual1(x)
        x = functional.max_pool2d(self.layer2(x), 2)
        x = functional.max_pool2d(self.layer3(x), 2)
        x = x + self.residual3(x)
        logits: torch.Tensor = self.fc(x.amax((2, 3)))
        return logits
