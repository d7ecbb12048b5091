"""What a capture would take elsewhere: more rows, many workers, another place for the store.

The capture by workers is played through, event by event, with costs that were measured here: workers
start, claim ranges of segments, make their rows, put segments while the next rows are made, and when all
are there one process reads the data once more, compares every row's fingerprint, and seals.
"""

from __future__ import annotations

import heapq
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import _arguments
from gradkeep._budgets import format_bytes
from gradkeep.capturing._crew import segment_ranges
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

PlaceName = Literal["local", "s3"]
_REQUESTS_OF_A_RANGE = 4
"""Listing what is free, the lease, the result, and a look at what is done."""
_READS_OF_A_SEGMENT = 2
"""When the capture is sealed: its beginning, and the fingerprints of its rows."""
_PROBES, _PROBE_BYTES = 5, 8 << 20


@dataclass(frozen=True, slots=True)
class PlaceCosts:
    """How long the requests of a place take."""

    name: str
    put_seconds: float
    """Of a small value, until it is durable."""
    get_seconds: float
    bytes_per_second: float
    """Of one connection, or of the disk."""
    measured: bool = False

    def put(self, size: float) -> float:
        """Seconds until so many bytes are there."""
        return self.put_seconds + size / self.bytes_per_second

    def __str__(self) -> str:
        how = "measured here" if self.measured else "assumed"
        return (
            f"{self.name}: put {1e3 * self.put_seconds:.3g} ms, get {1e3 * self.get_seconds:.3g} ms, "
            f"{self.bytes_per_second / 1e6:.3g} MB/s ({how})"
        )


S3 = PlaceCosts("s3", put_seconds=0.03, get_seconds=0.02, bytes_per_second=80e6)
"""What one connection from the same region usually has; nothing is measured there."""


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """What a worker's parts of a capture take."""

    start_seconds: float
    """Until it makes its first row: imports, the model, the proof on the first batch."""
    first_seconds: float
    """The proof alone."""
    row_seconds: float
    row_bytes: float
    rows_per_segment: int
    check_seconds: float
    """Of one row when the capture is sealed: loading it and its fingerprint."""


@dataclass(frozen=True, slots=True)
class PlayedCapture:
    """How a capture by workers went, when it was played through."""

    seconds: float
    workers_done: float
    """When the last worker was done."""
    requests: int
    busy: float
    """The share of their time that workers make rows in."""


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """What a capture of so many rows by so many workers takes; shows itself as a table."""

    rows: int
    workers: int
    segments: int
    bytes: float
    played: PlayedCapture
    worker_memory: int
    """Bytes that each needs beside the model."""
    place: PlaceCosts
    costs: WorkerCosts

    @property
    def hours(self) -> float:
        """From the first worker's start to the sealed capture."""
        return self.played.seconds / 3600

    def __str__(self) -> str:
        sealing = self.played.seconds - self.played.workers_done
        costs = self.costs
        return "\n".join(
            [
                (
                    f"{self.rows:,} rows by {self.workers:,} workers: {format_bytes(self.bytes)} in "
                    f"{self.segments:,} segments, {self.played.requests:,} requests, "
                    f"{_duration(self.played.seconds)}, {format_bytes(self.worker_memory)} of memory "
                    "for each worker beside the model"
                ),
                (
                    f"workers are done after {_duration(self.played.workers_done)} and make rows "
                    f"{self.played.busy:.0%} of that time; one process compares and seals for "
                    f"{_duration(sealing)}"
                ),
                (
                    f"assumed: a row {_duration(costs.row_seconds)} on one worker's device as fast as "
                    f"this one, {_duration(costs.check_seconds)} to load and compare, a start "
                    f"{_duration(costs.start_seconds)}; {self.place}; no worker is lost"
                ),
            ]
        )


def scale_plan(
    costs: WorkerCosts, *, rows: int, workers: int, place: PlaceCosts, memory: int
) -> ScalePlan:
    """Play a capture of so many rows through."""
    segments = math.ceil(rows / costs.rows_per_segment)
    parts = segment_ranges(rows, costs.rows_per_segment, batch=1, workers=workers)
    ranges = [stop - start for start, stop in parts]
    # A single range is made by the process that asks; and on this machine that is one of the workers.
    here = place.measured or len(ranges) < 2
    played = play_capture(ranges, workers, costs, place, rows=rows, here=here)
    return ScalePlan(rows, workers, segments, rows * costs.row_bytes, played, memory, place, costs)


def play_capture(
    ranges: Sequence[int],
    workers: int,
    costs: WorkerCosts,
    place: PlaceCosts,
    *,
    rows: int,
    here: bool = False,
) -> PlayedCapture:
    """Event by event: who is free first takes the next range of so many segments.

    With `here` the process that begins is one of the workers, and ready when the others are started.

    A segment is put while the next one is made; one more waits only if the one before is still under
    way. Cost: the number of ranges x log(workers), however many rows.

    >>> costs = WorkerCosts(1.0, 0.1, 0.01, 100.0, 100, 0.0)
    >>> free = PlaceCosts("free", 0.0, 0.0, math.inf)
    >>> play_capture([1] * 8, 2, costs, free, rows=800).seconds  # start, then 4 segments of a second
    5.0
    """
    each = rows / sum(ranges)  # the last segment may be a small one
    made = costs.row_seconds * each
    put = place.put(costs.row_bytes * each)
    asking = place.get_seconds * (_REQUESTS_OF_A_RANGE - 2) + 2 * place.put_seconds
    begins = costs.first_seconds + costs.start_seconds if here else costs.start_seconds
    free = [(begins, number) for number in range(min(workers, len(ranges)))]
    if here:
        free[0] = (costs.first_seconds, 0)
    heapq.heapify(free)
    working = 0.0
    done = free[0][0]
    for count in ranges:
        at, number = heapq.heappop(free)
        # The first is made, then the slower of making and putting paces the rest; the last is put.
        spent = made + (count - 1) * max(made, put) + put + asking
        working += count * made
        done = max(done, at + spent)
        heapq.heappush(free, (at + spent, number))
    segments = sum(ranges)
    sealing = rows * costs.check_seconds + segments * _READS_OF_A_SEGMENT * place.get_seconds
    present = min(workers, max(1, len(ranges)))
    return PlayedCapture(
        seconds=done + sealing + place.put_seconds,
        workers_done=done,
        requests=segments * (1 + _READS_OF_A_SEGMENT) + _REQUESTS_OF_A_RANGE * len(ranges) + 2,
        busy=working / (present * done) if done else 1.0,
    )


def measure_folder(folder: str) -> PlaceCosts:
    """The costs of durable writes in a folder of this machine; what is written there is removed."""
    small: list[float] = []
    large: list[float] = []
    for size, times in ((100, small), (_PROBE_BYTES, large)):
        content = os.urandom(size)
        for number in range(_PROBES):
            path = os.path.join(folder, f"probe-{size}-{number}")
            began = time.perf_counter()
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
            os.unlink(path)
    put, long = (sorted(times)[_PROBES // 2] for times in (small, large))
    rate = _PROBE_BYTES / max(long - put, 1e-6)
    return PlaceCosts("this disk", put, 1e-5, rate, measured=True)


def measure_start(workers: int) -> float:
    """Seconds until other processes have imported what workers need, as many at once as there are cores."""
    together = max(1, min(workers, os.cpu_count() or 1))
    command = [sys.executable, "-c", "import torch, gradkeep.capturing"]
    began = time.perf_counter()
    for one in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(together)]:
        one.wait()
    return time.perf_counter() - began


def checked_scale(rows: Any, workers: Any, place: Any) -> None:
    """Refuse what no capture can be."""
    _arguments.count("rows", rows, error=CaptureError, least=1)
    _arguments.count("workers", workers, error=CaptureError, least=1, most=1_000_000)
    _arguments.one_of("place", place, words=("local", "s3"), error=CaptureError)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
