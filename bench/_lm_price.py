"""Cost of capturing language models, relative to plain passes in the same run.

A GPT of 4 x 256 with a tied head, a Llama of that size (grouped queries, SwiGLU), and LoRA adapters
of rank 8 in all layers of the GPT; 4096 tokens drawn by Zipf's law, T = 128. CPU time of one thread,
plain passes and captures alternating; peak memory is measured in separate processes.
`python -m bench._lm_price MODEL WHAT` is such a process: it does one task and prints its peak.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from bench._lm_truth import Llama
from gradkeep.data import GPT

VOCABULARY, LENGTH, BATCH = 4096, 128, 16
RANK = 8
SIZES = ("4KiB", "16KiB")
FEW_ROWS = 128
"""Rows for measurements that are slow or do not depend on rows: exact captures, bases, peak
memory."""
ROWS = 2000
"""Rows that the bars refer to: with fewer rows, the basis is a larger share of the price."""
PRICE, EXACT_PRICE, MEMORY = 1.3, 2.0, 1.3
"""Bars relative to a plain forward and backward pass, and to training with Adam."""


def build_gpt() -> nn.Module:
    return GPT(vocabulary=VOCABULARY, length=LENGTH, dim=256, heads=4, layers=4, tied=True)


def build_llama() -> nn.Module:
    return Llama(256, 688, 4, 8, 4, VOCABULARY)


def build_lora() -> nn.Module:
    """Freeze the GPT and add a low-rank pair of layers beside each linear layer of its blocks."""
    model = build_gpt().requires_grad_(requires_grad=False)
    for block in model.h:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(block.get_submodule(parent), own, Adapted(layer))
    return model


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter whose weights are not zero, as after some training."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": build_gpt,
    "llama": build_llama,
    "lora": build_lora,
}
NAMES = {
    "gpt": "GPT 4x256, tied",
    "llama": "Llama 4x256, GQA, SwiGLU",
    "lora": f"LoRA of rank {RANK} in GPT 4x256",
}


def build_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def draw_tokens(rows: int) -> torch.Tensor:
    """Draw tokens `[rows, LENGTH]`; the first rows do not depend on `rows`."""
    chances = 1 / np.arange(1, VOCABULARY + 1)
    rng = np.random.default_rng(0)
    drawn = rng.choice(VOCABULARY, size=(rows, LENGTH), p=chances / chances.sum())
    return torch.from_numpy(drawn)


def run_plain_passes(net: nn.Module, batches: list[torch.Tensor]) -> None:
    """Compute gradients of the summed loss, without a copy of the logits."""
    for batch in batches:
        net.zero_grad(set_to_none=True)
        _loss(net, batch).backward()


def _loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    targets = F.pad(batch[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(net(batch).flatten(0, 1), targets.flatten(), reduction="sum")


def train_with_adam(net: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.Adam([one for one in net.parameters() if one.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        _loss(net, batch).backward()
        optimizer.step()


def capture(
    store: gk.Store, net: nn.Module, batches: list[torch.Tensor], keep: str, split: str = "train"
) -> gk.Captured:
    task = gk.LanguageModeling()
    return gk.capture(store, net, batches, task=task, keep=keep, split=split, progress=False)


def cpu_seconds(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


@dataclass(frozen=True)
class Price:
    """Cost of one capture."""

    keep: str
    rows: int
    ratio: float
    """CPU time of the whole capture over that of a plain pass over its rows, median of the
    rounds."""
    least: float
    most: float
    basis: float
    """Part of the ratio that computing the basis takes."""
    row_bytes: float
    plain: float
    """CPU seconds of the plain pass per 1000 tokens."""

    @property
    def ratio_of_bar_rows(self) -> float:
        """Ratio for the number of rows that the bars refer to; the basis is computed once."""
        return self.ratio - self.basis + self.basis * min(1.0, self.rows / ROWS)


def measure_price(net: nn.Module, keep: str, rows: int, rounds: int) -> Price:
    """Time each capture between two plain passes and divide by their mean."""
    batches = list(draw_tokens(rows).split(BATCH))
    few = batches[: -(-FEW_ROWS // BATCH)]
    passes = batches if len(batches) <= 2 * len(few) else batches[: len(batches) // 4]
    scale = len(torch.cat(passes)) / rows
    ratios, row_bytes, spent = [], 0.0, []
    before = cpu_seconds(lambda: run_plain_passes(net, passes))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
            store = gk.open(place)
            began = time.process_time()
            report = capture(store, net, batches, keep)
            took = time.process_time() - began
            row_bytes = report.bytes / report.rows
        net.zero_grad(set_to_none=True)
        after = cpu_seconds(lambda: run_plain_passes(net, passes))
        ratios.append(took * scale / ((before + after) / 2))
        spent += [before, after]
        before = after
    whole = statistics.median(spent) / scale
    basis = 0.0 if keep == "exact" else measure_basis_seconds(net, few, keep) / whole
    ratio = statistics.median(ratios)
    each = 1000 * whole / (rows * LENGTH)
    return Price(keep, rows, ratio, min(ratios), max(ratios), basis, row_bytes, each)


def measure_basis_seconds(net: nn.Module, batches: list[torch.Tensor], keep: str) -> float:
    """Return the CPU time of a capture that computes the basis, minus one that reuses it."""
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        store = gk.open(place)
        first = cpu_seconds(lambda: capture(store, net, batches, keep))
        return first - cpu_seconds(lambda: capture(store, net, batches, keep, split="again"))


def measure_peak(name: str, what: str) -> tuple[float, float]:
    """Return the peak MiB of a separate process, and the part of it above the imports."""
    command = [sys.executable, "-m", "bench._lm_price", name, what]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(output[-2]), float(output[-1])


def compare_prices(name: str, rows: int, rounds: int) -> bool:
    """Print the prices of one model; return True if a bar is missed."""
    net = build_model(name)
    trained = sum(one.numel() for one in net.parameters() if one.requires_grad)
    print(f"\n{NAMES[name]}: {trained:,} trained parameters, T={LENGTH}, batches of {BATCH}")
    run_plain_passes(net, list(draw_tokens(BATCH).split(BATCH)))
    missed, first = False, True
    for keep in ("exact", *SIZES):
        price = measure_price(net, keep, FEW_ROWS if keep == "exact" else rows, rounds)
        if first:
            print(f"  a plain forward and backward pass: {price.plain:.3f} CPU s for 1000 tokens")
            first = False
        bar = EXACT_PRICE if keep == "exact" else PRICE
        is_missed = price.ratio_of_bar_rows > bar
        promised = float("inf") if keep == "exact" else gk.Keep(keep).row_bytes
        large = price.row_bytes > promised
        print(
            f"  keep={keep:6} {price.rows:>5} rows: {price.ratio:.2f} x a plain pass "
            f"[{price.least:.2f}, {price.most:.2f}], {price.basis:.2f} of it for the basis;"
            f" {price.ratio_of_bar_rows:.2f} for {ROWS} rows {'MISSES' if is_missed else 'reaches'} {bar};"
            f" {price.row_bytes:,.0f} bytes per row"
            f"{' MISSES the requested bytes' if large else ''}",
            flush=True,
        )
        missed |= is_missed or large
    return missed


def compare_memory(name: str) -> bool:
    """Print the peak memory of one model; return True if a bar is missed."""
    missed = False
    print(f"\n{NAMES[name]}: peak memory of {FEW_ROWS} rows in batches of {BATCH}")
    whole, own = measure_peak(name, "train")
    print(f"  training with Adam {whole:.0f} MiB, {own:.0f} of it after the imports")
    for keep in ("exact", *SIZES):
        most, more = measure_peak(name, keep)
        is_missed = most > MEMORY * whole
        print(
            f"  keep={keep:6} {most:.0f} MiB, {more:.0f}: {most / whole:.2f} x, {more / own:.2f} x"
            f" {'MISSES' if is_missed else 'reaches'} {MEMORY}",
            flush=True,
        )
        missed |= is_missed
    return missed


def main(name: str, what: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", gk.CaptureWarning)
    net, batches = build_model(name), list(draw_tokens(FEW_ROWS).split(BATCH))
    imported = _read_peak()
    if what == "train":
        train_with_adam(net.train(), batches)
    else:
        with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
            capture(gk.open(place), net, batches, what)
    most = _read_peak()
    print(most, most - imported)


def _read_peak() -> float:
    """Return the peak MiB of this process; `ru_maxrss` would include the peak of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
