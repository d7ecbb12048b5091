"""Capturing all layers of a ResNet-20 on CIFAR images, against a plain forward and backward pass.

`./x bench capture`: one thread, CPU time, writes included, alternating in one run. The images are
real where GRADKEEP_DATA has them, else noise; the model is trained for some steps first.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import gradkeep as gk
from gradkeep.data import Examples, dataset, model

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("GRADKEEP_DATA", ROOT.parent / "shared" / "data"))
ROWS, BATCH, STEPS, ROUNDS = 3072, 128, 60, 2
BAR = 1.6


def images():
    path = DATA / "cifar10" / "cifar10_10k_2k.npz"
    if path.exists():
        return dataset("cifar10", path)
    print("no CIFAR-10 here: noise in its place")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4 * ROWS, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (4 * ROWS,), generator=generator)
    return Examples(pixels, labels, tuple("0123456789"))


def trained(data):
    net = model("resnet20")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step >= STEPS:
            break
    return net.eval()


def plain(net, loader) -> None:
    for x, y in loader:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()


def keep(store, net, loader):
    task = gk.Classification()
    return gk.capture(store, net, loader, task=task, split="train", progress=False)


def timed(function, *arguments):
    started = time.process_time()
    found = function(*arguments)
    return time.process_time() - started, found


def main() -> int:
    torch.set_num_threads(1)
    data = images()
    net = trained(data)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:ROWS]
    loader = DataLoader(Subset(data, order.tolist()), batch_size=BATCH)
    ratios = []
    for _ in range(ROUNDS):
        base, _ = timed(plain, net, loader)
        net.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            seconds, kept = timed(keep, gk.open(folder), net, loader)
        ratios.append(seconds / base)
        print(f"plain {base:.2f} s, capture {seconds:.2f} s, {seconds / base:.2f}x; {kept}")
    ratio = statistics.median(ratios)
    print(f"capture / plain pass: {ratio:.2f} (bar {BAR})")
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
