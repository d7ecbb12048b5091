"""Inception-v3 and v4: branches of convolutions side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gradkeep.data.architectures._convolutional import classify, convolution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ACROSS, _DOWN = (1, 7), (7, 1)


class _Branches(nn.Module):
    """Every branch sees the same input; what they make stands side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The stem, three kinds of blocks with reductions between them, and a linear layer.

    The third version comes without the head in its middle: the experiments throw away what it says.
    """
    model = _third_version(sizes) if name == "inceptionv3" else _fourth_version(sizes)
    return model, classify(model, sizes)


def _third_version(sizes: Mapping[str, int | float]) -> nn.Module:
    return nn.Sequential(
        convolution(3, 32, 3, stride=2, valid=True),
        convolution(32, 32, 3, valid=True),
        convolution(32, 64, 3),
        nn.MaxPool2d(3, 2),
        convolution(64, 80, 1, valid=True),
        convolution(80, 192, 3, valid=True),
        nn.MaxPool2d(3, 2),
        *(_wide(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
        _Branches(
            convolution(288, 384, 3, stride=2, valid=True),
            nn.Sequential(
                convolution(288, 64, 1),
                convolution(64, 96, 3),
                convolution(96, 96, 3, stride=2, valid=True),
            ),
            nn.MaxPool2d(3, 2),
        ),
        *(_crossed(between) for between in (128, 160, 160, 192)),
        _Branches(
            nn.Sequential(convolution(768, 192, 1), convolution(192, 320, 3, stride=2, valid=True)),
            nn.Sequential(
                convolution(768, 192, 1),
                convolution(192, 192, _ACROSS),
                convolution(192, 192, _DOWN),
                convolution(192, 192, 3, stride=2, valid=True),
            ),
            nn.MaxPool2d(3, 2),
        ),
        *(_forked(inputs) for inputs in (1280, 2048)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(2048, int(sizes["classes"])),
    )


def _wide(inputs: int, pooled: int) -> nn.Module:
    return _Branches(
        convolution(inputs, 64, 1),
        nn.Sequential(convolution(inputs, 48, 1), convolution(48, 64, 5)),
        nn.Sequential(convolution(inputs, 64, 1), convolution(64, 96, 3), convolution(96, 96, 3)),
        _pooled(inputs, pooled),
    )


def _crossed(between: int) -> nn.Module:
    return _Branches(
        convolution(768, 192, 1),
        nn.Sequential(
            convolution(768, between, 1),
            convolution(between, between, _ACROSS),
            convolution(between, 192, _DOWN),
        ),
        nn.Sequential(
            convolution(768, between, 1),
            convolution(between, between, _DOWN),
            convolution(between, between, _ACROSS),
            convolution(between, between, _DOWN),
            convolution(between, 192, _ACROSS),
        ),
        _pooled(768, 192),
    )


def _forked(inputs: int) -> nn.Module:
    return _Branches(
        convolution(inputs, 320, 1),
        nn.Sequential(convolution(inputs, 384, 1), _fork(384, 384)),
        nn.Sequential(convolution(inputs, 448, 1), convolution(448, 384, 3), _fork(384, 384)),
        _pooled(inputs, 192),
    )


def _fourth_version(sizes: Mapping[str, int | float]) -> nn.Module:
    return nn.Sequential(
        *_stem(),
        *(_first() for _ in range(4)),
        _Branches(
            convolution(384, 384, 3, stride=2, valid=True),
            nn.Sequential(
                convolution(384, 192, 1),
                convolution(192, 224, 3),
                convolution(224, 256, 3, stride=2, valid=True),
            ),
            nn.MaxPool2d(3, 2),
        ),
        *(_second() for _ in range(7)),
        _Branches(
            nn.Sequential(
                convolution(1024, 192, 1), convolution(192, 192, 3, stride=2, valid=True)
            ),
            nn.Sequential(
                convolution(1024, 256, 1),
                convolution(256, 256, _ACROSS),
                convolution(256, 320, _DOWN),
                convolution(320, 320, 3, stride=2, valid=True),
            ),
            nn.MaxPool2d(3, 2),
        ),
        *(_third() for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1536, int(sizes["classes"])),
    )


def _stem() -> list[nn.Module]:
    return [
        convolution(3, 32, 3, stride=2, valid=True),
        convolution(32, 32, 3, valid=True),
        convolution(32, 64, 3),
        _Branches(nn.MaxPool2d(3, 2), convolution(64, 96, 3, stride=2, valid=True)),
        _Branches(
            nn.Sequential(convolution(160, 64, 1), convolution(64, 96, 3, valid=True)),
            nn.Sequential(
                convolution(160, 64, 1),
                convolution(64, 64, _ACROSS),
                convolution(64, 64, _DOWN),
                convolution(64, 96, 3, valid=True),
            ),
        ),
        _Branches(convolution(192, 192, 3, stride=2, valid=True), nn.MaxPool2d(3, 2)),
    ]


def _first() -> nn.Module:
    return _Branches(
        convolution(384, 96, 1),
        nn.Sequential(convolution(384, 64, 1), convolution(64, 96, 3)),
        nn.Sequential(convolution(384, 64, 1), convolution(64, 96, 3), convolution(96, 96, 3)),
        _pooled(384, 96),
    )


def _second() -> nn.Module:
    return _Branches(
        convolution(1024, 384, 1),
        nn.Sequential(
            convolution(1024, 192, 1), convolution(192, 224, _ACROSS), convolution(224, 256, _DOWN)
        ),
        nn.Sequential(
            convolution(1024, 192, 1),
            convolution(192, 192, _DOWN),
            convolution(192, 224, _ACROSS),
            convolution(224, 224, _DOWN),
            convolution(224, 256, _ACROSS),
        ),
        _pooled(1024, 128),
    )


def _third() -> nn.Module:
    return _Branches(
        convolution(1536, 256, 1),
        nn.Sequential(convolution(1536, 384, 1), _fork(384)),
        nn.Sequential(
            convolution(1536, 384, 1),
            convolution(384, 448, (3, 1)),
            convolution(448, 512, (1, 3)),
            _fork(512),
        ),
        _pooled(1536, 256),
    )


def _fork(inputs: int, outputs: int = 256) -> nn.Module:
    return _Branches(convolution(inputs, outputs, (1, 3)), convolution(inputs, outputs, (3, 1)))


def _pooled(inputs: int, outputs: int) -> nn.Module:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, convolution(inputs, outputs, 1))
