"""Planted wrong labels on MNIST and CIFAR-10: are the noise rate and the precision where they are said to be?

`./x bench suspects [--quick] [SEED ...]`: labels are flipped to any other class (5, 10, 20 %) or to the next one
(10 %), models are trained on them, and what `gk.suspects` says is held against the flips: from
out-of-fold probabilities, and from captures of losses early in training, of rows that the
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


def images(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "MNIST":
        found = dataset("idx", DATA / "mnist")
    else:
        found = dataset("cifar10", DATA / "cifar10" / "cifar10_10k_2k.npz")
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:rows]
    x, y = found[order]
    return x.float(), y.long()


def network(name: str) -> nn.Module:
    if name == "MNIST":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )


def trained(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> list[nn.Module]:
    """The model after every epoch."""
    torch.manual_seed(seed)
    net = network(name).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    kept = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
        copy = network(name)
        copy.load_state_dict(net.state_dict())
        kept.append(copy.eval())
    return kept


def out_of_fold(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> torch.Tensor:
    place = torch.arange(len(x)) % FOLDS
    said = torch.zeros(len(x), 10)
    for fold in range(FOLDS):
        rest = place != fold
        net = trained(name, x[rest], y[rest], epochs=epochs, seed=100 * seed + fold)[-1]
        with torch.no_grad():
            said[~rest] = torch.cat([net(part).softmax(1) for part in x[~rest].split(500)])
    return said


def flipped(y: torch.Tensor, kind: str, rate: float, seed: int) -> torch.Tensor:
    draw = np.random.default_rng(seed + 100)
    at = draw.random(len(y)) < rate
    step = draw.integers(1, 10, len(y)) if kind == "any" else 1
    return torch.from_numpy(np.where(at, (y.numpy() + step) % 10, y.numpy()))


def from_captures(
    name: str, x: torch.Tensor, y: torch.Tensor, *, epochs: int, seed: int
) -> Suspects:
    nets = trained(name, x, y, epochs=epochs, seed=seed)[
        : epochs // 3
    ]  # before it knows them by heart
    loader = DataLoader(TensorDataset(x, y), 500)
    with tempfile.TemporaryDirectory() as folder:
        for step, net in enumerate(nets):
            options = {"checkpoints": f"epoch-{step}", "keep": "losses", "progress": False}
            gk.capture(folder, net, loader, task=gk.Classification(), split="train", **options)
        return gk.suspects(folder)


def judged(found: Suspects, truth: np.ndarray) -> tuple[str, int, int]:
    """A line, and how many of its two intervals hold the truth."""
    noise = found.noise
    share, (low, high) = float(truth.mean()), noise.rate_interval
    line = f"{share:>6.3f} {noise.rate:>6.3f} [{low:.3f}, {high:.3f}]"
    held = int(low <= share <= high)
    threshold = noise.threshold(0.8)
    if threshold is None:
        return f"{line}   no list is 80 % right", held, 1
    actual = float(truth[found.flagged(0.8)].mean())
    low, high = threshold.interval
    inside = low <= actual <= high
    line += (
        f"{threshold.rows:>7} {threshold.precision:>6.2f} [{low:.2f}, {high:.2f}] {actual:>6.2f}"
    )
    recall = truth[found.flagged(0.8)].sum() / max(1, truth.sum())
    return f"{line} {recall:>7.2f}{'' if inside else '  OUTSIDE'}", held + int(inside), 2


def main() -> int:
    torch.set_num_threads(1)
    if not DATA.exists():
        print("no data here: set GRADKEEP_DATA")
        return 0
    quick = "--quick" in sys.argv[1:]
    named = [int(word) for word in sys.argv[1:] if word.isdigit()]
    seeds = named or range(1 if quick else 2)
    print(
        "data     flips      seed by         rate  found [95 %]            rows  prec. [95 %]       actual  recall"
    )
    held = told = 0
    for name, rows, epochs in (("MNIST", 4000, 6), ("CIFAR-10", 4000, 8)):
        x, y = images(name, rows)
        for seed in seeds:
            for kind, rate in NOISES:
                given = flipped(y, kind, rate, seed)
                truth = (given != y).numpy()
                said = out_of_fold(name, x, given, epochs=epochs, seed=seed)
                ways = {
                    "folds": gk.suspects(probabilities=said, labels=given),
                    "captures": from_captures(name, x, given, epochs=epochs, seed=seed + 7),
                }
                for way, found in ways.items():
                    line, good, both = judged(found, truth)
                    held, told = held + good, told + both
                    print(f"{name:<9}{kind:<5}{rate:>5.0%}{seed:>5} {way:<9}{line}", flush=True)
    print(f"the truth lies in {held} of {told} intervals of 95 %")
    return int(held < 0.9 * told)


if __name__ == "__main__":
    sys.exit(main())
