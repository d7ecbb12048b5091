"""How fast a model's passes run here: one sample measured, or predicted from the machine's speeds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing._batches import leaves, rows_of, to_device, with_leaves
from gradkeep.capturing._calls import fill
from gradkeep.capturing._mode import device_of
from gradkeep.capturing._shapes import PassCount
from gradkeep.capturing._tracer import Tracer
from gradkeep.capturing.rules._units import units_of, watched
from gradkeep.factors._cost import FLOPS, WRITE

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._shapes import PassWork
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.query._gradients import GradientOf

_MEASURED = 1.5
"""Seconds that a measured pass may be predicted to take."""
_TOUCHED = 4
"""Values that are read, computed or written for each that an operator writes."""
_WARM, _LEAST_TOKENS = 8, 16
_QUICK, _TIMES = 0.2, 5


def predicted_seconds(work: PassWork) -> float:
    """Seconds of a pass on one core of a server."""
    return work.flops / FLOPS + _TOUCHED * work.written * WRITE


def measured_pace(
    model: nn.Module,
    task: Task,
    batch: Any,
    of: GradientOf | None,
    work: PassWork,
) -> float:
    """How many times longer a pass takes than predicted.

    One sample runs forward and back, cut to fewer tokens where a whole one would take long; 1 for a
    sample that is long and cannot be cut.
    """
    one = to_device(rows_of(batch, 0, 1), device_of(model))
    share = _MEASURED / max(predicted_seconds(work), 1e-9)
    if share < 1:
        tokens = _tokens(one)
        if tokens is None:
            if share < 1 / 4:
                return 1.0
        else:
            _timed(model, task, _cut(one, tokens, _WARM), of)
            one = _cut(one, tokens, max(_LEAST_TOKENS, int(share * tokens)))
    count = PassCount(model)
    with count.operators():
        taken = least = _timed(model, task, one, of)
    for _ in range(_TIMES):  # counting slows quick ones down
        if taken > _QUICK:
            break
        seconds = _timed(model, task, one, of)
        least, taken = min(least, seconds), taken + seconds
    return least / predicted_seconds(count.a_row(1))


def _timed(model: nn.Module, task: Task, batch: Any, of: GradientOf | None) -> float:
    wall, processor = time.perf_counter(), time.process_time()
    _, target, calls = Tracer(model, task, of).forward(watched(units_of(model)), batch)
    fill(calls, target)
    # On one thread, others only ever add to the wall's time; those of several threads add up.
    return min(time.perf_counter() - wall, time.process_time() - processor)


def _tokens(batch: Any) -> int | None:
    """The length of the sequences of whole numbers `[1, T]`; None: there are none."""
    lengths = {
        leaf.shape[1]
        for leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.dtype.is_floating_point
    }
    others = [
        leaf
        for leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.dim() > 1
    ]
    return lengths.pop() if len(lengths) == 1 and not others else None


def _cut(batch: Any, tokens: int, to: int) -> Any:
    def shorter(leaf: Any) -> Any:
        is_sequence = isinstance(leaf, torch.Tensor) and leaf.dim() == 2
        return leaf[:, :to] if is_sequence and leaf.shape[1] == tokens else leaf

    return with_leaves(batch, shorter)
