"""The models of MetaStore's experiments after a few training steps, with samples to capture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradkeep.data import load_cifar10, model
from gradkeep.data._texts import load_agnews

STEPS = 12
LENGTH = 32
FIRST = [f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
LAST = [f"bert.encoder.layer.1.attention.self.{name}" for name in ("query", "key", "value")]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """A model in eval mode, and batches of training and test samples."""

    net: nn.Module
    train: list[Any]
    test: list[Any]


def find_data_folder() -> Path | None:
    """Return the folder with real data, or None."""
    configured = os.environ.get("GRADKEEP_DATA")
    place = (
        Path(configured) if configured else Path(__file__).resolve().parents[2] / "shared" / "data"
    )
    return place if place.is_dir() else None


def build_vgg16(rows: int, queries: int) -> TrainedModel:
    """Train VGG16 on CIFAR-10."""
    place = find_data_folder()
    order = torch.Generator().manual_seed(0)
    if place is not None:
        parts = []
        for split, count in (("train", rows), ("test", queries)):
            images = load_cifar10(place / "cifar10" / "cifar10_10k_2k.npz", split=split)
            chosen = torch.randperm(len(images), generator=order)[:count]
            pairs = [images[int(at)] for at in chosen]
            parts.append((torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])))
    else:
        print("CIFAR-10 not found: using noise")
        parts = [
            (
                torch.randn(count, 3, 32, 32, generator=order),
                torch.randint(10, (count,), generator=order),
            )
            for count in (rows, queries)
        ]
    train, test = ([(x[i : i + 50], y[i : i + 50]) for i in range(0, len(y), 50)] for x, y in parts)
    net = model("vgg16").train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        picture_loss(net, train[step % len(train)]).backward()
        optimizer.step()
    return TrainedModel(net.eval(), train, test)


def build_bert(rows: int, queries: int) -> TrainedModel:
    """Train two layers of BERT-base with its loss at [CLS], on AG News."""
    place = find_data_folder()
    order = torch.Generator().manual_seed(0)
    if place is not None:
        source = place / "agnews" / "alps_dev.tsv"
        texts = load_agnews(source, length=LENGTH)
        chosen = torch.randperm(len(texts), generator=order)[: rows + queries]
        whole, vocabulary = texts[chosen], len(texts.vocabulary)
    else:
        print("AG News not found: using random words")
        count, vocabulary = rows + queries, 10_000
        whole = {
            "input_ids": torch.randint(4, vocabulary, (count, LENGTH), generator=order),
            "attention_mask": torch.ones(count, LENGTH, dtype=torch.int64),
            "labels": torch.randint(4, (count,), generator=order),
        }
    batches = [
        {name: values[start : start + 50] for name, values in whole.items()}
        for start in range(0, rows, 50)
    ]
    net = model(
        "bert", vocabulary=vocabulary, length=LENGTH, dim=768, heads=12, inner=3072, layers=2
    ).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        text_loss(net, batches[step % len(batches)]).backward()
        optimizer.step()
    test = [{name: values[rows:] for name, values in whole.items()}]
    return TrainedModel(net.eval(), batches, test)


def build_resnet50(rows: int) -> TrainedModel:
    """Build ResNet-50 with noise of 64 x 64; only its sizes are measured."""
    order = torch.Generator().manual_seed(0)
    pictures = torch.randn(rows, 3, 64, 64, generator=order)
    batch = (pictures, torch.randint(10, (rows,), generator=order))
    return TrainedModel(model("resnet50", classes=10).eval(), [batch], [batch])


def picture_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    """Return the loss of a batch of images."""
    return F.cross_entropy(net(batch[0]), batch[1], reduction=reduction)


def text_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    """Return the loss of a batch of texts."""
    logits = net(batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(logits, batch["labels"], reduction=reduction)
