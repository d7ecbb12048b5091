"""Spot checks while a capture runs: some rows of later batches against autograd, run apart from the rest.

What is captured of a row must be the gradient of that row alone, wherever it lies in its batch and
whichever rows are beside it. Shapes do not show it: a model may sort its rows, drop those beyond a
capacity, or change after the first batches. So a few rows of odd batches, of the second and the last
one, and of as many others as a small share of the time allows, run again without the others.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep.capturing._arriving import told_of_gradients
from gradkeep.capturing._batches import batch_size, leaves, rows_of, to_device, with_leaves
from gradkeep.capturing._proofs import rows_moved
from gradkeep.capturing.tasks._task import losses_alone
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Task

    Projection = Callable[[LayerUnit, Tensor], Tensor]

_ODD, _MOST_ODD = 4, 8
"""Rows that are checked of a batch with a new shape, and of how many such batches."""
_FEW, _SHARE = 8, 16
"""Of other batches a sixteenth of the rows, at most so many."""
_TIME_SHARE, _FREE_SECONDS = 0.01, 0.002
"""How much of a capture's time checks may take, beside those that are always made."""
_DOUBTED, _LOOSE = 1e-6, 0.3
"""Relative errors that are accepted in double precision, and where a model keeps to fewer bits."""
_CHANGED = 1e-2
"""Share by which a loss may change while a capture runs."""


@dataclass(slots=True, eq=False)
class RowAudit:
    """Checks rows of a capture as they are made; of captures without gradients, their losses."""

    model: nn.Module
    task: Task
    device: torch.device
    tracer: Tracer | None = None
    """What makes gradients; None: losses alone are kept."""
    project: Projection | None = None
    """What is made of a unit's gradients `[K, P]` before they are kept; None: nothing."""
    checks: int = 0
    """How often rows were checked."""
    seconds: float = 0.0
    """Time that checks took."""
    is_last: bool = False
    """Set for the last batch, which is always checked."""
    _total: float = 0.0
    _batches: int = 0
    _odd: set[tuple[Any, ...]] = field(default_factory=set)
    _slack: float = 1.0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def look(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, took: float
    ) -> None:
        """Check some rows of a batch that was captured within so many seconds, if it is time to."""
        self._total += took
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
        """How many rows of a batch are checked; none of the first one, which is proved."""
        rows, self._batches = batch_size(batch), self._batches + 1
        shape = tuple(x.shape for x in leaves(batch) if isinstance(x, torch.Tensor | np.ndarray))
        is_new = shape not in self._odd and len(self._odd) <= _MOST_ODD
        self._odd |= {shape} if is_new else set()
        is_last, self.is_last = self.is_last, False
        if self._batches == 1:
            return 0
        few = max(1, min(_FEW, rows // _SHARE))
        if is_new:
            return max(few, min(rows, _ODD))
        allowed = max(_FREE_SECONDS, _TIME_SHARE * self._total)
        each = self.seconds / max(1, self.checks)
        within = self.seconds + each <= allowed
        return few if is_last or self._batches == 2 or within else 0

    def _check(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, part: slice
    ) -> None:
        found = self._differences(batch, losses, traced, part)
        if not found.loss_differs and not found.layers:
            return
        sure = self._differences_in_double(batch, part, found)
        if sure.loss_differs:
            row = part.start + sure.row
            raise CaptureError(
                f"the loss of sample {int(ids[row])} is another one without the rest of its batch",
                found="samples that influence each other in a later batch (a capacity that overflows, "
                "statistics over the batch), or a model that changes while it is captured",
                expected="a loss per sample that depends on that sample alone",
                fix="switch that off while you capture, or capture with batches of one row",
            )
        if sure.layers:
            raise rows_moved(sure.layers, int(ids[part.start]))
        self._slack *= 10  # rounding shows in these gradients

    def _tolerance(self) -> float:
        """The relative error of a pass over some rows, in the precision that the model computes in."""
        proofs = None if self.tracer is None else self.tracer.proofs
        return (
            1e-3 if proofs is None else 10 * proofs.tolerance if proofs.tolerance < 1e-3 else 1e-3
        )

    def _differences(
        self, batch: Any, losses: Tensor, traced: Traced | None, part: slice, within: float = 0.0
    ) -> _Differences:
        some = to_device(rows_of(batch, part.start, part.stop), self.device)
        count = part.stop - part.start
        if self.tracer is None or traced is None:
            alone = losses_alone(self.task, self.model, some).losses
            return _compared_losses(losses[part], alone, losses, within or 1e-3)
        measured, target = self.tracer.measure(some)
        near = within or self._slack * self._tolerance()
        found = _compared_losses(losses[part], measured.losses, losses, within or 1e-3)
        weights = torch.rand(count, generator=torch.Generator().manual_seed(1)).add_(0.5).to(target)
        units = {unit for unit in self.tracer.units if unit.rule != "whole"}

        def arrived(unit: LayerUnit, truth: Tensor) -> None:
            if unit not in units or traced is None:
                return
            piece = traced.pieces[unit]
            rows = piece.rows.take(part.start, part.stop).widened()
            own = piece.form.weighted_sum(rows, weights.unsqueeze(0).to(rows.example))[0]
            wanted = truth if self.project is None else self.project(unit, truth.unsqueeze(0))[0]
            error, scale = float((own.to(wanted) - wanted).norm()), float(wanted.norm())
            if not error <= near * max(scale, float(own.norm())):
                found.layers.append(unit.name)

        unused = told_of_gradients((target * weights).sum(), list(units), arrived)
        for unit in unused:
            piece = traced.pieces[unit]
            lengths = piece.form.squared_norms(piece.rows.take(part.start, part.stop).widened())
            if bool((lengths > 0).any()):
                found.layers.append(unit.name)
        return found

    def _differences_in_double(self, batch: Any, part: slice, found: _Differences) -> _Differences:
        """The same in double precision, where rounding is no excuse."""
        if next(self.model.parameters()).dtype == torch.float64:
            return self._again(batch, part, _LOOSE) if self._tolerance() >= 1e-3 else found
        try:
            with _in_double(self.model):
                return self._again(with_leaves(batch, _doubled), part, _DOUBTED)
        except CaptureError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return self._again(batch, part, _LOOSE)  # it keeps to its own precision

    def _again(self, batch: Any, part: slice, within: float) -> _Differences:
        """Capture the whole batch once more, and compare some of its rows with themselves run apart."""
        if self.tracer is None:
            losses = losses_alone(self.task, self.model, to_device(batch, self.device)).losses
            return self._differences(batch, losses, None, part, within)
        traced = self.tracer.run(batch, device=self.device)
        project, self.project = self.project, None
        try:
            return self._differences(batch, traced.measured.losses.detach(), traced, part, within)
        finally:
            self.project = project


@dataclass(slots=True, eq=False)
class _Differences:
    """What came out otherwise when some rows ran apart."""

    loss_differs: bool
    row: int = 0
    """The first of the rows whose loss differs."""
    layers: list[str] = field(default_factory=list)


def _compared_losses(one: Tensor, other: Tensor, batch: Tensor, within: float) -> _Differences:
    left, right = one.detach().double(), other.detach().double()
    size = float(batch.detach().abs().nan_to_num().double().mean())
    wrong = (left - right).abs() > within * (right.abs() + 0.1 * size) + 1e-12
    return _Differences(bool(wrong.any()), int(wrong.int().argmax()) if wrong.any() else 0)


def check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise unless the first rows of a capture come out at its end as they did at its begin."""
    for name in ("loss", "norm"):
        if name not in before:
            continue
        was, now = (np.asarray(values[name], np.float64) for values in (before, after))
        limit = _CHANGED * float(np.abs(was).mean()) + 1e-6
        if not np.allclose(was, now, rtol=_CHANGED, atol=limit, equal_nan=True):
            raise CaptureError(
                f"the {name} of the first samples is another one at the end of the capture",
                found=np.array2string(now, precision=6),
                expected=np.array2string(was, precision=6),
                fix="capture a model that does not change while it runs: no counters, caches or running "
                "means; nothing was sealed, so delete this capture before you capture again",
            )


@contextlib.contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision; afterwards its parameters and buffers are what they were."""
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


def _doubled(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.float32:
        return leaf.astype(np.float64)
    is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.double() if is_single else leaf
