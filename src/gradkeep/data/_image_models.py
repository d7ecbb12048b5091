"""Image models: linear layers, convolutions, residual networks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence


class MLP(nn.Module):
    """Linear layers `l1`, `l2`, `l3`, ... with ReLU between them; 85,002 parameters by default.

    Args:
        inputs: Number of input values.
        hidden: Widths of the hidden layers.
        classes: Number of classes.
    """

    def __init__(
        self, *, inputs: int = 64, hidden: Sequence[int] = (256, 256), classes: int = 10
    ) -> None:
        super().__init__()
        for number, (wide, out) in enumerate(pairwise([inputs, *hidden, classes]), 1):
            self.add_module(f"l{number}", nn.Linear(wide, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images of any shape `[N, ...]`.
        """
        x = x.flatten(1)
        for number, layer in enumerate(self.children()):
            x = layer(functional.relu(x) if number else x)
        return x


class CNN(nn.Module):
    """Two convolutions, `conv1` and `conv2`, and a linear layer `fc`; 29,066 parameters by default.

    Args:
        width: Filters of the first convolution; the second has twice as many.
        channels: Channels of the images.
        side: Height and width of the images.
        classes: Number of classes.
    """

    def __init__(
        self, *, width: int = 32, channels: int = 1, side: int = 8, classes: int = 10
    ) -> None:
        super().__init__()
        self.channels, self.side = channels, side
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * (side // 2) ** 2, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images `[N, C, H, W]`, or flat `[N, C * H * W]`.
        """
        x = x.reshape(-1, self.channels, self.side, self.side)
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits


# Multiples of the width, for each convolution; the image is halved after each group.
_GROUPS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class VGG16(nn.Module):
    """`conv1` to `conv13`, each with `bn1` to `bn13`, then `l1`, the names that MetaStore uses.

    Args:
        classes: Number of classes.
        width: Filters of the first convolution.
        hidden: Widths of linear layers before the last one: with two of them, `l3` gives the logits.
    """

    def __init__(self, *, classes: int = 10, width: int = 64, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        widths = [3, *(width * times for group in _GROUPS for times in group)]
        for number, (wide, out) in enumerate(pairwise(widths), 1):
            self.add_module(f"conv{number}", nn.Conv2d(wide, out, 3, padding=1))
            self.add_module(f"bn{number}", nn.BatchNorm2d(out))
        self.linears = len(hidden) + 1
        for number, (wide, out) in enumerate(pairwise([widths[-1], *hidden, classes]), 1):
            self.add_module(f"l{number}", nn.Linear(wide, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images `[N, 3, 32, 32]`.
        """
        number = 0
        for group in _GROUPS:
            for _ in group:
                number += 1
                x = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(x))
                x = functional.relu(x)
            x = functional.max_pool2d(x, 2)
        x = x.flatten(1)
        for number in range(1, self.linears + 1):
            x = self.get_submodule(f"l{number}")(functional.relu(x) if number > 1 else x)
        return x


BLOCKS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""Blocks per stage of residual networks for large images."""


class PaddedShortcut(nn.Module):
    """Shortcut without parameters: every other pixel, and zeros for new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.new, self.stride = outputs - inputs, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.new // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, half, self.new - half))


def _padded(inputs: int, outputs: int, stride: int) -> nn.Module:
    return PaddedShortcut(inputs, outputs, stride) if stride != 1 else nn.Identity()


def project_shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3, added to their input."""

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inside + self.shortcut(x))


class Bottleneck(nn.Module):
    """Narrow, 3 x 3, wide again, added to the input; `inplace` saves the memory of two results."""

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        shortcut: nn.Module | None = None,
        *,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        outputs = 4 * width
        self.inplace = inplace
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        # Created last, so that a seed keeps giving the same weights.
        self.downsample = (
            project_shortcut(inputs, outputs, stride) if shortcut is None else shortcut
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = functional.relu(self.bn1(self.conv1(x)), inplace=self.inplace)
        inside = functional.relu(self.bn2(self.conv2(inside)), inplace=self.inplace)
        return functional.relu(self.bn3(self.conv3(inside)) + self.downsample(x))


def thin_stage(inputs: int, width: int, blocks: int) -> list[nn.Module]:
    """Build blocks with parameter-free shortcuts; the first one halves the image if it widens it."""
    stage: list[nn.Module] = []
    for _ in range(blocks):
        stride = 1 if inputs == width else 2
        stage.append(BasicBlock(inputs, width, stride, _padded(inputs, width, stride)))
        inputs = width
    return stage


class ResNet20(nn.Module):
    """`conv1`, `layer1` to `layer3` with blocks 0 to 2, `fc`; 269,722 parameters by default.

    Args:
        classes: Number of classes.
        width: Filters of the first stage.
    """

    def __init__(self, *, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(*thin_stage(width, width, 3))
        self.layer2 = nn.Sequential(*thin_stage(width, 2 * width, 3))
        self.layer3 = nn.Sequential(*thin_stage(2 * width, 4 * width, 3))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images `[N, 3, H, W]`.
        """
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


class _ResNet50Base(nn.Module):
    """All but the last layer: images `[N, 3, H, W]` to features `[N, 32 * width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(BLOCKS["resnet50"]):
            narrow = width * 2**stage
            blocks = []
            for number in range(count):
                blocks.append(Bottleneck(inputs, narrow, 2 if stage and not number else 1))
                inputs = 4 * narrow
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for stage in range(1, len(BLOCKS["resnet50"]) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x.mean((2, 3))


class ResNet50(nn.Module):
    """ResNet-50 for large images, with the names of torchvision and MetaStore: `model_base.layer4.2.conv2`, `l1`.

    25,557,032 parameters by default.

    Args:
        classes: Number of classes.
        width: Filters of the first convolution.
    """

    def __init__(self, *, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.model_base = _ResNet50Base(width)
        self.l1 = nn.Linear(32 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images `[N, 3, H, W]`.
        """
        logits: torch.Tensor = self.l1(self.model_base(x))
        return logits


class _NamedConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn(self.conv(x)))


class ResNet9(nn.Module):
    """Eight convolutions, two pairs of them residual, and `fc`; 6,573,130 parameters by default.

    A small residual network that trains on CIFAR-10 in few epochs.

    Args:
        classes: Number of classes.
        width: Filters of the first convolution.
    """

    def __init__(self, *, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.prep = _NamedConvolution(3, width)
        self.layer1 = _NamedConvolution(width, 2 * width)
        self.residual1 = nn.Sequential(*(_NamedConvolution(2 * width, 2 * width) for _ in range(2)))
        self.layer2 = _NamedConvolution(2 * width, 4 * width)
        self.layer3 = _NamedConvolution(4 * width, 8 * width)
        self.residual3 = nn.Sequential(*(_NamedConvolution(8 * width, 8 * width) for _ in range(2)))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, classes]`.

        Args:
            x: Images `[N, 3, H, W]`, with sides of at least 8.
        """
        x = functional.max_pool2d(self.layer1(self.prep(x)), 2)
        x = x + self.residual1(x)
        x = functional.max_pool2d(self.layer2(x), 2)
        x = functional.max_pool2d(self.layer3(x), 2)
        x = x + self.residual3(x)
        logits: torch.Tensor = self.fc(x.amax((2, 3)))
        return logits
