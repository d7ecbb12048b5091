"""Startup time of commands, and `gk.query.top` against all products.

`./x bench startup`: CPU seconds of whole processes, the least of several. `gradkeep methods` and
`gradkeep why` are compared with a Python that only imports torch, which they need; compiled modules are
cached, as after an installation. `gk.query.top` is compared with `gk.query.dot` and `topk` of its
matrix, which it never holds in memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradkeep as gk

MORE, TOP = 0.5, 1.5
ROUNDS = 5


def measure_process(command: list[str], cache: Path) -> float:
    seconds = []
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(seconds)


def measure_least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


def capture_random_rows(folder: str, rows: int, queries: int, width: int) -> gk.Store:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))
    store = gk.open(folder, durability="process")
    for split, count in (("train", rows), ("test", queries)):
        data = [(torch.randn(count, width), torch.arange(count) % 10)]
        gk.capture(store, net, data, task=gk.Classification(), split=split, progress=False)
    return store


def main() -> int:
    torch.set_num_threads(1)
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        capture_random_rows(f"{folder}/small", 200, 5, 16)
        cache, python = Path(folder) / "cache", sys.executable
        alone = measure_process([python, "-c", "import torch"], cache)
        print(f"import torch: {alone:.2f} s")
        for name, more in (("methods", []), ("why", [f"{folder}/small", "1"])):
            spent = measure_process([python, "-m", "gradkeep", name, *more], cache)
            print(f"gradkeep {name}: {spent:.2f} s, {spent - alone:+.2f} s (at most +{MORE})")
            missed |= spent - alone > MORE
        for rows, queries, width in ((2000, 100, 64), (20_000, 300, 256), (50_000, 10, 64)):
            store = capture_random_rows(f"{folder}/{rows}", rows, queries, width)
            train, test = (gk.gradients(store, split=split) for split in ("train", "test"))
            gk.query.top(test, train, 10)
            ours = measure_least(lambda: gk.query.top(test, train, 10))  # noqa: B023
            theirs = measure_least(lambda: gk.query.dot(test, train).values.topk(10, dim=1))  # noqa: B023
            label = f"top 10 of {queries} queries among {rows:,} rows"
            print(
                f"{label}: {ours / theirs:.2f} of dot + topk (at most {TOP}); {1e3 * ours:.0f} ms"
            )
            missed |= ours / theirs > TOP
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
