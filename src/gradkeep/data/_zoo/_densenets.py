"""Densely connected networks with bottlenecks and compression by half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradkeep.data._zoo._images import classify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class _Plan:
    growth: int
    blocks: tuple[int, ...]
    first: int
    """Channels after the first convolution."""


_PLANS = {
    "densenet100": _Plan(12, (16, 16, 16), 24),
    "densenet121": _Plan(32, (6, 12, 24, 16), 64),
    "densenet161": _Plan(48, (6, 12, 36, 24), 96),
    "densenet169": _Plan(32, (6, 12, 32, 32), 64),
    "densenet201": _Plan(32, (6, 12, 48, 32), 64),
}


class _Layer(nn.Module):
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


def build(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """`densenet100` is for 32 x 32 pictures, the others begin with a stride of four."""
    plan = _PLANS[name]
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
            layers.append(_Layer(channels, plan.growth))
            channels += plan.growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, int(sizes["classes"])))
    return model, classify(model, sizes)
