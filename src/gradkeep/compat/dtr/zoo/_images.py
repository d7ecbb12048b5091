"""Image workloads: residual and dense networks as chains of layers, a U-Net, a GAN.

A chain (`nn.Sequential`) can be cut anywhere, as checkpointing in segments requires.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from gradkeep.data._image_models import (
    BLOCKS,
    BasicBlock,
    Bottleneck,
    project_shortcut,
    thin_stage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def classify(model: nn.Module, sizes: Mapping[str, int | float]) -> Callable[[], torch.Tensor]:
    """Return the loss of a classifier on random images with random labels."""
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
    """Concatenate new channels, computed from all channels so far."""

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
    """Build a DenseNet; `densenet100` is for 32 x 32 images, the others begin with a stride of four."""
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
            # Interpolate to the size of the skip connection, which may be odd.
            x = functional.interpolate(
                x, size=beside.shape[-2:], mode="bilinear", align_corners=True
            )
            x = layers(torch.cat([beside, x], 1))
        output: torch.Tensor = self.last(x)
        return output


def unet_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a U-Net that segments random images."""
    model = _UNet(int(sizes["channels"]))
    batch, height, width = (int(sizes[key]) for key in ("batch_size", "height", "width"))
    images = torch.randn(batch, 3, height, width)
    masks = torch.rand(batch, 1, height, width)
    return model, lambda: functional.binary_cross_entropy_with_logits(model(images), masks)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(convolution(inputs, outputs, 3), convolution(outputs, outputs, 3))


class _UnrolledGan(nn.Module):
    """The generator's loss after the discriminator's next steps, which stay in the graph."""

    def __init__(self, noise: int, generator: int, discriminator: int, steps: int) -> None:
        super().__init__()
        self.generator = _three_layers(noise, generator, 2)
        self.discriminator = _three_layers(2, discriminator, 1)
        self.steps = steps

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        weights: dict[str, torch.Tensor] = dict(self.discriminator.named_parameters())
        for _ in range(self.steps):
            loss = self._judged(weights, real, 1.0) + self._judged(weights, fake, 0.0)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: value - 0.1 * slope
                for (name, value), slope in zip(weights.items(), slopes, strict=True)
            }
        return self._judged(weights, fake, 1.0)

    def _judged(
        self, weights: dict[str, torch.Tensor], points: torch.Tensor, truth: float
    ) -> torch.Tensor:
        scores = functional_call(self.discriminator, weights, (points,))
        return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))


def gan_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a GAN that learns a mixture of eight Gaussians on a circle."""
    batch, noise_dim, generator, discriminator, steps = (
        int(sizes[key])
        for key in ("batch_size", "noise_dim", "g_hidden", "d_hidden", "unrolled_steps")
    )
    model = _UnrolledGan(noise_dim, generator, discriminator, steps)
    angles = torch.randint(8, (batch,)) * (math.pi / 4)
    real = 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.02 * torch.randn(batch, 2)
    noise = torch.randn(batch, noise_dim)
    return model, lambda: model(real, noise)


def _three_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def resnet_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build a ResNet; `resnet20` to `resnet1202` have 6n + 2 layers in three stages, the others four."""
    classes = int(sizes["classes"])
    model = _large_chain(name, classes) if name in BLOCKS else _thin_chain(int(name[6:]), classes)
    return model, classify(model, sizes)


def _thin_chain(depth: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    inputs = 16
    for width in (16, 32, 64):
        layers += thin_stage(inputs, width, (depth - 2) // 6)
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def _large_chain(name: str, classes: int) -> nn.Module:
    narrow = name not in ("resnet18", "resnet34")
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = 64
    for stage, count in enumerate(BLOCKS[name]):
        width = 64 * 2**stage
        outputs = width * 4 if narrow else width
        for number in range(count):
            stride = 2 if stage and number == 0 else 1
            shortcut = project_shortcut(inputs, outputs, stride)
            if narrow:
                layers.append(Bottleneck(inputs, width, stride, shortcut, inplace=True))
            else:
                layers.append(BasicBlock(inputs, width, stride, shortcut))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
