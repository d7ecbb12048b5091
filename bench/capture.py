"""Cost of capturing all layers, relative to a plain forward and backward pass, on five models.

`./x bench capture [WORD ...]`: one thread, CPU time with writes, alternating in one run. Words select
models by name. Batches are in memory, so loading is not included. The plain pass is a training step
without the optimizer: a mean loss and the gradients of all weights.

Columns: "first" is the first capture of the model in this process, with the proof of every layer and
all one-time costs. "proof" is the share of a capture's time for proving the first batch, which does
not depend on the number of rows; "later" is the share for proofs and spot checks of all other
batches, at most 3 %. ResNet-20 uses CIFAR-10 if GRADKEEP_DATA has it, else noise, after some training
steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from bench._passes import build_cnn, cpu_seconds
from gradkeep.capturing import _first_batch
from gradkeep.capturing._proofs import RuleProofs
from gradkeep.capturing._resume import RowAudit
from gradkeep.data import GPT, dataset, model

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("GRADKEEP_DATA", ROOT.parent / "shared" / "data"))
STEPS, ROUNDS = 20, 3
MOST_LATER = 0.03
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, its batches and the largest allowed ratio of capture to plain pass."""

    name: str
    net: nn.Module
    task: gk.Task
    batches: Batches
    bar: float | None = None

    def plain(self) -> None:
        for x, y in self.batches:
            self.net.zero_grad()
            logits = self.net(x)
            if logits.dim() == 3:  # labels are given for every token
                logits, y = logits.flatten(0, 1), y.flatten()
            F.cross_entropy(logits, y).backward()
        self.net.zero_grad()

    def capture(self) -> gk.Captured:
        with tempfile.TemporaryDirectory() as folder:
            store = gk.open(folder)
            return gk.capture(
                store, self.net, self.batches, task=self.task, split="train", progress=False
            )


def draw_batches(count: int, batch: int, *shape: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    return split_batches(x, y, batch)


def split_batches(x: torch.Tensor, y: torch.Tensor, batch: int) -> Batches:
    return [(a.clone(), b.clone()) for a, b in zip(x.split(batch), y.split(batch), strict=True)]


def load_pictures(count: int, batch: int) -> Batches:
    path = DATA / "cifar10" / "cifar10_10k_2k.npz"
    if not path.exists():
        print("CIFAR-10 not found: using noise")
        return draw_batches(count, batch, 3, 32, 32)
    data = dataset("cifar10", path)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:count]
    x, y = zip(*(data[int(at)] for at in order), strict=True)
    return split_batches(torch.stack(x), torch.tensor(y), batch)


def train_resnet(batches: Batches) -> nn.Module:
    net = model("resnet20").train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def build_mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for wide, out in itertools.pairwise(widths):
        layers += [nn.Linear(wide, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def build_cases() -> list[Case]:
    torch.manual_seed(0)
    seen = load_pictures(1024, 128)
    classes = gk.Classification()
    tokens = torch.randint(0, 512, (96, 128), generator=torch.Generator().manual_seed(0))
    gpt = GPT(vocabulary=512, length=128, dim=256, heads=4, layers=4, tied=False).eval()
    return [
        Case("ResNet-20, 3x32x32", train_resnet(seen), classes, seen, 1.4),
        Case(
            "MLP 784-256-256-10",
            build_mlp(784, 256, 256, 10),
            classes,
            draw_batches(20_480, 256, 784),
            1.8,
        ),
        Case(
            "transformer 4x256, T=128",
            gpt,
            gk.LanguageModeling(),
            split_batches(tokens, tokens, 16),
            2.0,
        ),
        Case("CNN 3x32x32", build_cnn(), classes, draw_batches(1024, 128, 3, 32, 32)),
        Case("MLP 64-32-10, batch 64", build_mlp(64, 32, 10), classes, draw_batches(9_984, 64, 64)),
    ]


@contextlib.contextmanager
def record_seconds(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Append the CPU time of each call of a function to a list, until the block ends."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - started)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


def measure_proof_shares(price: Case) -> tuple[float, float]:
    """Return the shares of a capture's CPU time for proofs of the first and of later batches."""
    first: list[float] = []
    later: list[float] = []
    with (
        record_seconds(_first_batch, "choose_rules", first),
        record_seconds(RuleProofs, "prove", later),
        record_seconds(RowAudit, "_check", later),
    ):
        whole = cpu_seconds(price.capture)
    return sum(first) / whole, sum(later) / whole


def measure(price: Case) -> bool:
    first = cpu_seconds(price.capture)
    price.plain()
    ratios, plains = [], []
    report: Any = None

    def capture() -> None:
        nonlocal report
        report = price.capture()

    for _ in range(ROUNDS):
        plains.append(cpu_seconds(price.plain))
        ratios.append(cpu_seconds(capture) / plains[-1])
    ratio, plain = statistics.median(ratios), statistics.median(plains)
    shares = [measure_proof_shares(price) for _ in range(ROUNDS)]
    proof, later = (statistics.median(column) for column in zip(*shares, strict=True))
    missed = (price.bar is not None and ratio > price.bar) or later > MOST_LATER
    bar = "" if price.bar is None else f"{price.bar:g}"
    print(
        f"  {price.name:<26}{plain:>8.3f}{ratio:>9.2f}{min(ratios):>7.2f} to {max(ratios):.2f}"
        f"{first / plain:>9.2f}{bar:>6}{proof:>8.1%}{later:>8.1%}  {'MISSED ' if missed else ''}"
        f"{report.rows} rows, {report.bytes / 1e6:.0f} MB",
        flush=True,
    )
    return missed


def main() -> int:
    torch.set_num_threads(1)
    print(
        f"  {'':<26}{'plain s':>8}{'capture':>9}{'spread':>15}{'first':>9}{'bar':>6}{'proof':>8}{'later':>8}"
    )
    words = sys.argv[1:]
    chosen = [p for p in build_cases() if not words or any(word in p.name for word in words)]
    missed = [measure(price) for price in chosen]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
