"""LDS of the kernel method below and above 10,000 training rows, solved exactly and by a sketch.

`./x bench kernel [ROWS ...]`: MNIST digits of 14 x 14, an MLP 196-64-10, models retrained on random
halves. Prints for each number of rows the LDS of the exact kernel and of the one in 4,096 random
dimensions, with 95 % intervals, the share of the ceiling and the CPU seconds of the query. The exact
one must not be below the sketch. With many rows both have a lower LDS, because each row matters less.
Skipped without the MNIST files.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings

import numpy as np
import torch
from torch.nn import functional as F

import gradkeep as gk
from bench import _lds_truth
from gradkeep.data import dataset

SIZES = (5_000, 16_000)
TESTS, SUBSETS, SEEDS, EPOCHS = 300, 40, 4, 10
SOLVERS = {"exact": {}, "dim=4096": {"dim": 4096}}


def build_setting(rows: int) -> _lds_truth.Setting:
    parts = []
    for split, count in (("train", rows), ("test", TESTS)):
        source = dataset("idx", _lds_truth.DATA / "mnist", split)
        chosen = np.random.default_rng(1).permutation(len(source))[:count]
        drawn = [source[int(row)] for row in chosen]
        images = torch.stack([torch.as_tensor(row[0]).float().reshape(28, 28) for row in drawn])
        small = F.avg_pool2d(images.unsqueeze(1), 2).flatten(1)
        parts.append((small, torch.tensor([int(row[1]) for row in drawn])))
    make = _lds_truth.mlp(196, 64)
    return _lds_truth.Setting(f"{rows}", parts[0], parts[1], make, epochs=EPOCHS, batch_size=64)


def measure(rows: int) -> dict[str, float]:
    """Return the LDS of each solver."""
    settings = build_setting(rows)
    began = time.process_time()
    truth = _lds_truth.compute_truth(settings, subsets=SUBSETS, seeds=SEEDS)
    full = _lds_truth.train_full_runs(settings, 1, keep=(EPOCHS,))
    net = settings.make()
    net.load_state_dict({name: value[0] for name, value in full.states[EPOCHS].items()})
    print(
        f"{rows:,} rows: {SUBSETS} halves x {SEEDS} seeds in {time.process_time() - began:.0f} CPU s, "
        f"{full.accuracy:.1%} right, ceiling {truth.ceiling:.3f}",
        flush=True,
    )
    lds_by_solver = {}
    with tempfile.TemporaryDirectory() as folder:
        for split, batch in (("train", settings.train), ("test", settings.test)):
            task = gk.Classification()
            gk.capture(folder, net, [batch], task=task, split=split, progress=False)
        for name, options in SOLVERS.items():
            began = time.process_time()
            scores = gk.attribute(folder, method="kernel", **options)
            took = time.process_time() - began
            mean, low, high = _lds_truth.compute_lds(scores.values, truth)
            lds_by_solver[name] = mean
            solved = "" if scores.solved is None else f", {scores.solved}"
            print(
                f"  {name:10} {mean:.3f} [{low:.3f}, {high:.3f}], {mean / truth.ceiling:.0%} of the "
                f"ceiling, {took:.0f} CPU s{solved}",
                flush=True,
            )
    return lds_by_solver


def main(arguments: list[str]) -> int:
    if not (_lds_truth.DATA / "mnist").exists():
        print("skipped, no MNIST files under GRADKEEP_DATA")
        return 0
    lower = False
    for rows in arguments or SIZES:
        lds_by_solver = measure(int(rows))
        lower |= lds_by_solver["exact"] < lds_by_solver["dim=4096"]
    print(f"the exact kernel is {'LOWER' if lower else 'nowhere lower'} than the sketch")
    return int(lower)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    sys.exit(main(sys.argv[1:]))
