"""Check that a row is reproducible and independent of its batch."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.capturing._batches import batch_size, leaves, map_leaves, rows_of, to_device
from gradkeep.capturing._proofs import backward_per_layer, moved_rows_error, random_weights
from gradkeep.capturing._readiness import device_of, has_active_dropout
from gradkeep.capturing.tasks._tasks import measure_losses
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Task

    Projection = Callable[[LayerUnit, Tensor], Tensor]


def run_rows(
    model: nn.Module, task: Task, batch: Any, rows: slice, tracer: Tracer | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run some rows of a batch without the others.

    Returns their losses and, with a tracer, the tensor that it differentiates.
    """
    some = to_device(rows_of(batch, rows.start, rows.stop), device_of(model))
    if tracer is None:
        return measure_losses(task, model, some).losses.detach(), None
    measured, target = tracer.measure(some)
    return measured.losses.detach(), target


def check_repeatable(model: nn.Module, task: Task, batch: Any, mode: Mode | None) -> bool:
    """Return True if a second pass gives the same losses; raise if it must and does not, or if rows mix.

    Gradients are stored under a row's id alone. A model that counts its calls, carries a state from batch
    to batch or draws at random gives the same row another gradient each time; one that uses statistics
    of the batch gives another one beside other rows. Cost: three forward passes of a few rows.
    """
    if has_active_dropout(model):
        return False  # the user chose train mode
    count = min(4, batch_size(batch))
    one, _ = run_rows(model, task, batch, slice(0, count))
    if one.shape != (count,):
        return True  # raises where rows are computed
    second, _ = run_rows(model, task, batch, slice(0, count))
    # Tolerances relative to the mean loss: 1e-3 for a second pass, 1e-2 beside other rows. Matrix
    # products of other sizes round differently, in models that use 16 bits by up to 1%.
    if not _is_close(one, second, 1e-3):
        if mode == "train":
            return False
        raise CaptureError(
            "the model gives the same samples different losses in a second pass",
            code="capture.not_repeatable",
            found="a counter, a running mean, hidden states, or random numbers",
            fix="Switch it off, or pass mode='train' to store the gradients of a single pass.",
        )
    few = min(2, count - 1)
    if few and not _is_close(one[:few], run_rows(model, task, batch, slice(0, few))[0], 1e-2):
        raise CaptureError(
            "a sample's loss depends on the other samples of its batch",
            code="capture.samples_mix",
            fix="Capture in eval mode (mode='eval'), without batch statistics.",
        )
    return True


@contextlib.contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, up to 256 MiB of them, at the end of the block."""
    free_bytes, copies = 256 << 20, []
    for buffer in model.buffers():
        free_bytes -= buffer.nbytes
        if free_bytes >= 0 and not buffer.is_meta and not buffer.is_inference():
            copies.append((buffer, buffer._version, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, before in copies:
                if buffer._version != version:
                    buffer.copy_(before)


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.double(), other.double()
    limit = tolerance * float(one.abs().nan_to_num().mean()) + 1e-6
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=tolerance, atol=limit, equal_nan=True)
    )


@dataclass(slots=True, eq=False)
class RowAudit:
    """Check some rows of a capture as they are computed; without a tracer, their losses only."""

    model: nn.Module
    task: Task
    device: torch.device
    tracer: Tracer | None = None
    """Computes gradients; None if only losses are stored."""
    project: Projection | None = None
    """Maps a unit's gradients `[K, P]` to what is stored; None for the identity."""
    checks: int = 0
    """Number of checks so far."""
    seconds: float = 0.0
    """Time spent in checks."""
    is_last: bool = False
    """Set for the last batch, which is always checked."""
    _total: float = 0.0
    _batches: int = 0
    _odd: set[tuple[Any, ...]] = field(default_factory=set)
    _slack: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def check_batch(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, seconds: float
    ) -> None:
        """Check some rows of a batch that took `seconds` to capture, if a check is due."""
        self._total += seconds
        count = self._due(batch)
        if not count:
            return
        started = time.perf_counter()
        rows = batch_size(batch)
        start = self._random.randrange(rows - count + 1)
        try:
            self._check(ids, batch, losses, traced, slice(start, start + count))
        finally:
            self.checks += 1
            self.seconds += time.perf_counter() - started

    def _due(self, batch: Any) -> int:
        """Return the number of rows to check; 0 for the first batch, which is proved."""
        rows, self._batches = batch_size(batch), self._batches + 1
        shape = tuple(x.shape for x in leaves(batch) if isinstance(x, torch.Tensor | np.ndarray))
        is_new = shape not in self._odd and len(self._odd) <= 8
        self._odd |= {shape} if is_new else set()
        is_last, self.is_last = self.is_last, False
        if self._batches == 1:
            return 0
        # A sixteenth of the rows, at most 8.
        few = max(1, min(8, rows // 16))
        if is_new:
            # A batch with a new shape: at least 4 rows, for the first 8 shapes.
            return max(few, min(rows, 4))
        # Other checks may take 1% of the time of the capture.
        allowed = max(0.002, 0.01 * self._total)
        each = self.seconds / max(1, self.checks)
        within = self.seconds + each <= allowed
        return few if is_last or self._batches == 2 or within else 0

    def _check(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, part: slice
    ) -> None:
        differences = self._differences(batch, losses, traced, part)
        if differences.row is None and not differences.layers:
            return
        confirmed = self._differences_in_double(batch, part, differences)
        if confirmed.row is not None:
            raise CaptureError(
                f"the loss of sample {int(ids[part.start + confirmed.row])} changes without its batch",
                code="capture.samples_mix_later",
                found="an overflowing capacity, batch statistics, or a model that changes",
                fix="Switch it off while you capture, or capture with batches of one row.",
            )
        if confirmed.layers:
            raise moved_rows_error(confirmed.layers, int(ids[part.start]))
        self._slack *= 10  # the difference was rounding

    def _tolerance(self) -> float:
        """Return the relative error of a pass over some rows in the model's precision."""
        proofs = None if self.tracer is None else self.tracer.proofs
        return 1e-3 if proofs is None or proofs.tolerance >= 1e-3 else 10 * proofs.tolerance

    def _differences(
        self, batch: Any, losses: Tensor, traced: Traced | None, part: slice, within: float = 0.0
    ) -> _Differences:
        tracer = None if traced is None else self.tracer
        alone, target = run_rows(self.model, self.task, batch, part, tracer)
        differences = _compare_losses(losses, alone, part, within or 1e-3)
        if tracer is None or traced is None or target is None:
            return differences
        near = within or self._slack * self._tolerance()
        weights = random_weights(target, seed=1)

        def compare(unit: LayerUnit, truth: Tensor) -> None:
            piece = traced.pieces[unit]
            rows = piece.rows.take(part.start, part.stop).widened()
            own = piece.form.weighted_sum(rows, weights.unsqueeze(0).to(rows.example))[0]
            expected = truth if self.project is None else self.project(unit, truth.unsqueeze(0))[0]
            error, scale = float((own.to(expected) - expected).norm()), float(expected.norm())
            if not error <= near * max(scale, float(own.norm())):
                differences.layers.append(unit.name)

        units = [unit for unit in tracer.units if unit.rule != "whole"]
        for unit in backward_per_layer((target * weights).sum(), units, compare):
            piece = traced.pieces[unit]  # the rows alone do not use it
            lengths = piece.form.squared_norms(piece.rows.take(part.start, part.stop).widened())
            if bool((lengths > 0).any()):
                differences.layers.append(unit.name)
        return differences

    def _differences_in_double(
        self, batch: Any, part: slice, differences: _Differences
    ) -> _Differences:
        """Compare again in double precision, where rounding does not matter."""
        if next(self.model.parameters()).dtype != torch.float64:
            try:
                with _in_double(self.model):
                    return self._recapture(map_leaves(batch, _to_double), part, 1e-6)
            except CaptureError:
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError):
                pass  # the model uses a precision of its own
        elif self._tolerance() < 1e-3:
            return differences
        return self._recapture(batch, part, 0.3)  # parts of the model compute with fewer bits

    def _recapture(self, batch: Any, part: slice, within: float) -> _Differences:
        """Capture the whole batch again, and compare some of its rows with the same rows run alone."""
        if self.tracer is None:
            losses, _ = run_rows(self.model, self.task, batch, slice(0, batch_size(batch)))
            return self._differences(batch, losses, None, part, within)
        traced = self.tracer.run(batch, device=self.device)
        project, self.project = self.project, None
        try:
            return self._differences(batch, traced.measured.losses.detach(), traced, part, within)
        finally:
            self.project = project


@dataclass(slots=True, eq=False)
class _Differences:
    """Rows and layers that differ when some rows run alone."""

    row: int | None
    """First row whose loss differs."""
    layers: list[str] = field(default_factory=list)


def _compare_losses(batch: Tensor, alone: Tensor, part: slice, within: float) -> _Differences:
    batch, alone = batch.detach().double(), alone.double()
    size = float(batch.abs().nan_to_num().mean())
    wrong = (batch[part] - alone).abs() > within * (alone.abs() + 0.1 * size) + 1e-12
    return _Differences(int(wrong.int().argmax()) if wrong.any() else None)


def change_of_first_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], within: float
) -> str | None:
    """Describe how losses or norms of the first rows differ from before; None if they do not."""
    for name in {"loss", "norm"} & before.keys():
        was, now = (torch.as_tensor(values[name]) for values in (before, after))
        if not _is_close(was, now, within):
            return f"{name} {now.tolist()}, not {was.tolist()}"
    return None


@contextlib.contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in double precision; restore parameters and buffers afterwards."""
    parameters = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype == torch.float32
    ]
    try:
        for parameter, data in parameters:
            parameter.data = data.double()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _to_double(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.float32:
        return leaf.astype(np.float64)
    is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.double() if is_single else leaf
