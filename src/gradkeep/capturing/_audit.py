"""Checks that a row is the model's own: the same in every pass, alone, and by the same function."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import sys
import sysconfig
import time
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from gradkeep.capturing._batches import batch_size, leaves, rows_of, to_device, with_leaves
from gradkeep.capturing._proofs import backward_per_layer, random_weights, rows_moved
from gradkeep.capturing._readiness import device_of, draws_at_random
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Task

    Projection = Callable[[LayerUnit, Tensor], Tensor]

_LEFT_OUT = re.compile(r"device|path|name|dtype|implementation|version|loss|cache|dropout|forward")
_OF_CONFIGURATIONS = re.compile(r"act|eps|norm|scal|slope|temperature")
_INSTALLED = tuple(
    {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
)


def fingerprint_function(model: nn.Module) -> str:
    """A digest that is another one where a model with the same weights computes something else.

    It begins with the version of Python, whose compiler decides what code names.
    """
    digest = xxhash.xxh3_128()
    for path, module in model.named_modules():
        digest.update(f"{path} {type(module).__qualname__}\n".encode())
        for line in _described(module):
            digest.update(f"  {line}\n".encode())
    return f"{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}"


def _described(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or _LEFT_OUT.search(name.lower()):
            continue
        told = _value(value)
        if told is not None:
            yield f"{name} {told}"
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield from _configuration(name, value)
    for function in _own_functions(type(module)):
        yield f"{function.__name__} {' '.join(_names(function.__code__))}"


def _value(value: Any) -> str | None:
    """What is told of a setting; None of flags, counters, sizes, tensors and modules."""
    if isinstance(value, float | str):
        return repr(value)
    if isinstance(value, types.FunctionType):
        own = " ".join(_names(value.__code__)) if _is_own(value) else ""
        return f"{value.__qualname__} {own}"
    if isinstance(value, types.BuiltinFunctionType):
        return str(value.__qualname__)
    return None


def _configuration(name: str, value: Any) -> Iterator[str]:
    for key, inner in sorted(vars(value).items(), key=lambda item: str(item[0])):
        key = str(key).lower()
        if _OF_CONFIGURATIONS.search(key) and not _LEFT_OUT.search(key):
            told = _value(inner)
            if told is not None:
                yield f"{name}.{key} {told}"


def _own_functions(kind: type) -> Iterator[types.FunctionType]:
    """The functions of a class and its bases that no installed package brings, by name."""
    for base in kind.__mro__:
        for name, function in sorted(vars(base).items()):
            is_function = isinstance(function, types.FunctionType) and name != "__init__"
            if is_function and _is_own(function):
                yield function


def _is_own(function: types.FunctionType) -> bool:
    return not inspect.getfile(function).startswith(_INSTALLED)


def _names(code: types.CodeType) -> list[str]:
    """What code refers to: names, numbers with a fraction and texts, in its inner functions too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= set(_names(constant))
        elif isinstance(constant, float):
            found.add(repr(constant))
    return sorted(found)


def run_apart(
    model: nn.Module, task: Task, batch: Any, rows: slice, tracer: Tracer | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run rows of a batch without the others: their losses, and what a tracer differentiates."""
    some = to_device(rows_of(batch, rows.start, rows.stop), device_of(model))
    if tracer is None:
        return losses_alone(task, model, some).losses.detach(), None
    measured, target = tracer.measure(some)
    return measured.losses.detach(), target


def is_steady(model: nn.Module, task: Task, batch: Any, mode: Mode | None) -> bool:
    """Whether rows can be made again; an error where it was not said that they need not, and where rows mix.

    What is kept of a row is kept under its id alone. A model that counts its calls, carries a state from
    batch to batch or draws at random gives the same row another gradient each time, one that looks at
    the whole batch another one beside other rows. Cost: three forward passes of a few rows.
    """
    if draws_at_random(model):
        return False  # which has been asked for
    count = min(4, batch_size(batch))
    one, _ = run_apart(model, task, batch, slice(0, count))
    if one.shape != (count,):
        return True  # which is refused where rows are made
    again, _ = run_apart(model, task, batch, slice(0, count))
    # Shares of the mean loss that a second pass may be off, and one with other rows beside it:
    # products of other sizes round otherwise, with 16 bits inside of a model by a hundredth.
    if not _near(one, again, 1e-3):
        if mode == "train":
            return False
        raise CaptureError(
            "the model gives the same samples other losses when it is run again",
            found="a state that it keeps between calls (a counter, a running mean, hidden states), or "
            "numbers drawn at random",
            fix="switch that off while you capture; or pass mode='train' to keep what a single pass gives",
        )
    few = min(2, count - 1)
    if few and not _near(one[:few], run_apart(model, task, batch, slice(0, few))[0], 1e-2):
        raise CaptureError(
            "a sample's loss depends on the others of its batch",
            fix="capture in eval mode (mode='eval'), without statistics over the batch; a sample must stay "
            "at its place in the batch",
        )
    return True


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """The model's buffers, up to 256 MiB, are in the end what they were."""
    room, kept = 256 << 20, []
    for buffer in model.buffers():
        room -= buffer.nbytes
        if room >= 0 and not buffer.is_meta and not buffer.is_inference():
            kept.append((buffer, buffer._version, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, before in kept:
                if buffer._version != version:
                    buffer.copy_(before)


def _near(one: Tensor, other: Tensor, by: float) -> bool:
    one, other = one.double(), other.double()
    limit = by * float(one.abs().nan_to_num().mean()) + 1e-6
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=by, atol=limit, equal_nan=True)
    )


_DOUBTED, _LOOSE = 1e-6, 0.3
"""Relative errors that are accepted in double precision, and where a model keeps to fewer bits."""


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
        is_new = shape not in self._odd and len(self._odd) <= 8
        self._odd |= {shape} if is_new else set()
        is_last, self.is_last = self.is_last, False
        if self._batches == 1:
            return 0
        # Of other batches a sixteenth of the rows, at most so many.
        few = max(1, min(8, rows // 16))
        if is_new:
            # Rows that are checked of a batch with a new shape, and of how many such batches.
            return max(few, min(rows, 4))
        # How much of a capture's time checks may take, beside those that are always made.
        allowed = max(0.002, 0.01 * self._total)
        each = self.seconds / max(1, self.checks)
        within = self.seconds + each <= allowed
        return few if is_last or self._batches == 2 or within else 0

    def _check(
        self, ids: Any, batch: Any, losses: Tensor, traced: Traced | None, part: slice
    ) -> None:
        found = self._differences(batch, losses, traced, part)
        if found.row is None and not found.layers:
            return
        sure = self._differences_in_double(batch, part, found)
        if sure.row is not None:
            raise CaptureError(
                f"the loss of sample {int(ids[part.start + sure.row])} is another one without the rest "
                "of its batch",
                found="samples that influence each other in a later batch (a capacity that overflows, "
                "statistics over the batch), or a model that changes while it is captured",
                fix="switch that off while you capture, or capture with batches of one row",
            )
        if sure.layers:
            raise rows_moved(sure.layers, int(ids[part.start]))
        self._slack *= 10  # rounding shows in these gradients

    def _tolerance(self) -> float:
        """The relative error of a pass over some rows, in the precision that the model computes in."""
        proofs = None if self.tracer is None else self.tracer.proofs
        return 1e-3 if proofs is None or proofs.tolerance >= 1e-3 else 10 * proofs.tolerance

    def _differences(
        self, batch: Any, losses: Tensor, traced: Traced | None, part: slice, within: float = 0.0
    ) -> _Differences:
        tracer = None if traced is None else self.tracer
        alone, target = run_apart(self.model, self.task, batch, part, tracer)
        found = _compared_losses(losses, alone, part, within or 1e-3)
        if tracer is None or traced is None or target is None:
            return found
        near = within or self._slack * self._tolerance()
        weights = random_weights(target, seed=1)

        def arrived(unit: LayerUnit, truth: Tensor) -> None:
            piece = traced.pieces[unit]
            rows = piece.rows.take(part.start, part.stop).widened()
            own = piece.form.weighted_sum(rows, weights.unsqueeze(0).to(rows.example))[0]
            wanted = truth if self.project is None else self.project(unit, truth.unsqueeze(0))[0]
            error, scale = float((own.to(wanted) - wanted).norm()), float(wanted.norm())
            if not error <= near * max(scale, float(own.norm())):
                found.layers.append(unit.name)

        units = [unit for unit in tracer.units if unit.rule != "whole"]
        for unit in backward_per_layer((target * weights).sum(), units, arrived):
            piece = traced.pieces[unit]  # the rows alone do not use it
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
            losses, _ = run_apart(self.model, self.task, batch, slice(0, batch_size(batch)))
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

    row: int | None
    """The first of the rows whose loss differs."""
    layers: list[str] = field(default_factory=list)


def _compared_losses(batch: Tensor, alone: Tensor, part: slice, within: float) -> _Differences:
    batch, alone = batch.detach().double(), alone.double()
    size = float(batch.abs().nan_to_num().mean())
    wrong = (batch[part] - alone).abs() > within * (alone.abs() + 0.1 * size) + 1e-12
    return _Differences(int(wrong.int().argmax()) if wrong.any() else None)


def check_first_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], within: float, *, when: str, fix: str
) -> None:
    """Raise unless losses and norms of the first rows are those that they were."""
    for name in ("loss", "norm"):
        if name not in before:
            continue
        was, now = (np.asarray(values[name], np.float64) for values in (before, after))
        limit = within * float(np.abs(was).mean()) + 1e-6
        if not np.allclose(was, now, rtol=within, atol=limit, equal_nan=True):
            raise CaptureError(
                f"the {name} of the first samples is another one {when}",
                found=np.array2string(now, precision=6),
                expected=np.array2string(was, precision=6),
                fix=fix,
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
