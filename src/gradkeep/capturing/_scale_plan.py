"""Cost of a capture by many workers, added up from measured and assumed speeds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

from gradkeep._budgets import format_bytes

PlaceName = Literal["local", "s3"]
_PROBE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlaceCosts:
    """Seconds per request to a storage location, and its rate."""

    name: str
    put_seconds: float
    """Seconds until a small value is durable."""
    get_seconds: float
    bytes_per_second: float
    """Rate of one connection, or of the disk."""
    measured: bool = False

    def __str__(self) -> str:
        how = "measured here" if self.measured else "assumed"
        return (
            f"{self.name}: put {1e3 * self.put_seconds:.3g} ms, get {1e3 * self.get_seconds:.3g} ms, "
            f"{self.bytes_per_second / 1e6:.3g} MB/s ({how})"
        )


S3 = PlaceCosts("s3", put_seconds=0.03, get_seconds=0.02, bytes_per_second=80e6)
"""Typical costs of one connection from the same region; not measured."""


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Seconds and bytes of a worker's part of a capture."""

    start_seconds: float
    """Seconds of imports and loading the model."""
    first_seconds: float
    """Seconds of the proof on the first batch, and of a basis."""
    row_seconds: float
    row_bytes: float
    rows_per_segment: int
    check_seconds: float
    """Seconds per row when the capture is sealed: loading and fingerprint."""


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Predicted cost of a capture by several workers; printing it lists its assumptions.

    Attributes:
        rows: Number of rows.
        workers: Number of workers.
        segments: Number of segments in the store.
        bytes: Bytes in the store.
        requests: Requests to the store.
        worker_seconds: Seconds until the last worker is done.
        seconds: Seconds until the capture is sealed.
        worker_memory: Bytes of memory per worker beside the model.
        place: Costs of the storage location.
        costs: Costs of a worker.
    """

    rows: int
    workers: int
    segments: int
    bytes: float
    requests: int
    worker_seconds: float
    seconds: float
    worker_memory: int
    place: PlaceCosts
    costs: WorkerCosts

    @property
    def hours(self) -> float:
        """Hours from the start of the first worker to the sealed capture."""
        return self.seconds / 3600

    def __str__(self) -> str:
        costs = self.costs
        return (
            f"{self.rows:,} rows by {self.workers:,} workers: {format_bytes(self.bytes)} in "
            f"{self.segments:,} segments, {self.requests:,} requests, {_duration(self.seconds)}, "
            f"{format_bytes(self.worker_memory)} of memory for each worker beside the model\n"
            f"workers finish after {_duration(self.worker_seconds)}; one process then compares and "
            f"seals for {_duration(self.seconds - self.worker_seconds)}\n"
            f"assumed: a row {_duration(costs.row_seconds)} on one worker's device as fast as this "
            f"one, {_duration(costs.check_seconds)} to load and compare, a start "
            f"{_duration(costs.start_seconds)}; {self.place}; rows are shared out evenly, a segment "
            "is put while the next is made, and no worker is lost"
        )


def scale_plan(
    costs: WorkerCosts, *, rows: int, workers: int, place: PlaceCosts, memory: int
) -> ScalePlan:
    """Predict in closed form: work shared evenly after the start, then one process compares and seals.

    With w workers that start after s seconds, and this process as one of them if the place is local, work
    of W seconds ends after min(W, (W + (w - 1) s) / w).

    >>> free = PlaceCosts("free", 0.0, 0.0, math.inf)
    >>> costs = WorkerCosts(1.0, 0.0, 0.01, 100.0, 100, 0.0)
    >>> scale_plan(costs, rows=3200, workers=2, place=free, memory=0).seconds
    17.0
    """
    segments = math.ceil(rows / costs.rows_per_segment)
    ranges = math.ceil(segments / max(1, segments // (16 * workers)))
    present = min(workers, ranges)
    compute_seconds = costs.row_seconds * rows / segments
    put_seconds = place.put_seconds + costs.row_bytes * rows / segments / place.bytes_per_second
    # Computing and writing overlap: the slower one sets the pace, and the last segment is written at the end.
    lease_seconds = 2 * place.get_seconds + 2 * place.put_seconds
    work = segments * max(compute_seconds, put_seconds) + ranges * (
        min(compute_seconds, put_seconds) + lease_seconds
    )
    start = costs.start_seconds
    if place.measured or ranges < 2:
        spent = min(work, (work + (present - 1) * start) / present)
    else:
        spent = start + work / present
    done = costs.first_seconds + spent
    reads = 2 * segments  # the header and the row fingerprints of each segment
    sealing = rows * costs.check_seconds + reads * place.get_seconds + place.put_seconds
    return ScalePlan(
        rows=rows,
        workers=workers,
        segments=segments,
        bytes=rows * costs.row_bytes,
        # Per range: list free ranges, lease, result, progress.
        requests=segments + reads + 4 * ranges + 2,
        worker_seconds=done,
        seconds=done + sealing,
        worker_memory=memory,
        place=place,
        costs=costs,
    )


def measure_folder(folder: str) -> PlaceCosts:
    """Time durable writes in a local folder; the files are removed."""
    seconds = []
    for size in (100, _PROBE_BYTES):
        content, times = os.urandom(size), []
        for turn in range(5):
            path = os.path.join(folder, f"probe-{size}-{turn}")
            began = time.perf_counter()
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
            os.unlink(path)
        seconds.append(sorted(times)[2])
    rate = _PROBE_BYTES / max(seconds[1] - seconds[0], 1e-6)
    return PlaceCosts("this disk", seconds[0], 1e-5, rate, measured=True)


def measure_start(workers: int) -> float:
    """Time the imports of other processes, as many at once as there are workers and cores."""
    together = max(1, min(workers, os.cpu_count() or 1))
    command = [sys.executable, "-c", "import torch, gradkeep.capturing._capture"]
    began = time.perf_counter()
    for one in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(together)]:
        one.wait()
    return time.perf_counter() - began


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
