"""Search millions of rows by small codes: recall against the exact answer, seconds, bytes and build cost.

Synthetic rows are signs of 16,384 values computed from hidden ones, every seventh flipped at random,
times a scale: of 48 hidden values (`few`), or of 1024 that decrease slowly, with scales that differ
a hundredfold (`slow`). They combine a table of such rows with a table of flips, because twenty
gigabytes of fresh random numbers would take longer than everything else. Real rows (`--kind STORE`)
are the rows of a capture, repeated, with every tenth byte of each taken from another row; the
queries are its split `test`.
"""

from __future__ import annotations

import dataclasses
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

BYTES, SMALL, QUERIES, TOP = 2048, 64, 20, 10
FLIPS, FLIPPED, MIXED = 4096, 1 / 7, 0.1
RECALL, SECONDS = 0.99, 1.0


@dataclass(frozen=True)
class Rows:
    """Recipe of synthetic rows: signs of mixed hidden values, some of them flipped, times a
    scale."""

    hidden: int
    decay: float
    """The i-th hidden value has size i ** -decay."""
    kinds: int
    spread: float
    """Standard deviation of the logarithms of the scales."""

    def tables(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows `[kinds, 2048]` and flips in bits, and unrounded queries `[Q, 16384]`."""
        size = 8 * BYTES
        sizes = np.arange(1, self.hidden + 1, dtype=np.float32) ** -self.decay
        mix = rng.standard_normal((self.hidden, size), np.float32) * sizes[:, None]
        kinds = np.empty((self.kinds, BYTES), np.uint8)
        for part in np.array_split(kinds, -(-self.kinds // 1000)):
            numbers = rng.standard_normal((len(part), self.hidden), np.float32) @ mix
            part[:] = np.packbits(numbers > 0, axis=1, bitorder="little")
        flips = np.packbits(rng.random((FLIPS, size), np.float32) < FLIPPED, axis=1)
        queries = np.sign(rng.standard_normal((QUERIES, self.hidden), np.float32) @ mix)
        return kinds, flips, queries + rng.standard_normal(queries.shape, np.float32)


ROWS = {
    "few": Rows(hidden=48, decay=0.4, kinds=50_000, spread=0.4),
    "slow": Rows(hidden=1024, decay=0.5, kinds=100_000, spread=1.0),
}


def write_synthetic_rows(folder: Path, rows: int, kind: str) -> None:
    import gradkeep as gk
    import gradkeep.store as gs
    from bench.search import bits_schema

    rng, recipe = np.random.default_rng(0), ROWS[kind]
    kinds, flips, queries = recipe.tables(rng)
    store = gk.open(folder / "store", durability="process")
    with store.write(gs.CaptureKey("final", "train"), bits_schema(1, rows, 0)) as writer:
        for start in range(0, rows, 16_384):
            count = min(rows - start, 16_384)
            codes = kinds[rng.integers(len(kinds), size=count)]
            codes ^= flips[rng.integers(FLIPS, size=count)]
            scales = np.exp(recipe.spread * rng.standard_normal(count)).astype(np.float32)
            writer.append(np.arange(start, start + count), {"layer.bits": codes, "scale": scales})
    with store.write(gs.CaptureKey("final", "test"), bits_schema(32, QUERIES, 0)) as writer:
        writer.append(np.arange(QUERIES), {"layer.bits": queries})


def write_repeated_rows(source: str, folder: Path, rows: int) -> None:
    """Write the rows of a capture repeatedly, mixed with bytes of other rows."""
    import gradkeep as gk

    train, test = (gk.gradients(source, split=split) for split in ("train", "test"))
    names = list(dict.fromkeys(array for form in train.forms.values() for array in form.arrays))
    names += ["slope"] if "slope" in train.block.names else []
    table = {name: np.array(train.block.column(name)) for name in names}
    packed = [name for name in names if table[name].ndim > 1]
    rng = np.random.default_rng(0)
    schema = dataclasses.replace(
        train.block.schema,
        arrays=tuple(a for a in train.block.schema.arrays if a.name in names),
        num_rows=rows,
        num_examples=None,
    )
    store = gk.open(folder / "store", durability="process")
    with store.write(train.key, schema) as writer:
        for start in range(0, rows, 16_384):
            count = min(rows - start, 16_384)
            chosen, other = rng.integers(len(train), size=(2, count))
            some = {name: table[name][chosen] for name in names}
            for name in packed:
                mixed = rng.random(some[name].shape, np.float32) < MIXED
                np.copyto(some[name], table[name][other], where=mixed)
            writer.append(np.arange(start, start + count), some)
    query_rows = test.block.read_rows(np.arange(QUERIES))
    schema = dataclasses.replace(test.block.schema, num_rows=QUERIES, num_examples=None)
    with store.write(test.key, schema) as writer:
        arrays = {column.array.name: query_rows[column.array.name] for column in query_rows.columns}
        writer.append(np.arange(QUERIES), arrays)


def measure_part(what: str, folder: Path) -> None:
    """Run one part in this process and print its figures as JSON."""
    import torch

    import gradkeep as gk

    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    started, cpu = time.perf_counter(), time.process_time()
    train, test = (gk.gradients(folder / "store", split=split) for split in ("train", "test"))
    figures: dict[str, object] = {}
    if what == "exact":
        figures["ids"] = gk.query.top(test, train, TOP, memory_budget="1GiB").ids.tolist()
    else:
        codes = gk.query.small_codes(train, bytes=SMALL)
        figures["share"], figures["ready"] = codes.share, time.perf_counter() - started
    figures |= {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    if what == "codes":
        for name in ("first", "again"):
            each = []
            for query in test.ids.tolist():
                started, cpu = time.perf_counter(), time.process_time()
                gk.query.top(test, train, TOP, codes=codes, ids=[query])
                each.append((time.perf_counter() - started, time.process_time() - cpu))
            figures[name] = each
        started = time.perf_counter()
        figures["ids"] = gk.query.top(test, train, TOP, codes=codes).ids.tolist()
        figures["together"] = time.perf_counter() - started
    lines = Path("/proc/self/status").read_text().splitlines()
    figures["peak"] = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))
    print(json.dumps(figures))


def _run_subprocess(what: str, folder: Path, threads: int) -> dict:
    command = [sys.executable, "-m", "bench.search", "--codes", what, "--folder", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def measure_codes(rows: int, folder: Path | None, kind: str, threads: int) -> int:
    """Measure one kind of rows; an existing store in `folder` is reused and not deleted."""
    is_new = folder is None or not (folder / "store").exists()
    base = Path(tempfile.mkdtemp(prefix="gradkeep-search-", dir=folder)) if is_new else folder
    assert base is not None
    try:
        started = time.perf_counter()
        if is_new and kind in ROWS:
            write_synthetic_rows(base, rows, kind)
        elif is_new:
            write_repeated_rows(kind, base, rows)
        print(
            f"{rows:,} rows, {kind}: ready after {time.perf_counter() - started:.0f} s", flush=True
        )
        return _report(rows, base, threads)
    finally:
        if is_new:
            shutil.rmtree(base)


def _report(rows: int, base: Path, threads: int) -> int:
    from bench.search import drop_pages

    built = _run_subprocess("build", base, threads)
    print(
        f"codes of {SMALL} B built in {built['wall']:.0f} s of wall, {built['cpu']:.0f} s of CPU, peak "
        f"memory {built['peak'] >> 20} MiB; {built['share']:.2f} of squared lengths; "
        f"{rows * SMALL / 1e6:.0f} MB for {rows * BYTES / 1e9:.1f} GB",
        flush=True,
    )
    exact = _run_subprocess("exact", base, threads)
    warm = _run_subprocess("codes", base, threads)
    drop_pages(base)
    cold = _run_subprocess("codes", base, threads)
    pairs = zip(warm["ids"], exact["ids"], strict=True)
    shares = [len(set(a) & set(b)) / TOP for a, b in pairs]
    recall = float(np.mean(shares))
    for name, figures in (("files in memory", warm), ("files on disk", cold)):
        wall, cpu = np.array(figures["first"]).T
        print(
            f"{name}: codes read in {figures['ready']:.2f} s; the first query {wall[0]:.2f} s of wall, then "
            f"{np.median(wall[1:]):.2f} (slowest {wall[1:].max():.2f}), {np.median(cpu[1:]):.2f} s of CPU; "
            f"repeated {np.median(np.array(figures['again'])[:, 0]):.2f} s; {len(shares)} at once "
            f"{figures['together']:.2f} s; peak memory {figures['peak'] >> 20} MiB"
        )
    usual = float(np.median(np.array(warm["first"])[1:, 0]))
    print(
        f"one query: {usual:.2f} s of wall (at most {SECONDS}); all exactly {exact['wall']:.0f} s"
    )
    print(
        f"recall@{TOP} against the exact answer: {recall:.3f} (at least {RECALL}), worst query "
        f"{min(shares):.1f}"
    )
    return int(recall < RECALL or usual > SECONDS)
