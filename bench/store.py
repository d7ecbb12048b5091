"""The store against bare system calls, in one process, one thread, CPU time.

Every figure is a ratio to a peer measured in alternation, of medians over several rounds, because
ratios are reproducible on a noisy machine and seconds are not. `./x bench store [--quick]`
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

import gradkeep as gk
from gradkeep.store import Memory
from gradkeep.store.blocks import _segment

ROWS, WIDTH = 8192, 6144  # a segment of 8192 rows of 6144 float16 values: 96 MiB
WORD = 1 << 64
KEY = gk.store.CaptureKey(checkpoint="final", split="train")


@dataclass(frozen=True)
class Line:
    what: str
    ratio: float
    bar: float
    note: str = ""

    def show(self) -> str:
        if math.isinf(self.bar):
            return f"{self.what:<44}{self.ratio:>9.4g}   {self.note}"
        verdict = "met   " if self.ratio <= self.bar else "MISSED"
        return f"{self.what:<44}{self.ratio:>9.4g}   <= {self.bar:<6g} {verdict} {self.note}"


def measure_ratio(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> float:
    """Return our CPU time over the peer's: medians over alternating rounds."""
    return median_ratio([(cpu_seconds(ours), cpu_seconds(peer)) for _ in range(rounds)])


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def sum_words(values: np.ndarray) -> int:
    return int(values.reshape(-1).view(np.uint64).sum())


def fill_store(root: Path, segments: int) -> gk.Store:
    store = gk.open(root / "store", durability="process")
    rng = np.random.default_rng(0)
    with store.write(KEY, schema(segments)) as writer:
        for index in range(segments):
            writer.append(*segment_rows(rng, index))
    return store


def schema(segments: int) -> gk.store.Schema:
    array = gk.store.Array("fc.prefix", "float16", (WIDTH,), "prefix", layer="fc", nan="keep")
    return gk.store.Schema((array,), num_rows=segments * ROWS, rows_per_segment=ROWS)


def segment_rows(rng: np.random.Generator, index: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    values = rng.integers(0, 1 << 16, (ROWS, WIDTH), np.uint16).view(np.float16)
    return np.arange(index * ROWS, (index + 1) * ROWS), {"fc.prefix": values}


def measure_streams(store: gk.Store, files: list[Path], rounds: int) -> list[Line]:
    unchecked = gk.open(store.location, verify=False)

    def ours(source: gk.Store) -> int:
        _segment._verified.clear()
        block = source.read(KEY)
        return sum(sum_words(batch["fc.prefix"]) for batch in block.stream(["fc.prefix"])) % WORD

    def bare() -> int:
        total = 0
        for path in files:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                start = 8 + int.from_bytes(mapped[:8], "little")
                size = ROWS * WIDTH * 2
                # The large array is last in the file.
                total += sum_words(np.frombuffer(mapped, np.uint8, size, len(mapped) - size))
                assert start % 4096 == 0
        return total % WORD

    assert ours(store) == ours(unchecked) == bare()
    return [
        Line(
            "stream, unverified / bare mmap + touch",
            measure_ratio(lambda: ours(unchecked), bare, rounds),
            1.15,
        ),
        Line(
            "stream, verified / bare mmap + touch",
            measure_ratio(lambda: ours(store), bare, rounds),
            1.8,
        ),
    ]


def measure_writes(root: Path, segments: int, rounds: int) -> list[Line]:
    rng = np.random.default_rng(1)
    batches = [segment_rows(rng, index) for index in range(segments)]
    lines = []
    for durability, step in (("process", ROWS), ("full", ROWS), ("process", 256)):

        def ours(durability: str = durability, step: int = step) -> None:
            place = root / "written"
            with gk.open(place, durability=durability).write(KEY, schema(segments)) as writer:
                for ids, arrays in batches:
                    for at in range(0, ROWS, step):
                        rows = arrays["fc.prefix"][at : at + step]
                        writer.append(ids[at : at + step], {"fc.prefix": rows})

        def bare(durability: str = durability) -> None:
            place = root / "raw"
            place.mkdir()
            for index, (_, arrays) in enumerate(batches):
                view = memoryview(arrays["fc.prefix"]).cast("B")
                xxhash.xxh3_128_hexdigest(view)
                fd = os.open(place / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                while view:
                    view = view[os.write(fd, view) :]
                if durability == "full":
                    os.fsync(fd)
                os.close(fd)

        def swept(work: Callable[[], None], name: str) -> tuple[float, float]:
            start = time.perf_counter()
            spent = cpu_seconds(work)
            wall = time.perf_counter() - start
            shutil.rmtree(root / name)
            return spent, wall

        pairs = [(swept(ours, "written"), swept(bare, "raw")) for _ in range(rounds)]
        cpu_ratio = median_ratio([(mine[0], theirs[0]) for mine, theirs in pairs])
        whole = step == ROWS
        what = (
            f"write, {durability} / raw write + xxh3" if whole else "the same, 256 rows at a time"
        )
        note = "" if whole else "(rows are copied once; no bar)"
        bar = 1.3 if whole else math.inf
        lines.append(Line(what, cpu_ratio, bar, note))
        if durability == "full":
            # The disk dominates here, so wall time matters too.
            waited = median_ratio([(mine[1], theirs[1]) for mine, theirs in pairs])
            lines.append(Line("the same, wall", waited, 1.3))
    return lines


def measure_gathers(store: gk.Store, files: list[Path], rounds: int) -> list[Line]:
    rng = np.random.default_rng(2)
    size = WIDTH * 2
    handles = [(os.open(path, os.O_RDONLY), path.stat().st_size - ROWS * size) for path in files]
    block = store.read(KEY)
    block.read([0])
    draws = [rng.choice(len(block), 256, replace=False) for _ in range(16)]

    def bare() -> None:
        for ids in draws:
            out = np.empty((256, WIDTH), np.float16)
            for at, number in enumerate(ids.tolist()):
                fd, start = handles[number // ROWS]
                data = os.pread(fd, size, start + number % ROWS * size)
                out[at] = np.frombuffer(data, np.float16)

    def ours() -> None:
        # A fresh block each time would include its opening; clearing the verified rows instead
        # makes every row be checked again.
        for segment in block._opened.values():
            segment._known.clear()
            segment._groups.clear()
        for ids in draws:
            block.read(ids, ["fc.prefix"])

    lines = [
        Line("256 random rows, verified / raw pread loop", measure_ratio(ours, bare, rounds), 3.0)
    ]
    maps = [
        np.memmap(path, np.float16, "r", start, (ROWS, WIDTH))
        for path, (_, start) in zip(files, handles, strict=True)
    ]

    def known() -> None:
        for ids in draws:
            block.read(ids, ["fc.prefix"])

    def mapped() -> None:
        for ids in draws:
            out = np.empty((256, WIDTH), np.float16)
            for number, values in enumerate(maps):
                here = np.flatnonzero(ids // ROWS == number)
                out[here] = values[ids[here] % ROWS]

    known()
    mapped()
    lines.append(Line("256 random rows, again / memmap", measure_ratio(known, mapped, rounds), 3.0))
    for fd, _ in handles:
        os.close(fd)
    return lines


def measure_size(store: gk.Store) -> Line:
    manifest = store.read(KEY).manifest
    payload = manifest.rows * (WIDTH * 2 + 8)
    return Line("bytes on disk / payload", manifest.bytes / payload, 1.002)


def measure_mask() -> Line:
    rows, width = 1024, 50_000
    store = gk.open(Memory())
    array = gk.store.Array("mask", "bool", (width,), "mask", "bits")
    with store.write(KEY, gk.store.Schema((array,), num_rows=rows)) as writer:
        writer.append(
            np.arange(rows), {"mask": np.random.default_rng(3).random((rows, width)) < 0.5}
        )
    return Line("mask bytes / (n / 8)", store.read(KEY).manifest.bytes / (rows * width / 8), 1.01)


def measure_commits(root: Path, rounds: int) -> Line:
    """Compare the wall time of one durable 16 KB row with a bare durable file of that size."""
    store = gk.open(root / "commits")
    count = 50
    rows = store.rows(
        "bench", gk.store.Schema((gk.store.Array("out", shape=(4096,)),)), num_rows=count * rounds
    )
    value = np.ones(4096, np.float32)
    folder = root / "bare"
    folder.mkdir()
    ratios = []
    rows.put(0, {"out": value})
    for turn in range(rounds):
        start = time.perf_counter()
        for row in range(max(1, turn * count), (turn + 1) * count):
            rows.put(row, {"out": value})
        middle = time.perf_counter()
        for row in range(count):
            fd = os.open(folder / f"{turn}-{row}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(fd, value)
            os.fsync(fd)
            os.close(fd)
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return Line("16 KB row, full, wall / bare write + fsync", statistics.median(ratios), 3.0)


def measure_scan(root: Path, segments: int) -> Line:
    store = gk.open(root / "many", durability="process")
    one = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=1)
    per_block = 1000
    for index in range(segments // per_block):
        key = gk.store.CaptureKey(checkpoint=f"c{index:04d}", split="train")
        writer = store.write(key, one)
        for row in range(per_block):
            writer.append([row], {"loss": [float(row)]})
        if index % 2:
            writer.seal()
        else:
            writer.flush()
            writer.close()
    spent = cpu_seconds(store.info)
    bar = 10.0 * segments / 100_000
    return Line(f"scan of {segments:,} segments, CPU s", spent, bar, "(half sealed, half open)")


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    segments, rounds = (2, 3) if quick else (8, 15)
    root = Path(tempfile.mkdtemp(prefix="gradkeep-bench-"))
    try:
        store = fill_store(root, segments)
        files = sorted((root / "store" / KEY.folder / "seg").iterdir())
        lines = [
            *measure_streams(store, files, rounds),
            *measure_writes(root, segments, min(rounds, 7)),
        ]
        lines += [*measure_gathers(store, files, rounds), measure_size(store), measure_mask()]
        lines += [measure_commits(root, rounds), measure_scan(root, 2_000 if quick else 100_000)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in lines:
        print(line.show())
    return 0 if all(line.ratio <= line.bar for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
