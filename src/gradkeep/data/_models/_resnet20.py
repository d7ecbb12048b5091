"""ResNet-20 for CIFAR: three stages of three blocks, shortcuts without parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from gradkeep.data._zoo._resnets import PaddedShortcut

if TYPE_CHECKING:
    import torch


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        same: nn.Module = nn.Identity()
        self.shortcut = same if stride == 1 else PaddedShortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inside + self.shortcut(x))


class ResNet20(nn.Module):
    """`conv1`, `layer1` to `layer3` with blocks 0 to 2, `fc`; 269,722 parameters as it is."""

    def __init__(self, *, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(*(_Block(width, width) for _ in range(3)))
        self.layer2 = _stage(width, 2 * width)
        self.layer3 = _stage(2 * width, 4 * width)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[N, classes]` of pictures `[N, 3, H, W]`."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(_Block(inputs, width), _Block(width, width), _Block(width, width))
