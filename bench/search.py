"""The top rows of many queries over compressed rows on disk, against numpy on the same bytes.

Rows are 2 KiB of codes, in segments as `gk.capture(keep="2KiB")` writes them: 16,384 coordinates of one
bit, or with `--group 128` the largest of each 128 coordinates in a byte. Queries are not rounded. numpy
maps one file of all codes and goes through it by blocks, of the size that is fastest here: it unpacks bits
and multiplies in float32, or looks bytes up in a table for each group; the largest are kept by
argpartition. Both run in turn, in processes of their own: CPU time, peak memory, and the same ids; with
the files in the page cache (warm), then each time with their pages dropped before (cold), CPU and wall.
`./x bench search [--rows N] [--group 128]`

`./x bench search --codes [--rows 10000000] [--kind few|slow|STORE]` finds candidates by codes of 64 bytes and
ranks them by exact products: recall against the exact answer, seconds, bytes, what codes cost to make.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import _search_codes

BYTES, QUERIES, TOP = 2048, 50, 10
SEGMENT = 1024  # rows, as a capture of coordinates has them
BLOCKS = (256, 512, 1024, 2048, 4096)
BAR, MEMORY = 1.5, 1 << 30


def size_of(group: int) -> int:
    """Coordinates of a row."""
    return BYTES * (group or 8)


def bits_schema(bits: int, count: int, group: int) -> Any:
    """Of a capture that keeps one layer in so many bits a coordinate."""
    import gradkeep.store as gs
    from gradkeep.factors._bits import Bits
    from gradkeep.factors._form import Parameter, form_to_fields

    size, packed = size_of(group), bits == 1
    form = Bits(
        (Parameter("w", (size,)),),
        "layer.bits",
        "scale" if packed else "",
        size,
        bits,
        "b",
        group=group if packed else 0,
    )
    codes = {"dtype": "uint8", "shape": (BYTES,)} if packed else {"shape": (size,)}
    arrays = [gs.Array("layer.bits", kind="projection", layer="layer", **codes)]
    if packed:
        arrays.append(gs.Array("scale", kind="projection", layer="layer"))
    return gs.Schema(
        tuple(arrays),
        num_rows=count,
        rows_per_segment=SEGMENT,
        layers=(gs.Layer("layer", "Linear", size, form_to_fields(form)),),
        fingerprints={"weights": "w", "task": "t", "of": "loss", "basis": "b"},
    )


def make(folder: Path, rows: int, group: int) -> None:
    """A store of `rows` random rows and some queries, and the same as plain files."""
    import torch

    import gradkeep as gk
    import gradkeep.store as gs

    rng = np.random.default_rng(0)
    store = gk.open(folder / "store", durability="process")
    scales = rng.uniform(0.5, 2, rows).astype(np.float32)
    with (
        store.write(gs.CaptureKey("final", "train"), bits_schema(1, rows, group)) as writer,
        open(folder / "codes", "wb") as file,
    ):
        for start in range(0, rows, 16 * SEGMENT):
            stop = min(rows, start + 16 * SEGMENT)
            codes = rng.integers(0, 256, (stop - start, BYTES), np.uint8)
            file.write(codes)
            values = {"layer.bits": codes, "scale": scales[start:stop]}
            writer.append(np.arange(start, stop), values)
    np.save(folder / "scales.npy", scales)
    queries = torch.randn(
        QUERIES, size_of(group), generator=torch.Generator().manual_seed(1)
    ).numpy()
    with store.write(gs.CaptureKey("final", "test"), bits_schema(32, QUERIES, group)) as writer:
        writer.append(np.arange(QUERIES), {"layer.bits": queries})
    np.save(folder / "queries.npy", queries)


def ours(folder: Path, budget: int) -> np.ndarray:
    import gradkeep as gk

    train, test = (gk.gradients(folder / "store", split=split) for split in ("train", "test"))
    return gk.query.top(test, train, TOP, memory_budget=budget).ids.numpy()


def by_numpy(folder: Path, block: int, group: int, rows: int | None = None) -> np.ndarray:
    """Ids `[Q, k]` of the largest, falling; equal ones in the order of rows."""
    queries, scales = np.load(folder / "queries.npy"), np.load(folder / "scales.npy")
    codes = np.memmap(folder / "codes", np.uint8, "r").reshape(-1, BYTES)[:rows]
    products = look_ups(queries, group) if group else unpacked_products(queries, block)
    best = np.full((QUERIES, TOP), -np.inf, np.float32)
    ids = np.zeros((QUERIES, TOP), np.int64)
    for start in range(0, len(codes), block):
        part = codes[start : start + block]
        scores = products(part) * scales[start : start + len(part)]
        both = np.concatenate([best, scores], 1)
        numbers = np.arange(start, start + len(part))
        numbers = np.concatenate([ids, np.broadcast_to(numbers, scores.shape)], 1)
        chosen = np.sort(np.argpartition(both, -TOP, 1)[:, -TOP:], 1)
        best, ids = np.take_along_axis(both, chosen, 1), np.take_along_axis(numbers, chosen, 1)
    order = np.argsort(-best, 1, kind="stable")
    return np.take_along_axis(ids, order, 1)


def unpacked_products(queries: np.ndarray, block: int) -> Callable[[np.ndarray], np.ndarray]:
    offset = queries.sum(1, keepdims=True)
    signs = np.empty((block, queries.shape[1]), np.float32)

    def products(part: np.ndarray) -> np.ndarray:
        here = signs[: len(part)]
        np.copyto(here, np.unpackbits(part, axis=1, bitorder="little"))
        return 2 * (queries @ here.T) - offset

    return products


def look_ups(queries: np.ndarray, group: int) -> Callable[[np.ndarray], np.ndarray]:
    by_group = queries.reshape(QUERIES, BYTES, group).transpose(1, 2, 0)
    tables = np.zeros((BYTES, 2, 128, QUERIES), np.float32)
    tables[:, 0, :group], tables[:, 1, :group] = by_group, -by_group
    tables = tables.reshape(BYTES, 256, QUERIES)

    def products(part: np.ndarray) -> np.ndarray:
        found = np.zeros((len(part), QUERIES), np.float32)
        taken = np.empty_like(found)
        for table, places in zip(tables, np.ascontiguousarray(part.T), strict=True):
            found += np.take(table, places, 0, out=taken, mode="clip")
        return found.T

    return products


def one(what: str, folder: Path, block: int, group: int) -> None:
    """Run in a process of its own, and print what it took."""
    if what == "ours":
        pass  # what takes as long for any question is not the question's
    start, wall = time.process_time(), time.perf_counter()
    found = ours(folder, MEMORY // 2) if what == "ours" else by_numpy(folder, block, group)
    cpu, wall = time.process_time() - start, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu": cpu, "wall": wall, "peak": peak, "ids": found.tolist()}))


def apart(what: str, folder: Path, block: int, group: int, *, cold: bool = False) -> dict:
    if cold:
        drop_pages(folder)
    command = [sys.executable, "-m", "bench.search", "--one", what, "--folder", str(folder)]
    command += ["--block", str(block), "--group", str(group)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def drop_pages(folder: Path) -> None:
    """Write all files to the disk and let their pages go: the next reader waits for the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fastest_block(folder: Path, rows: int, group: int) -> int:
    taken = {}
    for block in BLOCKS:
        by_numpy(folder, block, group, block)
        start = time.process_time()
        by_numpy(folder, block, group, min(rows, 16_384))
        taken[block] = time.process_time() - start
    return min(taken, key=taken.__getitem__)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--codes", nargs="?", const="compare", help="by small codes")
    parser.add_argument("--kind", default="slow", help="few, slow, or a store with real rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one")
    parser.add_argument("--block", type=int, default=BLOCKS[0])
    given = parser.parse_args()
    if given.codes == "compare":
        return _search_codes.compare(given.rows, given.folder, given.kind, given.threads)
    if given.codes:
        _search_codes.one(given.codes, given.folder)
        return 0
    if given.one:
        one(given.one, given.folder, given.block, given.group)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gradkeep-search-", dir=given.folder))
    try:
        make(folder, given.rows, given.group)
        block = fastest_block(folder, given.rows, given.group)
        pairs = [
            tuple(apart(what, folder, block, given.group) for what in ("ours", "numpy"))
            for _ in range(given.rounds)
        ]
        cold = [
            tuple(apart(what, folder, block, given.group, cold=True) for what in ("ours", "numpy"))
            for _ in range(given.rounds)
        ]
        same = all(mine["ids"] == theirs["ids"] for mine, theirs in (*pairs, *cold))
        mine, theirs = (statistics.median(pair[at]["cpu"] for pair in pairs) for at in (0, 1))
        peak = max(pair[0]["peak"] for pair in (*pairs, *cold))
        told = f"{given.rows} rows of {BYTES} B ({size_of(given.group)} coordinates), {QUERIES} queries"
        print(f"{told}, top {TOP}; numpy by {block} rows")
        met = "met" if mine / theirs <= BAR else "MISSED"
        print(
            f"CPU time by numpy's: {mine / theirs:.2f} (at most {BAR}: {met}); {mine:.1f} s, {theirs:.1f} s"
        )
        for told in ("cpu", "wall"):
            ones = [statistics.median(pair[at][told] for pair in cold) for at in (0, 1)]
            print(
                f"cold, {told} time by numpy's: {ones[0] / ones[1]:.2f}; {ones[0]:.1f} s, {ones[1]:.1f} s"
            )
        met = "met" if peak <= MEMORY else "MISSED"
        print(f"peak memory: {peak / 2**20:.0f} MiB (at most {MEMORY >> 20}: {met})")
        print(f"the same ids in the same order: {'yes' if same else 'NO'}")
        return 0 if same and mine / theirs <= BAR and peak <= MEMORY else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
