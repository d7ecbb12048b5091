"""Two worker processes against one: seconds of a capture of ResNet-20, and whether the bytes are equal.

`./x bench workers [WORKERS]`: one thread for each process; wall time, as that is what workers save, so the
figure needs as many quiet cores as workers. The load of the machine is told beside it, and the bar holds
only where that is low. "steady" leaves out what every worker needs before its first row: starting,
importing torch and proving its layers, measured by a capture of one row for each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import gradkeep as gk
from bench.capture import pictures
from gradkeep.data import model

ROWS, BATCH = 3072, 128
BAR, QUIET = 1.8, 0.5


def contents(folder: str) -> dict[str, bytes]:
    found = Path(folder).rglob("seg/*.safetensors")
    return {path.name: path.read_bytes() for path in sorted(found)}


def timed(net: torch.nn.Module, batches: list, folder: str, **options: int) -> float:
    started = time.perf_counter()
    task = gk.Classification()
    gk.capture(folder, net, batches, task=task, split="train", progress=False, **options)
    return time.perf_counter() - started


def main() -> int:
    torch.set_num_threads(1)
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.manual_seed(0)
    net, batches = model("resnet20").eval(), pictures(ROWS, BATCH)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        alone = timed(net, batches, one)
        started = time.process_time()
        shared = timed(net, batches, many, workers=workers)
        own = time.process_time() - started
        same = contents(one) == contents(many)
    with tempfile.TemporaryDirectory() as folder:
        begin = timed(net, batches[:2], folder, workers=workers)
    steady = alone / max(1e-9, shared - begin)
    quiet = load < QUIET
    print(f"{ROWS} rows of ResNet-20, load {load:.1f} on {os.cpu_count()} cores")
    print(f"  one process {alone:.1f} s, {workers} workers {shared:.1f} s: {alone / shared:.2f}x")
    print(
        f"  steady {steady:.2f}x ({begin:.1f} s to begin), bar {BAR}{'' if quiet else ', not quiet'}"
    )
    print(f"  of {shared:.1f} s the process that shares out computes {own:.1f} s itself")
    print(f"  byte-identical: {same}")
    return int(not same or (quiet and steady < BAR))


if __name__ == "__main__":
    sys.exit(main())
