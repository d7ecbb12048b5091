"""Cost of a capture before it runs: bytes per row, seconds and memory, from shapes and one timed sample."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size, leaves, map_leaves, rows_of, to_device
from gradkeep.capturing._choice import (
    block_sizes,
    choose_side,
    count_coordinates,
    count_operations,
    count_pairs,
    default_layers,
    moment_bytes,
    moment_values,
)
from gradkeep.capturing._coordinates import coordinate_storage
from gradkeep.capturing._first_batch import (
    rows_at_once,
    segment_bytes,
    segment_rows,
)
from gradkeep.capturing._readiness import device_of
from gradkeep.capturing._shapes import PassCount
from gradkeep.capturing._tracer import Tracer, fill
from gradkeep.capturing.rules._rules import (
    units_of,
    watched_modules,
)
from gradkeep.factors._bits import PACKED
from gradkeep.query._planner import FLOPS, WRITE
from gradkeep.store import Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradkeep.capturing._first_batch import Keep
    from gradkeep.capturing._rows import RowMaker
    from gradkeep.capturing._shapes import PassWork, ShapedCapture
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import GradientOf

    Numbers = Mapping[int, torch.Tensor]
    """Real tensors of a batch, by the storages of the fake ones."""


_PROOF_PASSES = 4.0
_TIMED_SECONDS = 1.5
"""Seconds that the timed pass may be predicted to take; longer sequences are cut."""


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Cost of a capture, per row and fixed."""

    layers: tuple[LayerStorage, ...]
    row_bytes: float
    """Bytes on disk per row, everything included."""
    query_bytes: float
    """Bytes on disk per query row, whose coordinates are not rounded."""
    segment_rows: int
    basis_bytes: float
    row_seconds: float
    fixed_seconds: float
    """Seconds of the proof on the first rows, and of the basis."""
    row_memory: float
    """Bytes of memory per sample that runs at once."""
    fixed_memory: float
    """Further bytes of memory beside the model: moments, basis, segments."""
    coordinates: int = 0
    """Coordinates per row; 0 for whole gradients."""

    def disk_bytes(self, rows: int, queries: int) -> float:
        """Return the bytes of all rows and queries, with segment headers and the basis."""
        names = [array.name for layer in self.layers for array in layer.arrays]
        names += ["id", "example", "loss", "norm", "label"]
        # An array takes 160 bytes of a segment's header, and its name twice.
        header = sum(160 + 2 * len(name) for name in names)
        segments = -(-rows // self.segment_rows) + -(-queries // self.segment_rows)
        total = rows * self.row_bytes + queries * self.query_bytes
        return total + segments * header + self.basis_bytes


def measure_pace(
    model: nn.Module, task: Task, batch: Any, of: GradientOf | None, work: PassWork
) -> float:
    """Return the measured seconds of one sample, forward and backward, over the predicted seconds.

    Sequences are cut to fewer tokens if a whole one would take long; 1 for a long sample that cannot be
    cut.
    """
    one = to_device(rows_of(batch, 0, 1), device_of(model))
    share = _TIMED_SECONDS / max(work.seconds, 1e-9)
    if share < 1:
        lengths = {
            leaf.shape[1] if leaf.dim() == 2 and not leaf.is_floating_point() else None
            for leaf in leaves(one)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 1
        }
        tokens = lengths.pop() if len(lengths) == 1 else None
        if tokens is None and share < 1 / 4:
            return 1.0
        if tokens is not None:
            _timed(model, task, _cut(one, 8), of)  # warms up
            one = _cut(one, max(16, int(share * tokens)))
    count = PassCount(model)
    with count.operators():
        spent = least = _timed(model, task, one, of)
    while spent < 2 * _TIMED_SECONDS / 15:  # counting operators slows short passes down
        seconds = _timed(model, task, one, of)
        least, spent = min(least, seconds), spent + max(seconds, _TIMED_SECONDS / 30)
    return least / count.per_row(1).seconds


def _timed(model: nn.Module, task: Task, batch: Any, of: GradientOf | None) -> float:
    wall, processor = time.perf_counter(), time.process_time()
    _, target, calls = Tracer(model, task, of).forward(watched_modules(units_of(model)), batch)
    fill(calls, target)
    # CPU time ignores other processes; wall time does not add up several threads.
    return min(time.perf_counter() - wall, time.process_time() - processor)


def _cut(batch: Any, to: int) -> Any:
    def shorter(leaf: Any) -> Any:
        return leaf[:, :to] if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 else leaf

    return map_leaves(batch, shorter)


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Measured bytes and seconds per row."""

    row_bytes: float
    seconds: float


def measure_rows(maker: RowMaker, batch: Any) -> MeasuredRows:
    """Compute the rows of a batch as a capture does, and measure them."""
    rows = batch_size(batch)
    wall, processor = time.perf_counter(), time.process_time()
    arrays = maker.make(batch, alone=True)
    seconds = min(time.perf_counter() - wall, time.process_time() - processor)
    encoded = {array.name: array.row_bytes for layer in maker.layers for array in layer.arrays}
    total = 0.0
    for name, values in {**arrays.values, **arrays.gradients}.items():
        array = values.values if isinstance(values, Ragged) else values
        total += len(array) * encoded[name] if name in encoded else array.nbytes
        total += 8 * (len(values.offsets) - 1) if isinstance(values, Ragged) else 0
    return MeasuredRows(total / rows + 16, seconds / rows)


def exact_cost(
    shaped: ShapedCapture, pace: float, *, measured: MeasuredRows | None = None
) -> CaptureCost:
    """Estimate the cost of whole gradients, from measured rows or from shapes.

    `pace` is the measured seconds of a pass over the predicted ones.
    """
    prepared, rows = shaped.prepared, max(1, shaped.rows)
    counted = prepared.row_bytes + shaped.values + shaped.token_values + 4.0 * len(prepared.layers)
    row_bytes = counted if measured is None else measured.row_bytes
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values()) / rows
    pass_seconds = pace * shaped.work.seconds
    norms = sum(
        2.0 * g * layer.positions**2 * (r + c)
        for layer in prepared.layers
        for g, r, c in block_sizes([layer.form])
        if c > 1
    )
    making = pass_seconds + max(1.0, pace) * norms / FLOPS if measured is None else measured.seconds
    tried = min(rows_at_once(prepared, rows), 32)
    segment = segment_bytes(None)
    return CaptureCost(
        layers=prepared.layers,
        row_bytes=row_bytes,
        query_bytes=row_bytes,
        segment_rows=segment_rows(prepared.row_bytes, segment),
        basis_bytes=0.0,
        # A value is written, read or hashed six times on its way to the disk.
        row_seconds=making + 6.0 * row_bytes / 4 * WRITE,
        fixed_seconds=_PROOF_PASSES * tried * pass_seconds,
        row_memory=2 * (shaped.work.saved + factors + row_bytes),
        fixed_memory=2.0 * min(segment, tried * row_bytes),
    )


def coordinate_cost(
    shaped: ShapedCapture, keep: Keep, pace: float, *, rows: int, chosen: bool
) -> CaptureCost:
    """Estimate the cost of compressed rows: the proof, a pass over some rows for the basis, one over all.

    With `chosen`, all layers are used; else only `default_layers`.
    """
    exact = {layer.unit: layer for layer in shaped.prepared.layers}
    pieces = shaped.prepared.pieces
    units = list(pieces) if chosen else default_layers(list(pieces), keep)
    forms = {unit: pieces[unit].form for unit in units}
    positions = {unit: exact[unit].positions for unit in units}
    sizes = block_sizes(forms.values())
    side = choose_side(sizes, keep, list(pieces))
    used = keep.sample(max(k.positions for k in shaped.prepared.layers), rows)
    pairs = {}
    for unit in units:  # the rank of moments is at most their number of positions
        rank = min(side, math.ceil(used * positions[unit])) if keep.whitened else side
        pairs[unit] = count_pairs(block_sizes([forms[unit]]), rank)
    available = sum(pairs.values())
    size, group, fold = count_coordinates(available, keep)
    step = group or (8 // keep.bits if keep.bits in PACKED else 1)
    # Assuming that all pairs of vectors are worth the same.
    shares = {unit: size * pairs[unit] // max(1, available) // step * step for unit in units}
    layers = tuple(
        coordinate_storage(exact[u], shares[u], keep.bits, group, is_first=u is units[0])
        for u in units
    )
    row_bytes = sum(layer.row_bytes for layer in layers) + shaped.values
    basis = sum(4 * g * (r * min(side, r) + c * min(side, c)) for g, r, c in sizes)
    moved = sum(2 * positions[u] * count_operations(block_sizes([forms[u]]), side) for u in units)
    basis_flops = sum(_basis_flops(forms[u], used * positions[u], side, keep) for u in units)
    restored = max((4.0 * u.size for u in units if forms[u].kind == "tied"), default=0.0)
    pass_seconds, tried = pace * shaped.work.seconds, 2
    product = max(1.0, pace) / FLOPS  # seconds of an operation of large matrix products
    proof = tried * sum(piece.rows.nbytes for piece in pieces.values()) / shaped.rows
    proof += 3 * 4.0 * max(unit.size for unit in pieces)
    return CaptureCost(
        layers=layers,
        row_bytes=row_bytes,
        query_bytes=4.0 * size + shaped.values,
        segment_rows=segment_rows(row_bytes, segment_bytes(None), coordinates=True),
        basis_bytes=basis + (12.0 * fold * size if keep.whitened else 4.0 * size),
        row_seconds=pass_seconds + product * moved,
        fixed_seconds=(tried * (_PROOF_PASSES + 1) + used) * pass_seconds + product * basis_flops,
        row_memory=2 * (shaped.work.saved + shaped.work.largest),
        fixed_memory=max(proof, moment_bytes(forms.values()) + 3 * restored, 2.0 * basis),
        coordinates=size,
    )


def _basis_flops(form: AnyForm, positions: float, side: int, keep: Keep) -> float:
    """Count operations for second moments of both sides and, if whitened, their eigenvectors."""
    total = 0.0
    for groups, rows, cols in block_sizes([form]):
        sides = [moment_values(form, rows), moment_values(form, cols)]
        total += 1.2 * groups * positions * sum(sides) if cols > 1 else 0.0
        for size, values in zip((rows, cols), sides, strict=True):
            if keep.whitened and values > size:
                few = size > 512 and side <= size // 4  # by subspace iteration
                total += groups * (12.0 * size**2 * side if few else 40.0 * size**3)
    return total
