"""Millions of rows by small codes: recall against the exact answer, seconds and bytes of both.

The rows have what makes them findable: signs of 16,384 numbers that follow from 48 hidden ones, of falling
size, and every seventh sign flipped at random. Made by combining a table of such rows with a table of flips, as
twenty gigabytes of fresh random numbers would take longer than everything else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTES, SMALL, QUERIES, TOP, CANDIDATES = 2048, 64, 20, 10, 5000
FLIPS, FLIPPED = 4096, 1 / 7
RECALL, SECONDS = 0.99, 1.0


@dataclass(frozen=True)
class Rows:
    """How made-up rows come about: signs of mixed hidden numbers, some of them flipped, times a scale."""

    hidden: int
    decay: float
    """The i-th hidden number has size i ** -decay"""
    kinds: int
    spread: float
    """Of the scales' logarithms"""

    def tables(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows `[kinds, 2048]` and flips in bits, and unrounded queries `[Q, 16384]`."""
        size = 8 * BYTES
        sizes = np.arange(1, self.hidden + 1, dtype=np.float32) ** -self.decay
        mix = rng.standard_normal((self.hidden, size), np.float32) * sizes[:, None]
        kinds = np.empty((self.kinds, BYTES), np.uint8)
        for part in np.array_split(kinds, -(-self.kinds // 1000)):
            numbers = rng.standard_normal((len(part), self.hidden), np.float32) @ mix
            part[:] = np.packbits(numbers > 0, axis=1, bitorder="little")
        flips = np.packbits(rng.random((FLIPS, size), np.float32) < FLIPPED, axis=1)
        wanted = np.sign(rng.standard_normal((QUERIES, self.hidden), np.float32) @ mix)
        return kinds, flips, wanted + rng.standard_normal(wanted.shape, np.float32)


ROWS = {
    "few": Rows(hidden=48, decay=0.4, kinds=50_000, spread=0.4),
    "slow": Rows(hidden=1024, decay=0.5, kinds=100_000, spread=1.0),
}


def make(folder: Path, rows: int, kind: str) -> None:
    import gradkeep as gk
    import gradkeep.store as gs
    from bench.search import bits_schema

    rng, made = np.random.default_rng(0), ROWS[kind]
    kinds, flips, wanted = made.tables(rng)
    store = gk.open(folder / "store", durability="process")
    with store.write(gs.CaptureKey("final", "train"), bits_schema(1, rows, 0)) as writer:
        for start in range(0, rows, 16_384):
            count = min(rows - start, 16_384)
            codes = kinds[rng.integers(len(kinds), size=count)]
            codes ^= flips[rng.integers(FLIPS, size=count)]
            scales = np.exp(made.spread * rng.standard_normal(count)).astype(np.float32)
            writer.append(np.arange(start, start + count), {"layer.bits": codes, "scale": scales})
    with store.write(gs.CaptureKey("final", "test"), bits_schema(32, QUERIES, 0)) as writer:
        writer.append(np.arange(QUERIES), {"layer.bits": wanted})


def one(what: str, folder: Path) -> None:
    """One part in a process of its own; prints what it took and found."""
    import torch

    import gradkeep as gk

    torch.set_num_threads(os.cpu_count() or 1)
    train, test = (gk.gradients(folder / "store", split=split) for split in ("train", "test"))
    gk.query.machine_speeds()
    started, cpu = time.perf_counter(), time.process_time()
    told: dict[str, object] = {}
    if what == "exact":
        told["ids"] = gk.query.top(test, train, TOP, memory_budget="1GiB").ids.tolist()
    else:
        codes = gk.query.small_codes(train, bytes=SMALL)
        told["share"], told["ready"] = codes.share, time.perf_counter() - started
        if what == "codes":
            gk.query.top(test, train, TOP, codes=codes, ids=[0], candidates=CANDIDATES)
            each = []
            for query in range(QUERIES):
                started = time.perf_counter()
                gk.query.top(test, train, TOP, codes=codes, ids=[query], candidates=CANDIDATES)
                each.append(time.perf_counter() - started)
            told["each"] = each
            started, cpu = time.perf_counter(), time.process_time()
            told["ids"] = gk.query.top(
                test, train, TOP, codes=codes, candidates=CANDIDATES
            ).ids.tolist()
    told |= {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    lines = Path("/proc/self/status").read_text().splitlines()
    told["peak"] = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))
    print(json.dumps(told))


def _apart(what: str, folder: Path) -> dict:
    command = [sys.executable, "-m", "bench.search", "--codes", what, "--folder", str(folder)]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def compare(rows: int, folder: Path | None) -> int:
    base = Path(tempfile.mkdtemp(prefix="gradkeep-search-", dir=folder))
    try:
        started = time.perf_counter()
        make(base, rows)
        print(
            f"{rows:,} rows of {BYTES} B made in {time.perf_counter() - started:.0f} s", flush=True
        )
        built = _apart("build", base)
        found = _apart("codes", base)
        print(
            f"codes of {SMALL} B: made once in {built['wall']:.0f} s, read in {found['ready']:.1f} s, "
            f"{found['share']:.2f} of squared lengths; {rows * SMALL / 1e6:.0f} MB for "
            f"{rows * BYTES / 1e9:.1f} GB, peak memory {found['peak'] >> 20} MiB",
            flush=True,
        )
        exact = _apart("exact", base)
        pairs = zip(found["ids"], exact["ids"], strict=True)
        recall = float(np.mean([len(set(a) & set(b)) / TOP for a, b in pairs]))
        slowest, usual = max(found["each"]), float(np.median(found["each"]))
        print(
            f"one query, top {TOP} of {CANDIDATES} candidates: {usual:.2f} s of wall, the slowest of "
            f"{QUERIES} {slowest:.2f} (at most {SECONDS}); {QUERIES} at once {found['wall']:.2f} s; "
            f"the exact answer {exact['wall']:.0f} s"
        )
        print(f"recall@{TOP} against the exact answer: {recall:.3f} (at least {RECALL})")
        return int(recall < RECALL or usual > SECONDS)
    finally:
        shutil.rmtree(base)
