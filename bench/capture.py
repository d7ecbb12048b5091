"""Cost of capturing, exactly and in 4 KiB per row, relative to a plain forward and backward pass.

`./x bench capture [--keep exact|4KiB] [--rounds N] [WORD ...]`: one thread, CPU time with writes,
alternating in one run. Words select models by name. Batches are in memory, so loading is not included.
The plain pass is a training step without the optimizer: a mean loss and the gradients of all weights.
The price of 4 KiB includes choosing the coordinates.

Columns: "first" is the first capture of the model in this process, with the proof of every layer and
all one-time costs. "proof" is the share of a capture's time for proving the first batch, which does
not depend on the number of rows; "later" is the share for proofs and spot checks of all other
batches, at most 3 %. ResNet-20 uses CIFAR-10 if GRADKEEP_DATA has it, else noise, after some training
steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
STEPS = 20
MOST_LATER = 0.03
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, its batches and the largest allowed ratios of captures to a plain pass."""

    name: str
    net: nn.Module
    task: gk.Task
    batches: Batches
    bars: Mapping[str, float] = field(default_factory=dict)
    """By what is kept."""

    def plain(self) -> None:
        for x, y in self.batches:
            self.net.zero_grad()
            logits = self.net(x)
            if logits.dim() == 3:  # labels are given for every token
                logits, y = logits.flatten(0, 1), y.flatten()
            F.cross_entropy(logits, y).backward()
        self.net.zero_grad()

    def capture(self, keep: str) -> gk.Captured:
        with tempfile.TemporaryDirectory() as folder:
            store = gk.open(folder)
            return gk.capture(
                *(store, self.net, self.batches),
                task=self.task,
                split="train",
                keep=keep,
                progress=False,
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


class ViT(nn.Module):
    """Vision transformer whose class token and position embedding are bare parameters."""

    def __init__(self, dim: int = 192, layers: int = 6, patches: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    dim, 3, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        return self.head(self.norm(self.blocks(tokens + self.position))[:, 0])


def build_cases() -> list[Case]:
    torch.manual_seed(0)
    seen = load_pictures(1024, 128)
    classes = gk.Classification()
    tokens = torch.randint(0, 512, (512, 128), generator=torch.Generator().manual_seed(0))
    gpt = GPT(vocabulary=512, length=128, dim=256, heads=4, layers=4, tied=False).eval()
    wide, narrow = build_mlp(784, 256, 256, 10), build_mlp(64, 256, 256, 10)
    mlp_bars = {"exact": 1.9, "4KiB": 2.5}
    return [
        Case("MLP 784-256-256-10", wide, classes, draw_batches(20_480, 256, 784), {"exact": 1.8}),
        Case("MLP 784, 2,048 rows", wide, classes, draw_batches(2048, 256, 784), mlp_bars),
        Case("MLP 64-256-256-10", narrow, classes, draw_batches(2048, 64, 64), mlp_bars),
        Case(
            "MLP 784-1024-1024-10",
            build_mlp(784, 1024, 1024, 10),
            classes,
            draw_batches(2048, 256, 784),
        ),
        Case("ResNet-20, 3x32x32", train_resnet(seen), classes, seen, {"exact": 1.4, "4KiB": 2.0}),
        Case(
            "ViT 6x192, 65 tokens",
            ViT().eval(),
            classes,
            draw_batches(512, 64, 3, 32, 32),
            {"exact": 1.7, "4KiB": 1.6},
        ),
        Case(
            "GPT 4x256, T=128",
            gpt,
            gk.LanguageModeling(),
            split_batches(tokens, tokens, 16),
            {"exact": 1.4, "4KiB": 1.6},
        ),
        Case("CNN 3x32x32", build_cnn(), classes, draw_batches(1024, 128, 3, 32, 32)),
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


def measure_proof_shares(case: Case, keep: str) -> tuple[float, float]:
    """Return the shares of a capture's CPU time for proofs of the first and of later batches."""
    first: list[float] = []
    later: list[float] = []
    with (
        record_seconds(_first_batch, "choose_rules", first),
        record_seconds(RuleProofs, "prove", later),
        record_seconds(RowAudit, "_check", later),
    ):
        whole = cpu_seconds(lambda: case.capture(keep))
    return sum(first) / whole, sum(later) / whole


def measure(case: Case, keep: str, rounds: int) -> bool:
    first = cpu_seconds(lambda: case.capture(keep))
    case.plain()
    ratios, plains = [], []
    report: Any = None

    def capture() -> None:
        nonlocal report
        report = case.capture(keep)

    for _ in range(rounds):
        plains.append(cpu_seconds(case.plain))
        ratios.append(cpu_seconds(capture) / plains[-1])
    ratio, plain = statistics.median(ratios), statistics.median(plains)
    proof, later = measure_proof_shares(case, keep)
    bar = case.bars.get(keep)
    missed = (bar is not None and ratio > bar) or later > MOST_LATER
    print(
        f"  {case.name:<22}{keep:<6}{plain:>8.3f}{ratio:>9.2f}{min(ratios):>7.2f} to {max(ratios):.2f}"
        f"{first / plain:>9.2f}{bar or '':>6}{proof:>8.1%}{later:>8.1%}  {'MISSED ' if missed else ''}"
        f"{report.rows} rows of {report.bytes / report.rows:,.0f} B",
        flush=True,
    )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of models")
    parser.add_argument("--keep", choices=["exact", "4KiB"], help="one of both; both by default")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"  {'':<22}{'keep':<6}{'plain s':>8}{'capture':>9}{'spread':>15}{'first':>9}{'bar':>6}"
        f"{'proof':>8}{'later':>8}"
    )
    cases = build_cases()
    chosen = [c for c in cases if not options.words or any(w in c.name for w in options.words)]
    keeps = [options.keep] if options.keep else ["exact", "4KiB"]
    missed = [measure(case, keep, options.rounds) for case in chosen for keep in keeps]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
