"""Cost of captures and queries before anything runs: bytes, memory, operations, seconds."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gradkeep import _arguments
from gradkeep._arguments import count, number, one_of
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep._display import TextDisplay, text_table
from gradkeep.capturing._batches import batch_size, leaves
from gradkeep.capturing._cost import CaptureCost, coordinate_cost, exact_cost, probe_capture
from gradkeep.capturing._first_batch import CaptureSettings, Keep, rows_at_once
from gradkeep.capturing._loader import without_columns
from gradkeep.capturing._readiness import device_of, uncompiled
from gradkeep.capturing._report import LayerReport, report_layer
from gradkeep.capturing._sequences import unpacking_for
from gradkeep.errors import BudgetError, CaptureError
from gradkeep.query._engine import DEFAULT_BUDGET, memory_shares
from gradkeep.query._planner import ProductSize, choose_compute

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._cost import ShapedCapture
    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import Compute
    from gradkeep.query._gradients import LayerChoice
    from gradkeep.store import Encoding

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


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """Predicted cost of one layer.

    Attributes:
        layer: Storage of the layer.
        disk_bytes: Bytes on disk, for all rows and queries.
        compute: How products of its gradients are computed.
        flops: Operations for all queries against all rows.
        seconds: Predicted seconds for all queries against all rows.
        alternatives: Predicted seconds of every way to compute them.
    """

    layer: LayerReport
    disk_bytes: float
    compute: Compute
    flops: float
    seconds: float
    alternatives: dict[Compute, float]


@dataclass(frozen=True, slots=True, repr=False)
class CapturePlan(TextDisplay):
    """Predicted cost of a capture and its queries; prints as a table.

    Attributes:
        layers: Cost of each layer. For coordinates, an even share is assumed; the basis decides.
        rows: Number of training rows.
        queries: Number of query rows.
        budget: Memory budget of queries in bytes.
        disk_bytes: Bytes on disk.
        capture_memory: Peak bytes of the capture beside the model.
        capture_seconds: Seconds of the capture.
        query_memory: Peak bytes of the queries.
        query_seconds: Seconds of the queries.
        row_bytes: Bytes on disk per row, everything included.
        basis_bytes: Bytes on disk of the basis of coordinates.
        fits: True if memory and disk suffice.
        advice: What is too large, and the `keep=` that would fit; empty if it fits.
        rows_per_segment: Rows in a segment.
        fixed_seconds: Seconds before the first row: the proof on the first batch, and a basis.
    """

    layers: tuple[PlannedLayer, ...]
    rows: int
    queries: int
    budget: int
    disk_bytes: float
    capture_memory: int
    capture_seconds: float
    query_memory: int
    query_seconds: float
    row_bytes: float = 0.0
    basis_bytes: float = 0.0
    fits: bool = True
    advice: str = ""
    rows_per_segment: int = 1
    fixed_seconds: float = 0.0

    def at_scale(
        self,
        *,
        rows: int,
        workers: int = 1,
        place: PlaceName = "local",
        load_seconds: float = 0.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> ScalePlan:
        """Predict the cost of capturing many rows with many workers, on devices as fast as this one.

        Based on measurements here: seconds per row, the start of a process and, for `place="local"`, durable
        writes to `folder`. The costs of `"s3"` are assumed; printing the plan lists them. Cost: seconds.

        Args:
            rows: Number of rows.
            workers: Number of workers.
            place: `"local"` or `"s3"`.
            load_seconds: Seconds to load one row.
            folder: Folder to measure; by default that of temporary files.

        Returns:
            Bytes, requests, hours and memory per worker.

        Raises:
            CaptureError: An argument is out of range.

        Example:
            >>> import gradkeep as gk, torch
            >>> model, batch = torch.nn.Linear(8, 2), (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))
            >>> small = gk.plan(model, batch, task=gk.Classification(), rows=100)
            >>> far = small.at_scale(rows=10**9, workers=256, place="s3")
            >>> far.segments == -(-(10**9) // small.rows_per_segment), far.worker_seconds < far.seconds
            (True, True)
        """
        count("rows", rows, error=CaptureError, least=1)
        count("workers", workers, error=CaptureError, least=1, most=1_000_000)
        one_of("place", place, words=("local", "s3"), error=CaptureError)
        number("load_seconds", load_seconds, error=CaptureError, least=0)
        spread = self.capture_seconds - self.fixed_seconds
        costs = WorkerCosts(
            start_seconds=measure_start(workers),
            first_seconds=self.fixed_seconds,
            row_seconds=spread / max(1, self.rows + self.queries) + load_seconds,
            row_bytes=self.row_bytes,
            rows_per_segment=self.rows_per_segment,
            # 5 us per row when the capture is compared and sealed, measured by `./x bench scale`.
            check_seconds=load_seconds + 5e-6,
        )
        where = S3 if place == "s3" else measure_folder(os.fspath(folder or tempfile.gettempdir()))
        return scale_plan(
            costs, rows=rows, workers=workers, place=where, memory=self.capture_memory
        )

    def __str__(self) -> str:
        shown = self.layers
        if len(shown) > 8:
            shown = tuple(sorted(shown, key=lambda p: -p.disk_bytes)[:7])
        lines = [self._layer_table(shown)]
        if len(shown) < len(self.layers):
            lines.append(
                f"and {len(self.layers) - len(shown)} smaller layers; plan.layers lists all"
            )
        basis = f", {format_bytes(self.basis_bytes)} of them its basis" if self.basis_bytes else ""
        lines += [
            (
                f"capture {self.rows + self.queries} rows of {format_bytes(self.row_bytes)}: "
                f"{format_bytes(self.disk_bytes)} on disk{basis}, "
                f"{format_bytes(self.capture_memory)} of memory, about {self.capture_seconds:.3g} s"
            ),
            (
                f"score {self.queries} x {self.rows}: {format_bytes(self.query_memory)} of memory "
                f"(budget {format_bytes(self.budget)}), about {self.query_seconds:.3g} s"
            ),
        ]
        return "\n".join([*lines, *([self.advice] if self.advice else [])])

    def _layer_table(self, layers: tuple[PlannedLayer, ...]) -> str:
        head = ("layer", "type", "T", "stored as", "on disk", "scored", "GFLOP", "seconds")
        rows = [
            (
                p.layer.name,
                p.layer.type,
                f"{p.layer.positions:.4g}",
                p.layer.storage,
                format_bytes(p.disk_bytes),
                p.compute,
                f"{p.flops / 1e9:.3g}",
                f"{p.seconds:.3g}",
            )
            for p in layers
        ]
        return text_table(head, rows, right={2, 4, 6, 7})


@_arguments.checked(CaptureError)
def plan(
    model: nn.Module,
    batch: Any,
    *,
    task: Task,
    rows: int,
    queries: int = 1,
    layers: LayerChoice = None,
    encoding: Encoding = "plain",
    keep: KeepChoice = None,
    compute: str | None = None,
    tolerance: float = 0.0,
    memory_budget: float | str | None = None,
    disk_budget: float | str | None = None,
    mode: Mode | None = "eval",
) -> CapturePlan:
    """Predict the cost of capturing `rows` and scoring them for `queries`, layer by layer.

    It does not raise if the plan does not fit: `advice` says what is too large, and the `keep=` that would
    fit. A small model runs a few samples and is measured; for a large one shapes give the bytes, and one
    short sample the speed. Model and batch may be on the meta device: then seconds are those of one core of
    a server, from the operations of a pass.

    Args:
        model: Model to capture.
        batch: Example batch, as the loader yields it.
        task: Task of the capture.
        rows: Number of training rows.
        queries: Number of query rows.
        layers: Names, globs or module types of the layers to capture; None for all.
        encoding: Encoding of stored arrays.
        keep: How gradients are stored, as in `gk.capture`.
        compute: How products are computed; None for the fastest way per layer.
        tolerance: Largest relative error of a gradient whose rank is cut.
        memory_budget: Memory for queries and captures; None for the memory of this machine.
        disk_budget: Bytes on disk; None for the free bytes of this folder's disk.
        mode: `"eval"` or `"train"`; None leaves the model's mode.

    Returns:
        The predicted cost; prints as a table.

    Raises:
        CaptureError: The model or batch cannot be captured, or does not run on shapes alone.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 10))
        ...     batch = torch.empty(8, 4096), torch.empty(8, dtype=torch.int64)
        >>> import gradkeep as gk
        >>> cost = gk.plan(model, batch, task=gk.Classification(), rows=10**9, disk_budget="2TB")
        >>> cost.fits, cost.advice
        (False, "49.25 TB on disk are more than the 2.00 TB available; keep='1KiB' fits: 996.37 GB")
    """
    model = uncompiled(model)
    batch = without_columns(batch)
    hollow = device_of(model).type == "meta"
    hollow = hollow or any(getattr(leaf, "is_meta", False) for leaf in leaves(batch))
    unpacking = None if hollow else unpacking_for(model, task, mode)
    batch = batch if unpacking is None else unpacking.settled(batch).parts(batch)[0]
    settings = CaptureSettings(layers, encoding=encoding, keep=keep, tolerance=tolerance)
    planner = _Planner(
        probe_capture(model, task, batch, settings, mode, hollow=hollow),
        rows=rows,
        queries=queries,
        batch=batch_size(batch),
        all_layers=layers is not None,
        compute=compute,
        memory=None if memory_budget is None else parse_bytes(memory_budget),
        disk=shutil.disk_usage(os.curdir).free if disk_budget is None else parse_bytes(disk_budget),
    )
    requested = settings.compressed
    whole = None if requested is None else planner.shaped.prepared.within(requested)
    if whole is not None:
        shaped = planner.shaped.rounded(whole)
        planner, requested = dataclasses.replace(planner, shaped=shaped), None
    result = planner.plan(requested)
    if result.fits:
        return result
    advice = f"{result.advice}; {planner.suggest_keep(below=result.row_bytes)}"
    return dataclasses.replace(result, advice=advice)


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """Plans for one model, batch and number of queries, by what is stored."""

    shaped: ShapedCapture
    rows: int
    queries: int
    batch: int
    all_layers: bool
    """True if the user chose the layers."""
    compute: str | None
    memory: int | None
    """Memory budget; None for the memory of this machine."""
    disk: int

    def plan(self, keep: Keep | None) -> CapturePlan:
        """Plan for whole gradients, or for a number of bytes per row."""
        rows, queries = self.rows, self.queries
        if keep is None:
            cost = exact_cost(self.shaped)
        else:
            cost = coordinate_cost(self.shaped, keep, rows=rows, all_layers=self.all_layers)
        budget = DEFAULT_BUDGET if self.memory is None else self.memory
        segment = int(min(cost.segment_rows, rows) * cost.row_bytes)
        answer = 4 * rows * queries
        too_much: list[str] = []
        sizes: dict[str, Any] = {"answer": answer, "mapped": segment}
        sizes |= {"query_row": cost.query_bytes, "train_row": cost.row_bytes}
        sizes |= {"queries": queries, "rows": rows}
        disk, memory = cost.disk_bytes(rows, queries), self._capture_memory(cost)
        if disk > self.disk:
            too_much.append(
                f"{format_bytes(disk)} on disk are more than the {format_bytes(self.disk)} available"
            )
        try:
            split = memory_shares(self.memory, **sizes)
        except BudgetError as error:
            too_much.append(
                f"queries take {error.expected}, more than the budget of {format_bytes(budget)}"
            )
            split = memory_shares(None, **sizes)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = machine if self.memory is None else self.memory
        if memory > available:
            too_much.append(
                f"capturing takes {format_bytes(memory)} of memory beside the model, more than the "
                f"{format_bytes(available)} available"
            )
        planned = tuple(self._layer(layer, split.scratch) for layer in cost.layers)
        held = 2 * (cost.query_bytes * split.query_rows + cost.row_bytes * split.train_rows)
        return CapturePlan(
            layers=planned,
            rows=rows,
            queries=queries,
            budget=budget,
            disk_bytes=disk,
            capture_memory=int(memory),
            capture_seconds=cost.fixed_seconds + cost.row_seconds * (rows + queries),
            query_memory=int(min(split.total, answer + segment + held + split.scratch)),
            query_seconds=sum(layer.seconds for layer in planned),
            row_bytes=cost.row_bytes,
            basis_bytes=cost.basis_bytes,
            rows_per_segment=max(1, int(cost.segment_rows)),
            fixed_seconds=cost.fixed_seconds,
            fits=not too_much,
            advice=", ".join(too_much),
        )

    def _layer(self, layer: LayerStorage, scratch: int) -> PlannedLayer:
        positions = layer.positions
        load = ProductSize(self.rows, self.queries, positions, positions, scratch)
        choice = choose_compute(layer.form, load, force=self.compute)
        alternatives = {how: cost.seconds for how, cost in choice.alternatives.items()}
        size, cost = layer.row_bytes * (self.rows + self.queries), choice.cost
        costs = (choice.compute, cost.flops, cost.seconds, alternatives)
        return PlannedLayer(report_layer(layer), size, *costs)

    def _capture_memory(self, cost: CaptureCost) -> float:
        """Return the peak bytes of a capture; with a budget, of no more samples at once than fit."""
        at_once = self.batch
        if not cost.coordinates:
            at_once = min(at_once, rows_at_once(self.shaped.prepared, self.shaped.rows))
        if self.memory is not None:
            fitting = int((self.memory - cost.fixed_memory) // max(1.0, cost.row_memory))
            at_once = max(1, min(at_once, fitting))
        return cost.fixed_memory + cost.row_memory * at_once

    def suggest_keep(self, *, below: float) -> str:
        """Describe the most bytes per row that fit."""
        for size in ("1MiB", "256KiB", "64KiB", "16KiB", "4KiB", "1KiB"):
            keep = Keep(size)
            candidate = self.plan(keep) if keep.row_bytes < below else None
            if candidate is not None and candidate.fits:
                return f"keep='{size}' fits: {format_bytes(candidate.disk_bytes)}"
        return "no keep= fits: take fewer rows or layers, a smaller batch, or a larger budget"
