"""What capturing and asking will take, before anything runs: bytes, memory, operations, seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep import _annotations
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep._display import text_table
from gradkeep._public import renamed_arguments
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._footprint import row_footprint, rows_at_once, rows_within, segment_bytes
from gradkeep.capturing._mode import device_of, in_mode
from gradkeep.capturing._readiness import ready, uncompiled
from gradkeep.capturing._report import KeptLayer, kept_layer
from gradkeep.capturing._unpacking import unpacking_for
from gradkeep.errors import CaptureError
from gradkeep.factors import ProductSize
from gradkeep.query import DEFAULT_BUDGET, choose_compute, machine_speeds, memory_shares

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._mode import Mode
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.factors import Compute
    from gradkeep.query import LayerChoice
    from gradkeep.store import Encoding

_TRIED = 16


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
    rows: int
    queries: int
    budget: int
    disk_bytes: float
    capture_memory: int
    """Bytes that capturing needs at once."""
    capture_seconds: float
    query_memory: int
    """Bytes that asking needs at once."""
    query_seconds: float

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
        lines += [
            (
                f"capture {self.rows + self.queries} rows: {format_bytes(self.disk_bytes)} on disk, "
                f"{format_bytes(self.capture_memory)} of memory, about {self.capture_seconds:.3g} s"
            ),
            (
                f"ask {self.queries} x {self.rows}: {format_bytes(self.query_memory)} of memory "
                f"(budget {format_bytes(self.budget)}), about {self.query_seconds:.3g} s"
            ),
        ]
        return "\n".join(lines)


@renamed_arguments(storage="keep", scoring="compute")
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
    mode: Mode | None = "eval",
) -> CapturePlan:
    """Predict what capturing `rows` and asking `queries` of them will take, layer by layer.

    Runs a few samples of the batch through the model, and measures this machine once. A budget
    below the least possible is an error that says what the least is.
    """
    model = uncompiled(model)
    unpacking = unpacking_for(model, task, mode)
    batch = batch if unpacking is None else unpacking.settled(batch).parts(batch)[0]
    budget = DEFAULT_BUDGET if memory_budget is None else parse_bytes(memory_budget)
    with ready(model), in_mode(model, mode):
        device = device_of(model)
        count = min(batch_size(batch), _TRIED)
        part = to_device(rows_of(batch, 0, count), device)
        settings = CaptureSettings(layers, encoding=encoding, keep=keep, tolerance=tolerance)
        prepared = prepare_capture(model, task, part, settings)
        footprint = row_footprint(prepared, part, count)
        started = time.perf_counter()
        prepared.tracer.run(part)
        per_row = (time.perf_counter() - started) / count
    at_once = min(
        batch_size(batch),
        rows_at_once(prepared, count),
        rows_within(budget, footprint),
    )
    row_bytes = prepared.row_bytes
    segment = int(min(rows * row_bytes, segment_bytes(None)))
    split = memory_shares(
        memory_budget,
        answer=4 * rows * queries,
        mapped=segment,
        query_row=row_bytes,
        train_row=row_bytes,
        queries=queries,
        rows=rows,
    )
    speeds = machine_speeds()
    planned = []
    for keeping in prepared.kept:
        load = ProductSize(rows, queries, keeping.positions, keeping.positions)
        choice = choose_compute(keeping.form, load, speeds, force=compute, scratch=split.scratch)
        planned.append(
            PlannedLayer(
                layer=kept_layer(keeping),
                disk_bytes=keeping.row_bytes * (rows + queries),
                compute=choice.compute,
                flops=choice.cost.flops,
                seconds=choice.cost.seconds,
                alternatives={how: cost.seconds for how, cost in choice.alternatives.items()},
            )
        )
    held = 2 * row_bytes * (split.query_rows + split.train_rows)
    return CapturePlan(
        layers=tuple(planned),
        rows=rows,
        queries=queries,
        budget=budget,
        disk_bytes=row_bytes * (rows + queries),
        capture_memory=int(footprint * at_once + 2 * segment),
        capture_seconds=per_row * (rows + queries),
        query_memory=int(min(split.total, 4 * rows * queries + segment + held + split.scratch)),
        query_seconds=sum(layer.seconds for layer in planned),
    )
