"""The CIFAR-2 setting of the quality benchmark: airplanes and cars, a small residual network."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bench import _lds_truth
from bench._quality_board import Section
from bench._quality_settings import evaluate_half_models

CLASSES = (0, 1)


def cifar2(full: bool) -> Section:
    """Evaluate 2,000 images of two classes; `--full` doubles the resolution and the channels."""
    parts = []
    with np.load(_lds_truth.DATA / "cifar10" / "cifar10_10k_2k.npz") as archive:
        for split in ("train", "test"):
            labels = archive[f"y_{split}"]
            rows = np.flatnonzero(np.isin(labels, CLASSES))
            rows = np.random.default_rng(3).permutation(rows)
            images = torch.from_numpy(archive[f"x_{split}"][rows]).permute(0, 3, 1, 2).float()
            targets = torch.from_numpy((labels[rows] == CLASSES[1]).astype(np.int64))
            images = images / 127.5 - 1
            parts.append((images if full else nn.functional.avg_pool2d(images, 2), targets))
    setting = _lds_truth.Setting(
        "CIFAR-2 small ResNet",
        parts[0],
        parts[1],
        lambda: build_resnet(32, 32) if full else build_resnet(16, 16),
        epochs=10,
        batch_size=32,
        lr=0.05,
        models_at_a_time=10,
    )
    sizes = (100, 5) if full else (30, 2)
    return evaluate_half_models("cifar2", setting, *sizes, epochs=(2, 3, 5))


class Residual(nn.Module):
    """relu(x + conv(relu(conv(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.second(nn.functional.relu(self.first(x))))


def build_resnet(channels: int, side: int) -> nn.Module:
    """Build two residual blocks without normalization, so that outputs do not depend on the
    batch."""
    return nn.Sequential(
        *(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU(), Residual(channels)),
        *(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU()),
        *(Residual(2 * channels), nn.AvgPool2d(side // 8), nn.Flatten()),
        nn.Linear(4 * 2 * channels, 2),
    )
