"""Two worker processes against one: seconds of a capture of ResNet-20, and equality of the bytes.

`./x bench workers [WORKERS]`: one thread per process; wall time, because that is what workers save, so
the figure needs as many quiet cores as workers. The load of the machine is printed, and the bar applies
only if it is low. Everything is included: starting processes, importing torch, proving layers in each
process, sealing; these costs do not depend on the number of rows. A single process writes rows while it
computes others, and so uses more than one core: its CPU time divided by the cores limits the speedup.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import xxhash

import gradkeep as gk
from bench.capture import load_pictures
from gradkeep.data import model

ROWS, BATCH = (3072, 12288), 128
BAR, QUIET = 1.8, 0.5


def hash_segments(folder: str) -> dict[str, str]:
    files = sorted(Path(folder).rglob("seg/*.safetensors"))
    return {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files}


def measure_capture(
    net: torch.nn.Module, batches: list, folder: str, **options: int
) -> tuple[float, float]:
    """Return the wall seconds, and the CPU seconds of all processes."""
    started, before = time.perf_counter(), cpu_of_all()
    task = gk.Classification()
    gk.capture(folder, net, batches, task=task, split="train", progress=False, **options)
    return time.perf_counter() - started, cpu_of_all() - before


def cpu_of_all() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compare(net: torch.nn.Module, rows: int, workers: int) -> tuple[float, bool]:
    """Return the speedup by workers, and True if the bytes are equal."""
    batches = load_pictures(rows, BATCH)
    # One folder after the other, because a full page cache slows the next capture.
    with tempfile.TemporaryDirectory() as one:
        alone, by_one = measure_capture(net, batches, one)
        expected = hash_segments(one)
    with tempfile.TemporaryDirectory() as many:
        shared, by_all = measure_capture(net, batches, many, workers=workers)
        same = hash_segments(many) == expected
    most = alone / (by_one / min(workers, os.cpu_count() or 1))
    print(
        f"  {rows:6} rows: one process {alone:6.1f} s ({by_one:.1f} of CPU), {workers} workers "
        f"{shared:6.1f} s ({by_all:.1f} of CPU): {alone / shared:.2f}x of at most {most:.2f}x, "
        f"{'the same bytes' if same else 'OTHER BYTES'}",
        flush=True,
    )
    return alone / shared, same


def main() -> int:
    torch.set_num_threads(1)
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.manual_seed(0)
    net = model("resnet20").eval()
    load = os.getloadavg()[0]
    quiet = load < QUIET
    print(f"ResNet-20, load {load:.1f} on {os.cpu_count()} cores{'' if quiet else ', not quiet'}")
    results = [compare(net, rows, workers) for rows in ROWS]
    print(f"  bar for {ROWS[-1]} rows: {BAR}x")
    return int(not all(same for _, same in results) or (quiet and results[-1][0] < BAR))


if __name__ == "__main__":
    sys.exit(main())
