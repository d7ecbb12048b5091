"""What models of images share: random pictures with labels, and convolution blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def classify(model: nn.Module, sizes: Mapping[str, int | float]) -> Callable[[], torch.Tensor]:
    """The loss of a classifier on random pictures with random labels."""
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
