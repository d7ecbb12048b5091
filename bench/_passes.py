"""Workloads and plain passes that the cost of captures is compared with.

An MLP on rows of 784 values (in a `TensorDataset`, which is read in slices, and in a data set that
returns single items), a CNN on images of 3 x 32 x 32, and a small transformer on sequences of 64
tokens. The values are random because only their sizes matter.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gradkeep as gk


@dataclass(frozen=True)
class Workload:
    """A model, its task and its data."""

    name: str
    net: nn.Module
    task: gk.Task
    loader: DataLoader[Any]

    def forward(self) -> None:
        """Run a plain forward pass with the loss of every sample."""
        losses = []
        with torch.no_grad():
            for x, y in self.loader:
                logits = self.net(x)
                if logits.dim() == 3:
                    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").sum(1)
                else:
                    each = F.cross_entropy(logits, y, reduction="none")
                losses.append(each)
        torch.cat(losses)

    def read_loader(self) -> None:
        """Iterate over the loader without running the model."""
        for _ in self.loader:
            pass


class ItemDataset(Dataset[Any]):
    """A data set that returns one row at a time."""

    def __init__(self, rows: TensorDataset) -> None:
        self.values, self.labels = rows.tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values[at], self.labels[at]


class Transformer(nn.Module):
    def __init__(self, words: int = 256, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def build_cnn() -> nn.Module:
    """Build three convolutions and a linear layer for images of 3 x 32 x 32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    ).eval()


def build_workloads(scale: float = 1.0) -> list[Workload]:
    """Build all workloads; `scale` multiplies their rows."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    cnn = build_cnn()

    def rows(count: int, *shape: int) -> TensorDataset:
        count = int(count * scale)
        return TensorDataset(
            torch.randn(count, *shape, generator=generator),
            torch.randint(0, 10, (count,), generator=generator),
        )

    tokens = torch.randint(0, 256, (int(2048 * scale), 64), generator=generator)
    digits = rows(20_000, 784)
    images, words = gk.Classification(), gk.LanguageModeling()
    return [
        Workload("MLP 784-256-256-10", mlp.eval(), images, DataLoader(digits, 256)),
        Workload("MLP, item data set", mlp.eval(), images, DataLoader(ItemDataset(digits), 256)),
        Workload("CNN 3x32x32", cnn.eval(), images, DataLoader(rows(3000, 3, 32, 32), 128)),
        Workload(
            "transformer T=64",
            Transformer().eval(),
            words,
            DataLoader(TensorDataset(tokens, tokens), 64),
        ),
    ]


def measure_ratio(plain: Any, other: Any, rounds: int) -> tuple[float, float, float]:
    """Return the median CPU seconds of both and the median of their ratios, alternating."""
    plain(), other()
    times = [(cpu_seconds(plain), cpu_seconds(other)) for _ in range(rounds)]
    ratios = [late / early for early, late in times]
    return (
        statistics.median(early for early, _ in times),
        statistics.median(late for _, late in times),
        statistics.median(ratios),
    )


def cpu_seconds(function: Any) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started
