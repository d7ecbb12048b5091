"""One pass forward and back: the calls of every layer, and its gradients from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._calls import LayerCall, fill, watching
from gradkeep.capturing._pooling import fast_pooling
from gradkeep.capturing.rules._any_module import module_gradients, whole_model_gradients
from gradkeep.capturing.rules._gradients import LayerGradients
from gradkeep.capturing.rules._rules import unit_gradients
from gradkeep.capturing.rules._units import watched
from gradkeep.errors import CaptureError
from gradkeep.factors import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Measured, Task
    from gradkeep.query import GradientOf


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """What one batch gave."""

    measured: Measured
    pieces: dict[LayerUnit, LayerGradients]


@dataclass(slots=True, eq=False)
class Tracer:
    """A model, a task and the units to capture; `run` takes a batch through them."""

    model: nn.Module
    task: Task
    of: GradientOf | None = None
    """None: the output's if the task gives it with its slope, else the loss's."""
    units: Sequence[LayerUnit] = ()
    unused: Sequence[LayerUnit] = ()
    """Units that the loss did not depend on when the first batch ran."""
    aside: frozenset[LayerUnit] = frozenset()
    """Those of them whose modules take part, such as the whole model that holds a spare scale."""

    def run(
        self, batch: Any, *, soon: MadeSoon | None = None, light: Collection[nn.Module] = ()
    ) -> Traced:
        """The gradients of every unit for every sample of the batch.

        What `soon` makes of its units is made as soon as the backward pass comes by, and their
        factors are given back; the inputs of `light` modules are left to autograd meanwhile.
        """
        rows = batch_size(batch)
        modules = watched([*self.units, *self.unused])
        measured, target, calls = self.forward(modules, batch, light=light)
        by_module: dict[nn.Module, list[LayerCall]] = {}
        for call in calls:
            by_module.setdefault(call.module, []).append(call)
        pieces: dict[LayerUnit, LayerGradients] = {}
        if soon is None:
            fill(calls, target)
        else:
            passing = DuringBackward(soon, by_module, measured, rows)
            fill(calls, target, arrived=passing.arrived)
            with torch.no_grad():
                pieces |= passing.finished()
        self._check_unused(by_module)
        again: dict[tuple[Any, ...], list[LayerUnit]] = {}
        with torch.no_grad():
            for unit in self.units:
                if unit in pieces:
                    continue
                if unit.rule in ("module", "one by one"):
                    again.setdefault((unit.modules[0], unit.rule, unit.axis), []).append(unit)
                elif unit.rule != "whole":
                    pieces[unit] = unit_gradients(unit, self._calls(unit, by_module), rows=rows)
            for units in again.values():
                pieces |= module_gradients(units, self._calls(units[0], by_module), rows=rows)
        if whole := [unit for unit in self.units if unit.rule == "whole"]:
            pieces |= whole_model_gradients(whole, self.target, self.model, batch, rows=rows)
        if soon is not None:
            for unit in soon.units:
                if unit.rule in DENSE_RULES:
                    pieces[unit] = soon.make(unit, pieces[unit], measured)
        return Traced(measured, {unit: pieces[unit] for unit in self.units})

    def forward(
        self, modules: Sequence[nn.Module], batch: Any, *, light: Collection[nn.Module] = ()
    ) -> tuple[Measured, torch.Tensor, list[LayerCall]]:
        """Run the batch forward, watching the modules: what it measured, its target, the calls."""
        spread = {m for unit in self.units if unit.axis == "shared" for m in unit.modules}
        with (
            fast_pooling(self.model),
            watching(modules, light=light, spread=spread, rows=batch_size(batch)) as calls,
        ):
            measured, target = self._measure(batch)
        return measured, target, calls

    def target(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """What is differentiated `[B]`."""
        return self._measure(batch)[1]

    def loss_slopes(self, measured: Measured) -> torch.Tensor | None:
        """`[B]`: what makes the gradients of losses of those that are captured; None: they are."""
        if measured.slopes is None or not self._of_outputs(measured):
            return None
        return measured.slopes.detach()

    def _of_outputs(self, measured: Measured) -> bool:
        if self.of == "loss" or measured.outputs is None:
            return False
        return measured.slopes is not None or self.of is not None

    def _measure(self, batch: Any) -> tuple[Measured, torch.Tensor]:
        rows = batch_size(batch)
        with torch.enable_grad():
            measured = self.task.measure(self.model, batch)
            _check_shape("losses", measured.losses, rows)
            if self.of == "loss":
                return measured, measured.losses
            if measured.outputs is not None and self._of_outputs(measured):
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

    def _calls(self, unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]]) -> list[LayerCall]:
        own = [call for module in dict.fromkeys(unit.modules) for call in calls.get(module, ())]
        if not own:
            raise CaptureError(
                f"layer {unit.name} did not run for this batch, but did for the first one",
                fix="leave the layer out with layers='!...'",
            )
        return own

    def _check_unused(self, calls: dict[nn.Module, list[LayerCall]]) -> None:
        for unit in self.unused:
            if unit not in self.aside and passed(unit, calls):
                raise CaptureError(
                    f"layer {unit.name} is used by this batch, but not by the first one",
                    fix="leave the layer out, or begin with a batch that uses it",
                )


def passed(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]]) -> bool:
    """Whether the backward pass came by a module of the unit."""
    return any(
        suffix is not None
        for module in unit.modules
        for call in calls.get(module, ())
        for suffix in call.suffixes
    )


def check_measured(what: str, values: torch.Tensor, rows: int) -> None:
    """Raise unless there is one value for each sample."""
    if not isinstance(values, torch.Tensor) or values.shape != (rows,):
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        mean = isinstance(values, torch.Tensor) and values.dim() == 0
        raise CaptureError(
            f"{what} must be one value per sample",
            found=f"{'a single value' if mean else f'shape {found}'} for {rows} samples",
            expected=f"shape ({rows},)",
            fix="compute the loss with reduction='none'; of sequences, sum over the tokens",
        )


def _check_shape(what: str, values: torch.Tensor, rows: int) -> None:
    check_measured(what, values, rows)
    if not values.requires_grad:
        raise CaptureError(
            f"the {what} do not depend on any trainable parameter",
            fix="check that parameters have requires_grad=True and that the task does not detach",
        )


DENSE_RULES = ("module", "one by one", "whole")
"""Ways that run the layer once more, some layers at a time."""


class MadeSoon(Protocol):
    """What is made of some units' gradients while the backward pass goes on."""

    @property
    def units(self) -> Collection[LayerUnit]:
        """Of which units."""

    def make(self, unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
        """What is kept of a unit's gradients, which are let go of afterwards."""


@dataclass(frozen=True, slots=True)
class DenseSoon:
    """Makes whole gradients of factors."""

    units: frozenset[LayerUnit]

    def make(self, unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
        """The same gradients, dense."""
        del measured
        if piece.form.storage == "dense":
            return piece
        values = piece.form.restore(piece.rows)
        form = Dense(piece.form.parameters, f"{unit.name}.gradient", values.shape[1])
        return LayerGradients(form, DenseRows(values))


class DuringBackward:
    """Makes gradients of the units whose calls all have their suffixes.

    A unit waits until all calls of its modules were passed; modules that belong to several units
    are let go when the last of those is done.
    """

    def __init__(
        self,
        soon: MadeSoon,
        calls: Mapping[nn.Module, list[LayerCall]],
        measured: Measured,
        rows: int,
    ) -> None:
        self._soon, self._measured, self._rows = soon, measured, rows
        self._pieces: dict[LayerUnit, LayerGradients] = {}
        self._calls = calls
        self._waiting: dict[nn.Module, set[LayerUnit]] = {}
        self._missing: dict[LayerUnit, int] = {}
        for unit in soon.units:
            if unit.rule in DENSE_RULES:
                continue
            modules = list(dict.fromkeys(unit.modules))
            self._missing[unit] = sum(len(calls.get(module, ())) for module in modules)
            for module in modules:
                self._waiting.setdefault(module, set()).add(unit)

    @torch.no_grad()
    def arrived(self, call: LayerCall) -> None:
        """A call has its suffixes."""
        for unit in list(self._waiting.get(call.module, ())):
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._make(unit)
        if self._waiting.get(call.module):
            call.keep_input()

    def finished(self) -> dict[LayerUnit, LayerGradients]:
        """All that was made, when the pass is over: units that it ended at come last."""
        for unit in self._missing:
            if unit not in self._pieces and any(self._calls.get(m) for m in unit.modules):
                self._make(unit)
        return self._pieces

    def _make(self, unit: LayerUnit) -> None:
        modules = list(dict.fromkeys(unit.modules))
        own = [call for module in modules for call in self._calls[module]]
        made = unit_gradients(unit, own, rows=self._rows)
        self._pieces[unit] = self._soon.make(unit, made, self._measured)
        for module in modules:
            self._waiting[module].discard(unit)
            if not self._waiting[module]:
                for call in self._calls[module]:
                    call.let_go()
