"""Time and memory of every method and kernel solver, from 1,000 to 64,000 training rows.

`./x bench scaling [METHOD ...] [--quick]`: one thread, CPU time of the query from disk, and peak memory
above that of a process that has only imported everything; each cell in a separate process with a
budget of 2 GiB. Rows have 64 values, the model is an MLP 64-128-64-10 with 17,226 parameters, there
are 100 queries. The first line is the cost of capturing. A cell that would exceed the time limit, as
predicted from the previous size, is skipped and listed. If several kernel solvers were measured, the
ranks of their scores are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep._ranks import column_correlations

SIZES = (1_000, 4_000, 20_000, 64_000)
QUICK = (1_000, 4_000)
QUERIES, BUDGET = 100, 2 << 30
RESIDUAL, AGREEMENT, NEEDED = 1e-4, 0.999, 20_000
LIMIT = 150.0  # CPU seconds per cell
SLOPES = {"kernel, cholesky": 3.0, "influence": 2.0, "datainf": 2.0}
"""Exponent of a method's time in the number of rows; 1.1 for all others."""
LEAST = {"kernel, parameters": 20_000}


@dataclass(frozen=True)
class Cell:
    """A method with its options."""

    name: str
    method: str
    options: dict[str, object]


CELLS = (
    *(Cell(name, name, {}) for name in ("dot", "cos", "self")),
    Cell("tracin", "tracin", {"lrs": [0.1]}),
    Cell("kernel", "kernel", {}),
    Cell("kernel, cholesky", "kernel", {"solver": "cholesky"}),
    Cell("kernel, parameters", "kernel", {"solver": "parameters"}),
    Cell("kernel, cg", "kernel", {"solver": "cg"}),
    Cell("kernel, dim=2048", "kernel", {"dim": 2048}),
    *(Cell(name, name, {}) for name in ("trak", "logra", "kfac", "ekfac", "datainf")),
    Cell("influence", "influence", {"curvature": "fisher"}),
    Cell("arnoldi", "arnoldi", {"curvature": "fisher"}),
    *(
        Cell(name, name, {})
        for name in ("similarity", "knn-shapley", "random", "loss", "label-match")
    ),
)


def draw_rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ten overlapping classes in 64 values, with some wrong labels."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draws)
    values = 0.7 * centres[labels] + torch.randn(count, 64, generator=draws)
    wrong = torch.rand(count, generator=draws) < 0.05
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draws)
    return values, labels


def build_store(folder: Path, count: int) -> float:
    """Build a store with both splits; return the CPU seconds of the captures."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    x, y = draw_rows(count, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(600):
        some = torch.randint(count, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(net(x[some]), y[some]).backward()
        optimizer.step()
    net.eval()
    store = gk.open(folder, durability="process")
    started = time.process_time()
    for split, data in (("train", (x, y)), ("test", draw_rows(QUERIES, 2))):
        batches = list(zip(data[0].split(1024), data[1].split(1024), strict=True))
        gk.capture(
            store,
            net,
            batches,
            task=gk.Classification(),
            split=split,
            embeddings=["2"],
            progress=False,
        )
    return time.process_time() - started


def measure_cell(folder: Path, name: str, out: Path) -> None:
    """Run a query in this process, and print its figures as JSON."""

    cell = next(cell for cell in CELLS if cell.name == name)
    gk.methods()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _bytes("VmRSS")
    started, wall = time.process_time(), time.perf_counter()
    scores = gk.attribute(folder, method=cell.method, memory_budget=BUDGET, **cell.options)
    figures = {
        "cpu": time.process_time() - started,
        "wall": time.perf_counter() - wall,
        "bytes": _bytes("VmHWM") - before,
        "solved": scores.solved,
        "approximate": scores.approximate,
    }
    np.save(out, scores.numpy()[:20])
    print(json.dumps(figures))


def _bytes(what: str) -> int:
    """Return a line of this process's memory status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{what}:")))


def run_subprocess(folder: Path, name: str, out: Path, limit: float) -> dict | str:
    command = [sys.executable, "-m", "bench.scaling", "--one", name, "--folder", str(folder)]
    try:
        done = subprocess.run(
            [*command, "--out", str(out)], capture_output=True, text=True, timeout=3 * limit
        )
    except subprocess.TimeoutExpired:
        return f"over {3 * limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def predict_seconds(known: dict[int, dict | str], size: int, power: float) -> float:
    """Predict the time of a cell from the last size; infinite if that one failed."""
    if not known:
        return 0.0
    last = max(known)
    cell = known[last]
    return cell["cpu"] * (size / last) ** power if isinstance(cell, dict) else float("inf")


def compute_agreement(one: Path, other: Path) -> tuple[float, float]:
    correlations = column_correlations(np.load(one).T, np.load(other).T)
    return float(correlations.mean()), float(correlations.min())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", help="methods to measure; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--one")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        measure_cell(options.folder, options.one, options.out)
        return 0
    sizes = tuple(options.sizes or (QUICK if options.quick else SIZES))
    cells = [cell for cell in CELLS if not options.methods or cell.method in options.methods]
    table: dict[str, dict[int, dict | str]] = {cell.name: {} for cell in cells}
    captured, skipped, missed = {}, [], []
    base = Path(tempfile.mkdtemp(prefix="gradkeep-scaling-"))
    try:
        for size in sizes:
            folder = base / str(size)
            captured[size] = build_store(folder, size)
            for cell in cells:
                guess = predict_seconds(table[cell.name], size, SLOPES.get(cell.name, 1.1))
                if size < LEAST.get(cell.name, 0):
                    skipped.append(f"{cell.name} of {size:,} rows (fewer than parameters)")
                elif guess > options.limit:
                    skipped.append(f"{cell.name} of {size:,} rows (about {guess:.0f} s)")
                else:
                    out = base / f"{size} {cell.name}.npy"
                    figures = table[cell.name][size] = run_subprocess(
                        folder, cell.name, out, options.limit
                    )
                    print(f"  {size:,} rows, {cell.name}: {format_cell(figures)}", file=sys.stderr)
            missed += compare_solvers(base, size, table)
        print_table(sizes, table, captured)
    finally:
        shutil.rmtree(base)
    if skipped:
        print("skipped for time: " + "; ".join(skipped))
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed))


def compare_solvers(base: Path, size: int, table: dict[str, dict[int, dict | str]]) -> list[str]:
    """Compare the kernel solvers, and return what is out of bounds."""
    missed = []
    kernel = table.get("kernel", {}).get(size)
    if isinstance(kernel, dict):
        print(f"{size:,} rows: kernel by {kernel['solved']}")
        if size <= NEEDED and kernel["bytes"] > BUDGET:
            missed.append(f"kernel of {size:,} rows took {kernel['bytes'] >> 20} MiB")
    for name in ("kernel, cholesky", "kernel, parameters", "kernel, cg", "kernel, dim=2048"):
        if not isinstance(kernel, dict) or not isinstance(table[name].get(size), dict):
            continue
        mean, least = compute_agreement(base / f"{size} {name}.npy", base / f"{size} kernel.npy")
        cell = table[name][size]
        assert isinstance(cell, dict)
        print(
            f"  {name}: rank agreement with kernel {mean:.5f}, least {least:.5f}; "
            f"{cell['approximate'] or cell['solved']}"
        )
        if "dim" not in name and least < AGREEMENT:
            missed.append(f"{name} of {size:,} rows agrees {least:.5f}, not {AGREEMENT}")
    return missed


def format_cell(cell: dict | str) -> str:
    """Return CPU seconds and MiB of a cell, or the error."""
    return cell if isinstance(cell, str) else f"{cell['cpu']:.2f} / {cell['bytes'] / 2**20:.0f}"


def print_table(
    sizes: tuple[int, ...], table: dict[str, dict[int, dict | str]], captured: dict[int, float]
) -> None:
    print(
        f"\n| CPU s / peak MiB, {QUERIES} queries | "
        + " | ".join(f"{n:,} rows" for n in sizes)
        + " |"
    )
    print("| --- |" + " --- |" * len(sizes))
    print("| capture | " + " | ".join(f"{captured[n]:.1f} s" for n in sizes) + " |")
    for name, cells in table.items():
        parts = []
        for size in sizes:
            cell = cells.get(size)
            parts.append("-" if cell is None else format_cell(cell))
        print(f"| `{name}` | " + " | ".join(parts) + " |")


if __name__ == "__main__":
    sys.exit(main())
