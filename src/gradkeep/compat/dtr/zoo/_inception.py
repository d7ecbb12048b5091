"""Inception-v3 and v4: parallel branches of convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.compat.dtr.zoo._images import classify, convolution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ACROSS, _DOWN = (1, 7), (7, 1)
_VALID, _HALVED = "valid", "halved"
"""Without padding; the second with a stride of two."""


class _Branches(nn.Module):
    """Apply every branch to the same input and concatenate the results."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _chain(inputs: int, *layers: tuple[Any, ...]) -> nn.Sequential:
    """Build a chain of convolutions, each as (channels, kernel) or (channels, kernel, how)."""
    convolutions = []
    for outputs, kernel, *how in layers:
        stride = 2 if _HALVED in how else 1
        convolutions.append(convolution(inputs, outputs, kernel, stride=stride, valid=bool(how)))
        inputs = outputs
    return nn.Sequential(*convolutions)


def _fork(inputs: int, outputs: int) -> nn.Module:
    return _Branches(convolution(inputs, outputs, (1, 3)), convolution(inputs, outputs, (3, 1)))


def _pooled(inputs: int, outputs: int) -> nn.Module:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, convolution(inputs, outputs, 1))


def inception_workload(
    name: str, sizes: Mapping[str, int | float]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build the stem, three kinds of blocks with reductions between them, and a linear layer.

    Inception-v3 has no auxiliary head: the experiments do not use its result.
    """
    model = _third_version(sizes) if name == "inceptionv3" else _fourth_version(sizes)
    return model, classify(model, sizes)


def _third_version(sizes: Mapping[str, int | float]) -> nn.Module:
    return nn.Sequential(
        *_chain(3, (32, 3, _HALVED), (32, 3, _VALID), (64, 3)),
        nn.MaxPool2d(3, 2),
        *_chain(64, (80, 1, _VALID), (192, 3, _VALID)),
        nn.MaxPool2d(3, 2),
        *(_wide_v3(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
        _Branches(
            _chain(288, (384, 3, _HALVED)),
            _chain(288, (64, 1), (96, 3), (96, 3, _HALVED)),
            nn.MaxPool2d(3, 2),
        ),
        *(_crossed_v3(between) for between in (128, 160, 160, 192)),
        _Branches(
            _chain(768, (192, 1), (320, 3, _HALVED)),
            _chain(768, (192, 1), (192, _ACROSS), (192, _DOWN), (192, 3, _HALVED)),
            nn.MaxPool2d(3, 2),
        ),
        *(_forked_v3(inputs) for inputs in (1280, 2048)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(2048, int(sizes["classes"])),
    )


def _wide_v3(inputs: int, pooled: int) -> nn.Module:
    return _Branches(
        _chain(inputs, (64, 1)),
        _chain(inputs, (48, 1), (64, 5)),
        _chain(inputs, (64, 1), (96, 3), (96, 3)),
        _pooled(inputs, pooled),
    )


def _crossed_v3(between: int) -> nn.Module:
    crossing = ((between, _DOWN), (between, _ACROSS), (between, _DOWN), (192, _ACROSS))
    return _Branches(
        _chain(768, (192, 1)),
        _chain(768, (between, 1), (between, _ACROSS), (192, _DOWN)),
        _chain(768, (between, 1), *crossing),
        _pooled(768, 192),
    )


def _forked_v3(inputs: int) -> nn.Module:
    return _Branches(
        _chain(inputs, (320, 1)),
        nn.Sequential(_chain(inputs, (384, 1)), _fork(384, 384)),
        nn.Sequential(_chain(inputs, (448, 1), (384, 3)), _fork(384, 384)),
        _pooled(inputs, 192),
    )


def _fourth_version(sizes: Mapping[str, int | float]) -> nn.Module:
    return nn.Sequential(
        *_chain(3, (32, 3, _HALVED), (32, 3, _VALID), (64, 3)),
        _Branches(nn.MaxPool2d(3, 2), _chain(64, (96, 3, _HALVED))),
        _Branches(
            _chain(160, (64, 1), (96, 3, _VALID)),
            _chain(160, (64, 1), (64, _ACROSS), (64, _DOWN), (96, 3, _VALID)),
        ),
        _Branches(_chain(192, (192, 3, _HALVED)), nn.MaxPool2d(3, 2)),
        *(_wide_v4() for _ in range(4)),
        _Branches(
            _chain(384, (384, 3, _HALVED)),
            _chain(384, (192, 1), (224, 3), (256, 3, _HALVED)),
            nn.MaxPool2d(3, 2),
        ),
        *(_crossed_v4() for _ in range(7)),
        _Branches(
            _chain(1024, (192, 1), (192, 3, _HALVED)),
            _chain(1024, (256, 1), (256, _ACROSS), (320, _DOWN), (320, 3, _HALVED)),
            nn.MaxPool2d(3, 2),
        ),
        *(_forked_v4() for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1536, int(sizes["classes"])),
    )


def _wide_v4() -> nn.Module:
    return _Branches(
        _chain(384, (96, 1)),
        _chain(384, (64, 1), (96, 3)),
        _chain(384, (64, 1), (96, 3), (96, 3)),
        _pooled(384, 96),
    )


def _crossed_v4() -> nn.Module:
    crossing = ((192, _DOWN), (224, _ACROSS), (224, _DOWN), (256, _ACROSS))
    return _Branches(
        _chain(1024, (384, 1)),
        _chain(1024, (192, 1), (224, _ACROSS), (256, _DOWN)),
        _chain(1024, (192, 1), *crossing),
        _pooled(1024, 128),
    )


def _forked_v4() -> nn.Module:
    return _Branches(
        _chain(1536, (256, 1)),
        nn.Sequential(_chain(1536, (384, 1)), _fork(384, 256)),
        nn.Sequential(_chain(1536, (384, 1), (448, (3, 1)), (512, (1, 3))), _fork(512, 256)),
        _pooled(1536, 256),
    )
