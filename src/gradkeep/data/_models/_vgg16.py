"""VGG16 with batch normalization for pictures of 32 x 32, its layers numbered one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

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
