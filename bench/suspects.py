"""Planted label errors on MNIST and CIFAR-10: do the intervals of noise rate and precision hold?

`./x bench suspects [--quick] [SEED ...]`: labels are flipped to any other class (5, 10, 20 %) or to the
next one (10 %), models are trained on them, and the estimates of `gk.suspects` are compared with the
flips: from out-of-fold probabilities, and from captures of losses early in training, of rows that the
model was trained on. Data from GRADKEEP_DATA; one thread.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.attribution._suspects import Suspects
from gradkeep.data import dataset

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("GRADKEEP_DATA", ROOT.parent / "shared" / "data"))
NOISES = (("any", 0.05), ("any", 0.1), ("any", 0.2), ("next", 0.1))
FOLDS = 4


def load_images(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "MNIST":
        source = dataset("idx", DATA / "mnist")
    else:
        source = dataset("cifar10", DATA / "cifar10" / "cifar10_10k_2k.npz")
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:rows]
    x, y = source[order]
    return x.float(), y.long()


def build_network(name: str) -> nn.Module:
    if name == "MNIST":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def train_epochs(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> list[nn.Module]:
    """Return the model after every epoch."""
    torch.manual_seed(seed)
    net = build_network(name).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    models = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
        copy = build_network(name)
        copy.load_state_dict(net.state_dict())
        models.append(copy.eval())
    return models


def predict_out_of_fold(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> torch.Tensor:
    place = torch.arange(len(x)) % FOLDS
    probabilities = torch.zeros(len(x), 10)
    for fold in range(FOLDS):
        rest = place != fold
        net = train_epochs(name, x[rest], y[rest], epochs=epochs, seed=100 * seed + fold)[-1]
        with torch.no_grad():
            probabilities[~rest] = torch.cat([net(part).softmax(1) for part in x[~rest].split(500)])
    return probabilities


def flip_labels(y: torch.Tensor, kind: str, rate: float, seed: int) -> torch.Tensor:
    draw = np.random.default_rng(seed + 100)
    at = draw.random(len(y)) < rate
    step = draw.integers(1, 10, len(y)) if kind == "any" else 1
    return torch.from_numpy(np.where(at, (y.numpy() + step) % 10, y.numpy()))


def find_suspects_from_captures(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> Suspects:
    # Early epochs, before the model has memorized the labels.
    nets = train_epochs(name, x, y, epochs=epochs, seed=seed)[: epochs // 3]
    loader = DataLoader(TensorDataset(x, y), 500)
    with tempfile.TemporaryDirectory() as folder:
        for step, net in enumerate(nets):
            options = {"checkpoints": f"epoch-{step}", "keep": "losses", "progress": False}
            gk.capture(folder, net, loader, task=gk.Classification(), split="train", **options)
        return gk.suspects(folder)


def judge_suspects(suspects: Suspects, truth: np.ndarray) -> tuple[str, int, int]:
    """Return a line, how many of its intervals contain the truth, and how many there are."""
    noise = suspects.noise
    share, (low, high) = float(truth.mean()), noise.rate_interval
    line = f"{share:>6.3f} {noise.rate:>6.3f} [{low:.3f}, {high:.3f}]"
    held = int(low <= share <= high)
    threshold = noise.threshold(0.8)
    if threshold is None:
        return f"{line}   no list is 80 % right", held, 1
    actual = float(truth[suspects.flagged(0.8)].mean())
    low, high = threshold.interval
    inside = low <= actual <= high
    line += (
        f"{threshold.rows:>7} {threshold.precision:>6.2f} [{low:.2f}, {high:.2f}] {actual:>6.2f}"
    )
    recall = truth[suspects.flagged(0.8)].sum() / max(1, truth.sum())
    return f"{line} {recall:>7.2f}{'' if inside else '  OUTSIDE'}", held + int(inside), 2


def main() -> int:
    torch.set_num_threads(1)
    if not DATA.exists():
        print("no data: set GRADKEEP_DATA")
        return 0
    quick = "--quick" in sys.argv[1:]
    named = [int(word) for word in sys.argv[1:] if word.isdigit()]
    seeds = named or range(1 if quick else 2)
    print(
        "data     flips      seed by         rate  found [95 %]            rows  prec. [95 %]       actual  recall"
    )
    held = intervals = 0
    for name, rows, epochs in (("MNIST", 4000, 6), ("CIFAR-10", 4000, 8)):
        x, y = load_images(name, rows)
        for seed in seeds:
            for kind, rate in NOISES:
                noisy = flip_labels(y, kind, rate, seed)
                truth = (noisy != y).numpy()
                probabilities = predict_out_of_fold(name, x, noisy, epochs=epochs, seed=seed)
                suspects_by_source = {
                    "folds": gk.suspects(probabilities=probabilities, labels=noisy),
                    "captures": find_suspects_from_captures(
                        name, x, noisy, epochs=epochs, seed=seed + 7
                    ),
                }
                for way, suspects in suspects_by_source.items():
                    line, good, both = judge_suspects(suspects, truth)
                    held, intervals = held + good, intervals + both
                    print(f"{name:<9}{kind:<5}{rate:>5.0%}{seed:>5} {way:<9}{line}", flush=True)
    print(f"the truth is in {held} of {intervals} intervals of 95 %")
    return int(held < 0.9 * intervals)


if __name__ == "__main__":
    sys.exit(main())
