"""ResNet-50 for large pictures, its layers named as torchvision and MetaStore name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    import torch

_BLOCKS = (3, 4, 6, 3)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = functional.relu(self.bn1(self.conv1(x)))
        inside = functional.relu(self.bn2(self.conv2(inside)))
        return functional.relu(self.bn3(self.conv3(inside)) + self.downsample(x))


class _Base(nn.Module):
    """Everything but the last layer: pictures `[N, 3, H, W]` to features `[N, 32 * width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(_BLOCKS):
            narrow = width * 2**stage
            blocks = []
            for number in range(count):
                blocks.append(_Bottleneck(inputs, narrow, 2 if stage and not number else 1))
                inputs = 4 * narrow
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for stage in range(1, len(_BLOCKS) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean((2, 3))


class ResNet50(nn.Module):
    """`model_base.layer4.2.conv2` and the like, then `l1`; 25,557,032 parameters as it is."""

    def __init__(self, *, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.model_base = _Base(width)
        self.l1 = nn.Linear(32 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[N, classes]` of pictures `[N, 3, H, W]`."""
        logits: torch.Tensor = self.l1(self.model_base(x))
        return logits
