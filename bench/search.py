"""Top rows of many queries over compressed rows on disk, against numpy on the same bytes.

Rows are 2 KiB of codes, in segments as `gk.capture(keep="2KiB")` writes them: 16,384 coordinates of one
bit, or with `--group 128` the largest of each 128 coordinates in a byte. Queries are not rounded. numpy
maps one file of all codes and reads it in blocks of the fastest size: it unpacks bits and multiplies
in float32, or looks bytes up in a table for each group, and selects by argpartition. Both alternate, in
separate processes: CPU time, peak memory, and the same ids; with the files in the page cache (warm),
then with their pages dropped before each run (cold), CPU and wall.
`./x bench search [--rows N] [--group 128]`

`./x bench search --codes [--rows 10000000] [--kind few|slow|STORE]` finds candidates by codes of 64 bytes and
ranks them by exact products: recall against the exact answer, seconds, bytes, and build cost of the codes.
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
SEGMENT = 1024  # rows, as in a capture of coordinates
BLOCKS = (256, 512, 1024, 2048, 4096)
BAR, MEMORY = 1.5, 1 << 30


def count_coordinates(group: int) -> int:
    """Return the number of coordinates per row."""
    return BYTES * (group or 8)


def bits_schema(bits: int, count: int, group: int) -> Any:
    """Return the schema of a capture that stores one layer in that many bits per coordinate."""
    import gradkeep.store as gs
    from gradkeep.factors._bits import Bits
    from gradkeep.factors._form import Parameter, form_to_fields

    size, packed = count_coordinates(group), bits == 1
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


def build_files(folder: Path, rows: int, group: int) -> None:
    """Write a store of `rows` random rows and some queries, and the same as plain files."""
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
        QUERIES, count_coordinates(group), generator=torch.Generator().manual_seed(1)
    ).numpy()
    with store.write(gs.CaptureKey("final", "test"), bits_schema(32, QUERIES, group)) as writer:
        writer.append(np.arange(QUERIES), {"layer.bits": queries})
    np.save(folder / "queries.npy", queries)


def search_with_gradkeep(folder: Path, budget: int) -> np.ndarray:
    import gradkeep as gk

    train, test = (gk.gradients(folder / "store", split=split) for split in ("train", "test"))
    return gk.query.top(test, train, TOP, memory_budget=budget).ids.numpy()


def search_with_numpy(folder: Path, block: int, group: int, rows: int | None = None) -> np.ndarray:
    """Return the ids `[Q, k]` of the largest scores, descending; ties in row order."""
    queries, scales = np.load(folder / "queries.npy"), np.load(folder / "scales.npy")
    codes = np.memmap(folder / "codes", np.uint8, "r").reshape(-1, BYTES)[:rows]
    products = lookup_products(queries, group) if group else unpacked_products(queries, block)
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


def lookup_products(queries: np.ndarray, group: int) -> Callable[[np.ndarray], np.ndarray]:
    by_group = queries.reshape(QUERIES, BYTES, group).transpose(1, 2, 0)
    tables = np.zeros((BYTES, 2, 128, QUERIES), np.float32)
    tables[:, 0, :group], tables[:, 1, :group] = by_group, -by_group
    tables = tables.reshape(BYTES, 256, QUERIES)

    def products(part: np.ndarray) -> np.ndarray:
        scores = np.zeros((len(part), QUERIES), np.float32)
        taken = np.empty_like(scores)
        for table, places in zip(tables, np.ascontiguousarray(part.T), strict=True):
            scores += np.take(table, places, 0, out=taken, mode="clip")
        return scores.T

    return products


def measure_search(what: str, folder: Path, block: int, group: int) -> None:
    """Search in this process, and print the figures as JSON."""
    start, wall = time.process_time(), time.perf_counter()
    ids = (
        search_with_gradkeep(folder, MEMORY // 2)
        if what == "ours"
        else search_with_numpy(folder, block, group)
    )
    cpu, wall = time.process_time() - start, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu": cpu, "wall": wall, "peak": peak, "ids": ids.tolist()}))


def run_subprocess(what: str, folder: Path, block: int, group: int, *, cold: bool = False) -> dict:
    if cold:
        drop_pages(folder)
    command = [sys.executable, "-m", "bench.search", "--one", what, "--folder", str(folder)]
    command += ["--block", str(block), "--group", str(group)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def drop_pages(folder: Path) -> None:
    """Write all files to disk and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_fastest_block(folder: Path, rows: int, group: int) -> int:
    taken = {}
    for block in BLOCKS:
        search_with_numpy(folder, block, group, block)
        start = time.process_time()
        search_with_numpy(folder, block, group, min(rows, 16_384))
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
    options = parser.parse_args()
    if options.codes == "compare":
        return _search_codes.measure_codes(
            options.rows, options.folder, options.kind, options.threads
        )
    if options.codes:
        _search_codes.measure_part(options.codes, options.folder)
        return 0
    if options.one:
        measure_search(options.one, options.folder, options.block, options.group)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gradkeep-search-", dir=options.folder))
    try:
        build_files(folder, options.rows, options.group)
        block = find_fastest_block(folder, options.rows, options.group)
        pairs = [
            tuple(run_subprocess(what, folder, block, options.group) for what in ("ours", "numpy"))
            for _ in range(options.rounds)
        ]
        cold = [
            tuple(
                run_subprocess(what, folder, block, options.group, cold=True)
                for what in ("ours", "numpy")
            )
            for _ in range(options.rounds)
        ]
        same = all(mine["ids"] == theirs["ids"] for mine, theirs in (*pairs, *cold))
        mine, theirs = (statistics.median(pair[at]["cpu"] for pair in pairs) for at in (0, 1))
        peak = max(pair[0]["peak"] for pair in (*pairs, *cold))
        label = f"{options.rows} rows of {BYTES} B ({count_coordinates(options.group)} coordinates), {QUERIES} queries"
        print(f"{label}, top {TOP}; numpy by {block} rows")
        met = "met" if mine / theirs <= BAR else "MISSED"
        print(
            f"CPU time by numpy's: {mine / theirs:.2f} (at most {BAR}: {met}); {mine:.1f} s, {theirs:.1f} s"
        )
        for clock in ("cpu", "wall"):
            ones = [statistics.median(pair[at][clock] for pair in cold) for at in (0, 1)]
            print(
                f"cold, {clock} time by numpy's: {ones[0] / ones[1]:.2f}; {ones[0]:.1f} s, {ones[1]:.1f} s"
            )
        met = "met" if peak <= MEMORY else "MISSED"
        print(f"peak memory: {peak / 2**20:.0f} MiB (at most {MEMORY >> 20}: {met})")
        print(f"the same ids in the same order: {'yes' if same else 'NO'}")
        return 0 if same and mine / theirs <= BAR and peak <= MEMORY else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
