"""One pass forward and back: the calls of every layer, and its gradients from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size, to_device
from gradkeep.capturing._calls import LayerCall, fill, watching
from gradkeep.capturing._pooling import fast_pooling
from gradkeep.capturing._refit import in_form
from gradkeep.capturing.rules._any_module import module_gradients, whole_model_gradients
from gradkeep.capturing.rules._gradients import LayerGradients
from gradkeep.capturing.rules._rules import unit_gradients
from gradkeep.capturing.rules._units import watched
from gradkeep.errors import CaptureError
from gradkeep.factors._dense import Dense, DenseRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from gradkeep.capturing._proofs import RuleProofs, Rules
    from gradkeep.capturing.rules._units import LayerUnit
    from gradkeep.capturing.tasks._task import Measured, Task
    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import GradientOf


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
    proofs: RuleProofs | None = None
    """The rules of the units, by the pattern of their calls; None: the tracer only runs forward."""

    def run(
        self,
        batch: Any,
        *,
        soon: MadeSoon | None = None,
        light: Collection[nn.Module] = (),
        device: torch.device | None = None,
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Traced:
        """The gradients of every unit for every sample of the batch, by rules that are proved.

        What `soon` makes of its units is made as soon as the backward pass comes by, and their
        factors are given back; the inputs of `light` modules are left to autograd meanwhile. A batch
        whose layers are called as never before is proved first. Every pass has a copy of the batch on
        the `device`, without one the batch itself. Passes that are not proofs run inside of the
        context that `within` makes of what they are given.
        """
        own = batch if device is None else to_device(batch, device)
        try:
            with within(own):
                return self._run(own, None, soon, light)
        except _Unproved as unproved:
            ran = unproved.ran
        own = batch if device is None else to_device(batch, device)
        rules = self._proved().prove(self, self.units, own, ran)
        own = batch if device is None else to_device(batch, device)
        with within(own):
            return self._run(own, rules, soon, light)

    def _run(
        self,
        batch: Any,
        rules: Rules | None,
        soon: MadeSoon | None,
        light: Collection[nn.Module],
    ) -> Traced:
        rows, proofs = batch_size(batch), self._proved()
        modules = [*watched([*self.units, *self.unused]), *proofs.modules]
        spread = proofs.spread(self.units)
        if rules is not None:
            new = [rule for rule in rules.values() if rule is not None and rule.axis == "shared"]
            spread |= {module for rule in new for module in rule.modules}
        measured, target, calls = self.forward(modules, batch, light=light, spread=spread)
        by_module: dict[nn.Module, list[LayerCall]] = {}
        for call in calls:
            by_module.setdefault(call.module, []).append(call)
        if rules is None:
            rules = proofs.rules(self.units, by_module, rows)
            if rules is None:
                raise _Unproved([u for u in self.units if any(m in by_module for m in u.modules)])
        else:
            proofs.add(rules, by_module, rows)
        pieces: dict[LayerUnit, LayerGradients] = {}
        if soon is None:
            fill(calls, target)
        else:
            passing = DuringBackward(soon, by_module, measured, rules, proofs.forms, rows)
            fill(calls, target, arrived=passing.arrived)
            with torch.no_grad():
                pieces |= passing.finished()
        self._check_unused(by_module)
        again: dict[tuple[Any, ...], dict[LayerUnit, LayerUnit]] = {}
        whole: dict[LayerUnit, LayerUnit] = {}
        with torch.no_grad():
            for unit in self.units:
                rule = rules[unit]
                if unit in pieces:
                    continue
                if rule is None:
                    pieces[unit] = no_gradients(unit, rows, target)
                elif rule.rule in ("module", "one by one"):
                    same = again.setdefault((rule.modules[0], rule.rule, rule.axis), {})
                    same[rule] = unit
                elif rule.rule == "whole":
                    whole[rule] = unit
                else:
                    pieces[unit] = unit_gradients(rule, _calls(rule, by_module), rows=rows)
            for units in again.values():
                own = _calls(next(iter(units)), by_module)
                found = module_gradients(list(units), own, rows=rows)
                pieces |= {units[rule]: piece for rule, piece in found.items()}
        if whole:
            found = whole_model_gradients(list(whole), self.target, self.model, batch, rows=rows)
            pieces |= {whole[rule]: piece for rule, piece in found.items()}
        with torch.no_grad():
            for unit in self.units:
                made = soon is not None and unit in soon.units
                if made and not _is_late(rules[unit]):
                    continue
                pieces[unit] = in_form(pieces[unit], proofs.forms[unit])
                if made and soon is not None:
                    pieces[unit] = soon.make(unit, pieces[unit], measured)
        return Traced(measured, {unit: pieces[unit] for unit in self.units})

    def _proved(self) -> RuleProofs:
        assert self.proofs is not None, "a tracer runs once its rules are proved"
        return self.proofs

    def forward(
        self,
        modules: Sequence[nn.Module],
        batch: Any,
        *,
        light: Collection[nn.Module] = (),
        spread: Collection[nn.Module] | None = None,
    ) -> tuple[Measured, torch.Tensor, list[LayerCall]]:
        """Run the batch forward, watching the modules: what it measured, its target, the calls."""
        if spread is None:
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

    def measure(self, batch: Any) -> tuple[Measured, torch.Tensor]:
        """What the task measures, and what of it is differentiated `[B]`."""
        return self._measure(batch)

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

    def _check_unused(self, calls: dict[nn.Module, list[LayerCall]]) -> None:
        unused = [unit for unit in self.unused if unit not in self.aside]
        used = [unit for unit in unused if passed(unit, calls)]
        if used:
            raise self._proved().unused_before(used, unused)


class _Unproved(Exception):
    """A batch shows a pattern of calls that no rule is proved for."""

    def __init__(self, ran: list[LayerUnit]) -> None:
        super().__init__()
        self.ran = ran


def _calls(unit: LayerUnit, calls: Mapping[nn.Module, list[LayerCall]]) -> list[LayerCall]:
    return [call for module in dict.fromkeys(unit.modules) for call in calls.get(module, ())]


def _is_late(rule: LayerUnit | None) -> bool:
    """Whether gradients are made when the backward pass is over."""
    return rule is None or rule.rule in DENSE_RULES


def no_gradients(unit: LayerUnit, rows: int, like: torch.Tensor) -> LayerGradients:
    """Gradients of zero, in the memory of a single value."""
    values = torch.zeros((), dtype=like.dtype, device=like.device).expand(rows, unit.size)
    form = Dense(unit.parameters, f"{unit.name}.gradient", unit.size)
    return LayerGradients(form, DenseRows(values))


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
        rules: Rules,
        forms: Mapping[LayerUnit, AnyForm],
        rows: int,
    ) -> None:
        self._soon, self._measured, self._rules, self._rows = soon, measured, rules, rows
        self._forms = forms
        self._pieces: dict[LayerUnit, LayerGradients] = {}
        self._calls = calls
        self._waiting: dict[nn.Module, set[LayerUnit]] = {}
        self._missing: dict[LayerUnit, int] = {}
        for unit in soon.units:
            rule = rules[unit]
            if rule is None or rule.rule in DENSE_RULES:
                continue
            modules = list(dict.fromkeys(rule.modules))
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
            if unit not in self._pieces:
                self._make(unit)
        return self._pieces

    def _make(self, unit: LayerUnit) -> None:
        rule = self._rules[unit]
        assert rule is not None
        modules = list(dict.fromkeys(rule.modules))
        made = unit_gradients(rule, _calls(rule, self._calls), rows=self._rows)
        self._pieces[unit] = self._soon.make(unit, in_form(made, self._forms[unit]), self._measured)
        for module in modules:
            self._waiting[module].discard(unit)
            if not self._waiting[module]:
                for call in self._calls[module]:
                    call.let_go()
