"""One batch through the model: what it measures, and every layer's gradients per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from gradkeep.capturing import _module, _whole
from gradkeep.capturing._batches import size_of
from gradkeep.capturing._calls import Call, fill, watching
from gradkeep.capturing._rules import piece_of
from gradkeep.capturing._soon import Soon
from gradkeep.capturing._units import watched
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._task import Measured, Task
    from gradkeep.capturing._units import Unit

Of = Literal["loss", "output"]
"""Whose gradient is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """What one batch gave."""

    measured: Measured
    pieces: dict[Unit, Piece]


@dataclass(slots=True, eq=False)
class Tracer:
    """A model, a task and the units to capture; `run` takes a batch through them."""

    model: nn.Module
    task: Task
    of: Of | None = None
    """None: the output's if the task gives it with its slope, else the loss's."""
    units: Sequence[Unit] = ()
    unused: Sequence[Unit] = ()
    """Units that the loss did not depend on when the first batch ran."""
    aside: frozenset[Unit] = frozenset()
    """Those of them whose modules take part, such as the whole model that holds a spare scale."""

    def run(
        self, batch: Any, *, dense: Collection[Unit] = (), light: Collection[nn.Module] = ()
    ) -> Traced:
        """The gradients of every unit for every sample of the batch.

        Those of `dense` units are made as soon as the backward pass comes by, and their factors
        are given back; the inputs of `light` modules are left to autograd meanwhile.
        """
        rows = size_of(batch)
        modules = watched([*self.units, *self.unused])
        measured, target, calls = self.forward(modules, batch, light=light)
        by_module: dict[nn.Module, list[Call]] = {}
        for call in calls:
            by_module.setdefault(call.module, []).append(call)
        soon = Soon(dense, by_module, rows)
        fill(calls, target, arrived=soon.arrived if dense else None)
        self._check_unused(by_module)
        pieces: dict[Unit, Piece] = dict(soon.pieces)
        again: dict[tuple[Any, ...], list[Unit]] = {}
        with torch.no_grad():
            for unit in self.units:
                if unit in pieces:
                    continue
                if unit.way in ("module", "one by one"):
                    again.setdefault((unit.modules[0], unit.way, unit.lay), []).append(unit)
                elif unit.way != "whole":
                    pieces[unit] = piece_of(unit, self._calls(unit, by_module), rows=rows)
            for units in again.values():
                pieces |= _module.pieces(units, self._calls(units[0], by_module), rows=rows)
        if whole := [unit for unit in self.units if unit.way == "whole"]:
            pieces |= _whole.pieces(whole, self.target, self.model, batch, rows=rows)
        return Traced(measured, {unit: pieces[unit] for unit in self.units})

    def forward(
        self, modules: Sequence[nn.Module], batch: Any, *, light: Collection[nn.Module] = ()
    ) -> tuple[Measured, torch.Tensor, list[Call]]:
        """Run the batch forward, watching the modules: what it measured, its target, the calls."""
        with watching(modules, light=light) as calls:
            measured, target = self._measure(batch)
        return measured, target, calls

    def target(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """What is differentiated `[B]`."""
        return self._measure(batch)[1]

    def _measure(self, batch: Any) -> tuple[Measured, torch.Tensor]:
        rows = size_of(batch)
        with torch.enable_grad():
            measured = self.task.measure(self.model, batch)
            _check_shape("losses", measured.losses, rows)
            if self.of == "loss":
                return measured, measured.losses
            if measured.outputs is not None and (measured.slopes is not None or self.of):
                _check_shape("outputs", measured.outputs, rows)
                return measured, measured.outputs
            if self.of is None:
                return measured, measured.losses
            outputs = self.task.outputs(self.model, batch)
        if outputs is None:
            raise CaptureError(
                "the task has no output",
                found=self.task.describe(),
                fix="give the task outputs(model, batch) -> [B], or capture of='loss'",
            )
        _check_shape("outputs", outputs, rows)
        return measured, outputs

    def _calls(self, unit: Unit, calls: dict[nn.Module, list[Call]]) -> list[Call]:
        own = [call for module in dict.fromkeys(unit.modules) for call in calls.get(module, ())]
        if not own:
            raise CaptureError(
                f"layer {unit.name} did not run for this batch, but did for the first one",
                fix="leave the layer out with layers='!...'",
            )
        return own

    def _check_unused(self, calls: dict[nn.Module, list[Call]]) -> None:
        for unit in self.unused:
            if unit not in self.aside and passed(unit, calls):
                raise CaptureError(
                    f"layer {unit.name} is used by this batch, but not by the first one",
                    fix="leave the layer out, or begin with a batch that uses it",
                )


def passed(unit: Unit, calls: dict[nn.Module, list[Call]]) -> bool:
    """Whether the backward pass came by a module of the unit."""
    return any(
        suffix is not None
        for module in unit.modules
        for call in calls.get(module, ())
        for suffix in call.suffixes
    )


def _check_shape(what: str, values: torch.Tensor, rows: int) -> None:
    if not isinstance(values, torch.Tensor) or values.shape != (rows,):
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        mean = isinstance(values, torch.Tensor) and values.dim() == 0
        raise CaptureError(
            f"{what} must be one value per sample",
            found=f"{'a single value' if mean else f'shape {found}'} for {rows} samples",
            expected=f"shape ({rows},)",
            fix="compute the loss with reduction='none'; of sequences, sum over the tokens",
        )
    if not values.requires_grad:
        raise CaptureError(
            f"the {what} do not depend on any trainable parameter",
            fix="check that parameters have requires_grad=True and that the task does not detach",
        )
