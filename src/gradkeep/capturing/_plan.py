"""What capturing and asking will take, before anything runs: bytes, memory, operations, seconds."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep import _annotations
from gradkeep._arguments import number
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep._display import text_table
from gradkeep.capturing._batches import batch_size, leaves, rows_of, to_device
from gradkeep.capturing._columns import without_columns
from gradkeep.capturing._estimate import (
    CaptureCost,
    Clock,
    SeenRows,
    coordinate_cost,
    exact_cost,
    keeps_exact,
    seen_rows,
)
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._footprint import rows_at_once
from gradkeep.capturing._mode import device_of, in_mode
from gradkeep.capturing._pace import measured_pace, predicted_seconds
from gradkeep.capturing._readiness import ready, uncompiled
from gradkeep.capturing._report import KeptLayer, kept_layer
from gradkeep.capturing._row_making import GradientMaker
from gradkeep.capturing._scale import (
    S3,
    WorkerCosts,
    checked_scale,
    measure_folder,
    measure_start,
    scale_plan,
)
from gradkeep.capturing._shapes import shaped_capture, shapes_of
from gradkeep.capturing._unpacking import unpacking_for
from gradkeep.capturing.coordinates._keep import Keep
from gradkeep.errors import BudgetError, CaptureError, GradkeepError
from gradkeep.factors._cost import ProductSize
from gradkeep.query._engine import DEFAULT_BUDGET, memory_shares
from gradkeep.query._planner import choose_compute

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing._scale import PlaceName, ScalePlan
    from gradkeep.capturing._shapes import ShapedCapture
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.factors._form import Compute
    from gradkeep.query._engine import MemoryShares
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import Encoding

_TRIED, _FEW, _MOST = 16, 2, 256
_PROVED = 0.5
"""Seconds that running and proving the first rows may be predicted to take; else shapes must do."""
_FINGERPRINT_SECONDS = 5e-6
"""Of one row, when a capture by workers is compared and sealed; as `./x bench scale` saw it."""
_DIALS = ("1MiB", "256KiB", "64KiB", "16KiB", "4KiB", "1KiB")
"""What is tried to keep of a row where all of its gradient is too much."""


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """What one layer will take."""

    layer: KeptLayer
    disk_bytes: float
    """On disk, for all rows and queries."""
    compute: Compute
    """How it will be multiplied."""
    flops: float
    seconds: float
    """Predicted, for all queries against all rows."""
    alternatives: dict[Compute, float]
    """Predicted seconds of every way."""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a capture and its questions will take; shows itself as a table."""

    layers: tuple[PlannedLayer, ...]
    """Of coordinates, as if all layers had their share; the basis decides which have more."""
    rows: int
    queries: int
    budget: int
    disk_bytes: float
    capture_memory: int
    """Bytes that capturing needs at once, beside the model."""
    capture_seconds: float
    query_memory: int
    """Bytes that asking needs at once."""
    query_seconds: float
    row_bytes: float = 0.0
    """Bytes on disk of one row, everything included."""
    basis_bytes: float = 0.0
    """Bytes on disk of the basis that coordinates are kept in."""
    fits: bool = True
    """Whether that is within the memory budget and the free bytes of the disk."""
    advice: str = ""
    """What is too much, and the `keep=` that would fit; empty: it fits."""
    rows_per_segment: int = 1
    fixed_seconds: float = 0.0
    """What a capture takes before its first row: the proof on the first batch, a basis."""

    def at_scale(
        self,
        *,
        rows: int,
        workers: int = 1,
        place: PlaceName = "local",
        load_seconds: float = 0.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> ScalePlan:
        """What capturing so many rows by so many workers takes, on devices as fast as this one.

        Bytes, requests, hours and memory for each worker, from what was measured here: a row's seconds,
        a process's start, and for `place="local"` the durable writes of `folder` (by default that of
        temporary files); the costs of `"s3"` are assumed, and said. `load_seconds` is what a row takes
        to be loaded. Cost: seconds.

        >>> import gradkeep as gk, torch
        >>> model, batch = torch.nn.Linear(8, 2), (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))
        >>> small = gk.plan(model, batch, task=gk.Classification(), rows=100)
        >>> far = small.at_scale(rows=10**9, workers=256, place="s3")
        >>> far.segments == -(-(10**9) // small.rows_per_segment), far.played.busy <= 1
        (True, True)
        """
        checked_scale(rows, workers, place)
        number("load_seconds", load_seconds, error=CaptureError, least=0)
        spread = self.capture_seconds - self.fixed_seconds
        costs = WorkerCosts(
            start_seconds=measure_start(workers) + self.fixed_seconds,
            first_seconds=self.fixed_seconds,
            row_seconds=spread / max(1, self.rows + self.queries) + load_seconds,
            row_bytes=self.row_bytes,
            rows_per_segment=self.rows_per_segment,
            check_seconds=load_seconds + _FINGERPRINT_SECONDS,
        )
        where = S3 if place == "s3" else measure_folder(os.fspath(folder or tempfile.gettempdir()))
        return scale_plan(
            costs, rows=rows, workers=workers, place=where, memory=self.capture_memory
        )

    def __str__(self) -> str:
        head = ("layer", "type", "T", "kept as", "on disk", "scored", "GFLOP", "seconds")
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
            for p in self.layers
        ]
        lines = [text_table(head, rows, right={2, 4, 6, 7})]
        basis = f", {format_bytes(self.basis_bytes)} of them its basis" if self.basis_bytes else ""
        lines += [
            (
                f"capture {self.rows + self.queries} rows of {format_bytes(self.row_bytes)}: "
                f"{format_bytes(self.disk_bytes)} on disk{basis}, "
                f"{format_bytes(self.capture_memory)} of memory, about {self.capture_seconds:.3g} s"
            ),
            (
                f"ask {self.queries} x {self.rows}: {format_bytes(self.query_memory)} of memory "
                f"(budget {format_bytes(self.budget)}), about {self.query_seconds:.3g} s"
            ),
        ]
        return "\n".join([*lines, *([self.advice] if self.advice else [])])


@_annotations.checked(CaptureError)
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
    """Predict what capturing `rows` and asking `queries` of them will take, layer by layer.

    It always answers: what does not fit is said in `advice`, with the `keep=` that would. Without
    budgets, the memory of this machine and the free bytes of this folder's disk are compared. A small
    model runs a few samples and is measured; of a large one shapes tell the bytes, and one short
    sample the speed. Model and batch may be on the meta device: then seconds are those
    of one core of a server, from the operations of a pass.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 10))
    ...     batch = torch.empty(8, 4096), torch.empty(8, dtype=torch.int64)
    >>> import gradkeep as gk
    >>> found = gk.plan(model, batch, task=gk.Classification(), rows=10**9, disk_budget="2TB")
    >>> found.fits, found.advice
    (False, "49.25 TB on disk are more than the 2.00 TB there are; keep='1KiB' fits: 996.18 GB")
    """
    model = uncompiled(model)
    unpacking = unpacking_for(model, task, mode)
    batch = batch if unpacking is None else unpacking.settled(batch).parts(batch)[0]
    budget = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    limits = _Limits(
        None if memory_budget is None else budget,
        _free_bytes() if disk_budget is None else parse_bytes(disk_budget),
    )
    settings = CaptureSettings(layers, encoding=encoding, keep=keep, tolerance=tolerance)
    model = uncompiled(model)
    batch = _as_captured(model, task, without_columns(batch), mode)
    sized = _sized(model, task, batch, settings, mode)
    asked = _Asked(rows, queries, batch_size(batch), layers is not None, compute)
    wanted = settings.compressed
    if wanted is None or keeps_exact(sized.shaped, wanted):
        exact = exact_cost(sized.shaped, sized.clock, seen=sized.seen)
        found = _planned(exact, asked, limits, budget, sized)
    else:
        found = _planned(_coordinates(sized, wanted, asked), asked, limits, budget, sized)
    if found.fits:
        return found
    fitting = _first_that_fits(sized, asked, limits, budget, below=found.row_bytes)
    return dataclasses.replace(found, advice=f"{found.advice}; {fitting}")


@dataclass(frozen=True, slots=True)
class _Limits:
    """What may be taken."""

    memory: int | None
    """None: nobody said; what this machine has."""
    disk: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the plan is for."""

    rows: int
    queries: int
    batch: int
    chosen: bool
    """Whether the layers were chosen."""
    compute: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Sized:
    """A model's capture with its shapes, and how fast it runs."""

    shaped: ShapedCapture
    clock: Clock
    seen: SeenRows | None = None
    """What some rows took, where they ran."""


def _as_captured(model: nn.Module, task: Task, batch: Any, mode: Mode | None) -> Any:
    """The batch, or if it is a pack, its documents."""
    unpacking = None if _is_hollow(model, batch) else unpacking_for(model, task, mode)
    return batch if unpacking is None else unpacking.settled(batch).parts(batch)[0]


def _is_hollow(model: nn.Module, batch: Any) -> bool:
    """Whether there are only shapes: on the meta device, and not fetched from elsewhere either."""
    hollow = any(getattr(leaf, "is_meta", False) for leaf in leaves(batch))
    return hollow or device_of(model).type == "meta"


def _sized(
    model: nn.Module, task: Task, batch: Any, settings: CaptureSettings, mode: Mode | None
) -> _Sized:
    """From a run of the first samples if that is quick, else from shapes and one short sample."""
    if settings.compressed is not None:
        settings = settings.exact
    part = rows_of(batch, 0, min(batch_size(batch), _TRIED))
    hollow = _is_hollow(model, batch)
    shaped: ShapedCapture | None = None
    try:
        shaped = shaped_capture(model, task, part, settings, mode=mode)
    except GradkeepError:
        raise
    except Exception as error:
        # Models may do anything, also look at numbers that are not there.
        if hollow:
            raise CaptureError(
                "this model does not run on shapes alone",
                found=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                fix="build model and batch with numbers, on the CPU",
            ) from error
    if shaped is not None and hollow:
        return _Sized(shaped, Clock(1.0))
    with ready(model), in_mode(model, mode):
        if shaped is not None and not _is_quick(shaped):
            pace = measured_pace(model, task, part, settings.of, shaped.work)
            return _Sized(shaped, Clock(pace))
        device = device_of(model)
        own = to_device(part if shaped is not None else rows_of(part, 0, _FEW), device)
        prepared = prepare_capture(model, task, own, settings)
        shaped = shapes_of(prepared, own) if shaped is None else shaped
        shaped = dataclasses.replace(shaped, prepared=prepared)
        pace = measured_pace(model, task, own, settings.of, shaped.work)
        seen = seen_rows(GradientMaker(prepared, {}, None, device), own)
        # As many rows at once as a capture takes, where that is quick: a batch costs by itself, too.
        many = min(batch_size(batch), int(_PROVED / 4 / max(seen.seconds, 1e-6)), _MOST)
        if many > batch_size(own):
            own = to_device(rows_of(batch, 0, many), device)
            seen = min(
                (seen_rows(GradientMaker(prepared, {}, None, device), own) for _ in range(3)),
                key=lambda one: one.seconds,
            )
        return _Sized(shaped, Clock(pace), seen)


def _is_quick(shaped: ShapedCapture) -> bool:
    held = sum(piece.rows.nbytes for piece in shaped.prepared.pieces.values())
    seconds = shaped.rows * predicted_seconds(shaped.work)
    return seconds <= _PROVED and held + shaped.rows * shaped.work.saved <= DEFAULT_BUDGET // 4


def _coordinates(sized: _Sized, keep: Keep, asked: _Asked) -> CaptureCost:
    return coordinate_cost(sized.shaped, keep, sized.clock, rows=asked.rows, chosen=asked.chosen)


def _planned(
    cost: CaptureCost, asked: _Asked, limits: _Limits, budget: int, sized: _Sized
) -> CapturePlan:
    rows, queries = asked.rows, asked.queries
    segment = int(min(cost.segment_rows, rows) * cost.row_bytes)
    answer = 4 * rows * queries
    too_much: list[str] = []
    sizes: dict[str, Any] = {
        "answer": answer,
        "mapped": segment,
        "query_row": cost.query_bytes,
        "train_row": cost.row_bytes,
        "queries": queries,
        "rows": rows,
    }
    try:
        split = memory_shares(limits.memory, **sizes)
    except BudgetError as error:
        too_much.append(
            f"asking takes {error.expected}, more than the {format_bytes(budget)} given"
        )
        split = memory_shares(None, **sizes)
    planned = [_layer(keeping, asked, split) for keeping in cost.kept]
    memory = _capture_memory(cost, asked, limits, sized)
    there = _machine_bytes() if limits.memory is None else limits.memory
    if memory > there:
        too_much.append(
            f"capturing takes {format_bytes(memory)} of memory beside the model, more than the "
            f"{format_bytes(there)} there are"
        )
    disk = cost.disk_bytes(rows, queries)
    if disk > limits.disk:
        told = (
            f"{format_bytes(disk)} on disk are more than the {format_bytes(limits.disk)} there are"
        )
        too_much.insert(0, told)
    held = 2 * (cost.query_bytes * split.query_rows + cost.row_bytes * split.train_rows)
    return CapturePlan(
        layers=tuple(planned),
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


def _layer(keeping: LayerKeeping, asked: _Asked, split: MemoryShares) -> PlannedLayer:
    positions = keeping.positions
    load = ProductSize(asked.rows, asked.queries, positions, positions, split.scratch)
    choice = choose_compute(keeping.form, load, force=asked.compute)
    return PlannedLayer(
        layer=kept_layer(keeping),
        disk_bytes=keeping.row_bytes * (asked.rows + asked.queries),
        compute=choice.compute,
        flops=choice.cost.flops,
        seconds=choice.cost.seconds,
        alternatives={how: cost.seconds for how, cost in choice.alternatives.items()},
    )


def _capture_memory(cost: CaptureCost, asked: _Asked, limits: _Limits, sized: _Sized) -> float:
    """With as many samples at once as a capture takes; if a budget is given, no more than fit."""
    at_once = asked.batch
    if not cost.coordinates:
        at_once = min(at_once, rows_at_once(sized.shaped.prepared, sized.shaped.rows))
    if limits.memory is not None:
        fitting = int((limits.memory - cost.fixed_memory) // max(1.0, cost.row_memory))
        at_once = max(1, min(at_once, fitting))
    return cost.fixed_memory + cost.row_memory * at_once


def _first_that_fits(
    sized: _Sized, asked: _Asked, limits: _Limits, budget: int, *, below: float
) -> str:
    """The most bytes a row that fit, in words."""
    for dial in _DIALS:
        keep = Keep(dial)
        if keep.row_bytes >= below:
            continue
        found = _planned(_coordinates(sized, keep, asked), asked, limits, budget, sized)
        if found.fits:
            return f"keep='{dial}' fits: {format_bytes(found.disk_bytes)}"
    return "no keep= fits: take fewer rows or layers, a smaller batch, or a larger budget"


def _free_bytes() -> int:
    return shutil.disk_usage(os.curdir).free


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
