"""One pass forward and back: the calls of every layer, and its gradients from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size, to_device
from gradkeep.capturing._calls import LayerCall, fill, watching
from gradkeep.capturing._keeping import Adjustments, BatchUnlikeFirst, in_form
from gradkeep.capturing.rules._any_module import module_gradients, whole_model_gradients
from gradkeep.capturing.rules._layers import LayerGradients, dense_gradients
from gradkeep.capturing.rules._rules import calls_by_module, calls_of, unit_gradients, watched
from gradkeep.errors import CaptureError
from gradkeep.factors._arithmetic import CACHED, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from gradkeep.capturing._proofs import RuleProofs, Rules
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.factors._form import AnyForm
    from gradkeep.query._gradients import GradientOf


@contextlib.contextmanager
def fast_pooling(model: nn.Module) -> Iterator[None]:
    """Let each `nn.MaxPool2d` of windows 2 x 2 that do not overlap run so while the block runs."""
    # A forward of someone else's own, such as a compiled one, stays.
    pools = [m for m in model.modules() if type(m) is nn.MaxPool2d and "forward" not in vars(m)]
    pools = [pool for pool in pools if _halves(pool)]
    for pool in pools:
        pool.forward = _forward_of(pool)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for pool in pools:
            del pool.forward


def _halves(pool: nn.MaxPool2d) -> bool:
    step = pool.kernel_size if pool.stride is None else pool.stride
    wanted = ((pool.kernel_size, 2), (step, 2), (pool.padding, 0), (pool.dilation, 1))
    same = all(given in (value, (value, value)) for given, value in wanted)
    return same and not pool.return_indices


def _forward_of(pool: nn.MaxPool2d) -> Any:
    def forward(x: Any) -> Any:
        if not _is_slow(x):
            return nn.MaxPool2d.forward(pool, x)
        return _Halved.apply(x)  # type: ignore[no-untyped-call]

    return forward


def _is_slow(x: Any) -> bool:
    """Whether it is a plain batch of images, channel by channel, of even sizes."""
    return (
        type(x) is torch.Tensor
        and x.dim() == 4
        and x.shape[2] % 2 == x.shape[3] % 2 == 0
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.requires_grad
    )


class _Halved(torch.autograd.Function):
    """`[B, C, H, W]` -> `[B, C, H / 2, W / 2]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = x[..., ::2], x[..., 1::2]
        wide = torch.maximum(left, right)
        upper, lower = wide[:, :, ::2], wide[:, :, 1::2]
        ctx.save_for_backward(right > left, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        right, lower = ctx.saved_tensors
        found = gradient.new_empty(*right.shape[:3], 2 * right.shape[3])
        values = found[0].numel() if len(found) else 0
        for start, stop in tiles(len(found), values, found.element_size(), CACHED):
            some = slice(start, stop)
            _spread(gradient[some], right[some], lower[some], found[some])
        return found


def _spread(
    gradient: torch.Tensor, right: torch.Tensor, lower: torch.Tensor, into: torch.Tensor
) -> None:
    """Write each number where its pixel was found, and zeros beside it."""
    wide = gradient.new_empty(right.shape)
    torch.mul(gradient, lower, out=wide[:, :, 1::2])
    torch.sub(gradient, wide[:, :, 1::2], out=wide[:, :, ::2])
    torch.mul(wide, right, out=into[..., 1::2])
    torch.sub(wide, into[..., 1::2], out=into[..., ::2])


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
        by_module = calls_by_module(calls)
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
        unused = [unit for unit in self.unused if unit not in self.aside]
        late = [unit for unit in unused if passed(unit, by_module)]
        if late:
            raise BatchUnlikeFirst(
                f"layer {late[0].name} is used by this batch, but not by the first one",
                Adjustments(late=frozenset(unit.name for unit in late)),
                frozenset(unit.name for unit in unused),
                fix="leave the layer out, or begin with a batch that uses it",
            )
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
                    pieces[unit] = unit_gradients(rule, calls_of(rule, by_module), rows=rows)
            for units in again.values():
                own = calls_of(next(iter(units)), by_module)
                found = module_gradients(list(units), own, rows=rows)
                pieces |= {units[rule]: piece for rule, piece in found.items()}
        if whole:
            found = whole_model_gradients(list(whole), self.measure, batch, rows=rows)
            pieces |= {whole[rule]: piece for rule, piece in found.items()}
        with torch.no_grad():
            for unit in self.units:
                made, rule = soon is not None and unit in soon.units, rules[unit]
                if made and rule is not None and rule.rule not in DENSE_RULES:
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
            measured, target = self.measure(batch)
        return measured, target, calls

    def loss_slopes(self, measured: Measured) -> torch.Tensor | None:
        """`[B]`: what makes the gradients of losses of those that are captured; None: they are."""
        if measured.slopes is None or not self._of_outputs(measured):
            return None
        return measured.slopes.detach()

    def _of_outputs(self, measured: Measured) -> bool:
        if self.of == "loss" or measured.outputs is None:
            return False
        return measured.slopes is not None or self.of is not None

    def measure(self, batch: Any) -> tuple[Measured, torch.Tensor]:
        """What the task measures, and what of it is differentiated `[B]`."""
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


class _Unproved(Exception):
    """A batch shows a pattern of calls that no rule is proved for."""

    def __init__(self, ran: list[LayerUnit]) -> None:
        super().__init__()
        self.ran = ran


def no_gradients(unit: LayerUnit, rows: int, like: torch.Tensor) -> LayerGradients:
    """Gradients of zero, in the memory of a single value."""
    values = torch.zeros((), dtype=like.dtype, device=like.device).expand(rows, unit.size)
    return dense_gradients(unit.name, unit.parameters, values)


def passed(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]]) -> bool:
    """Whether the backward pass came by a module of the unit."""
    return any(suffix is not None for call in calls_of(unit, calls) for suffix in call.suffixes)


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
        return dense_gradients(unit.name, piece.form.parameters, piece.form.restore(piece.rows))


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
            self._missing[unit] = len(calls_of(rule, calls))
            for module in rule.modules:
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
        made = unit_gradients(rule, calls_of(rule, self._calls), rows=self._rows)
        self._pieces[unit] = self._soon.make(unit, in_form(made, self._forms[unit]), self._measured)
        for module in dict.fromkeys(rule.modules):
            self._waiting[module].discard(unit)
            if not self._waiting[module]:
                for call in self._calls[module]:
                    call.let_go()
