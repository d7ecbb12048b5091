"""Small models for the digits: what a test or a tour can train in seconds."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class MLP(nn.Module):
    """Linear layers `l1`, `l2`, `l3`, ... with ReLU between them; 85,002 parameters as it is."""

    def __init__(
        self, *, inputs: int = 64, hidden: Sequence[int] = (256, 256), classes: int = 10
    ) -> None:
        super().__init__()
        for number, (wide, out) in enumerate(pairwise([inputs, *hidden, classes]), 1):
            self.add_module(f"l{number}", nn.Linear(wide, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[N, classes]` of pictures of any shape `[N, ...]`."""
        x = x.flatten(1)
        for number, layer in enumerate(self.children()):
            x = layer(functional.relu(x) if number else x)
        return x


class CNN(nn.Module):
    """Two convolutions, `conv1` and `conv2`, and a linear layer `fc`; 29,066 parameters as it is."""

    def __init__(
        self, *, width: int = 32, channels: int = 1, side: int = 8, classes: int = 10
    ) -> None:
        super().__init__()
        self.channels, self.side = channels, side
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * (side // 2) ** 2, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[N, classes]` of pictures `[N, C, H, W]` or flat `[N, C * H * W]`."""
        x = x.reshape(-1, self.channels, self.side, self.side)
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits
