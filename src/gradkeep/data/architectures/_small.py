"""Small models for the digits, which a test or a tour can train in seconds, and VGG16 for 32 x 32 pictures."""

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


# Times the width, for each convolution; the picture is halved after each group.
_GROUPS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class VGG16(nn.Module):
    """`conv1` to `conv13`, each with `bn1` to `bn13`, then `l1`, the names that MetaStore uses.

    `hidden` puts linear layers before the last one: with two of them, `l3` gives the logits.
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
        """Logits `[N, classes]` of pictures `[N, 3, 32, 32]`."""
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
