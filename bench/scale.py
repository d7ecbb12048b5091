"""Predictions of a plan at scale, compared with actual captures.

`./x bench scale [--quick]`: plans and runs a capture of an MLP with one and with two worker processes, for
1,000 to 100,000 rows, and compares the seconds (bar: within 20 % from 10,000 rows on, where starting
processes is not most of it). Then extends the same plan to a billion rows and 256 workers, with the
costs of this disk and the assumed ones of S3. It measures wall time, which is what a plan predicts: run
it on a quiet machine.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch

import gradkeep as gk
from gradkeep.data import model

BAR = 0.2
FIRST_BARRED_ROWS = 10_000


def build_loader(count: int) -> torch.utils.data.DataLoader:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(count, 64), torch.arange(count) % 10)
    return torch.utils.data.DataLoader(data, batch_size=256)


def measure_loading(loader: torch.utils.data.DataLoader) -> float:
    began = time.process_time()
    for _ in loader:
        pass
    return (time.process_time() - began) / len(loader.dataset)


def measure_capture(
    net: torch.nn.Module, loader: torch.utils.data.DataLoader, workers: int
) -> float:
    """Return the wall seconds of a capture by that many worker processes."""
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        gk.capture(
            place,
            net,
            loader,
            task=gk.Classification(),
            split="train",
            workers=workers,
            progress=False,
        )
        return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    sizes = (1_000, 10_000) if "--quick" in arguments else (1_000, 10_000, 100_000)
    net, missed = model("mlp").eval(), False
    print("rows      workers  planned s  took s  planned/took")
    plan = None
    for count in sizes:
        loader = build_loader(count)
        plan = gk.plan(net, next(iter(loader)), task=gk.Classification(), rows=count)
        load = measure_loading(loader)
        for workers in (1, 2):
            prediction = plan.at_scale(rows=count, workers=workers, load_seconds=load)
            took = measure_capture(net, loader, workers)
            ratio = prediction.seconds / took
            is_missed = count >= FIRST_BARRED_ROWS and abs(ratio - 1) > BAR
            missed |= is_missed
            verdict = "  MISSES the bar of 20 %" if is_missed else ""
            print(
                f"{count:<9,} {workers:<8} {prediction.seconds:9.1f} {took:7.1f} {ratio:9.2f}{verdict}"
            )
    assert plan is not None
    for place in ("local", "s3"):
        for workers in (1, 256):
            print(plan.at_scale(rows=10**9, workers=workers, place=place))
    return int(missed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
