"""Choosing the rule of each layer, and proving it against autograd on the rows of one batch.

With random weights w, autograd's gradient of sum_n w_n target_n must equal sum_n w_n gradient_n of
the captured rows. One backward pass checks all rows of all layers at once: a wrong rule, a mistaken
batch dimension or samples that influence each other do not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from gradkeep.capturing._arriving import told_of_gradients
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._calls import LayerCall, call_pattern, fill
from gradkeep.capturing._tracer import DENSE_RULES, Tracer, passed
from gradkeep.capturing.rules._any_module import whole_model_gradients
from gradkeep.capturing.rules._gradients import INTERLEAVED, SAMPLE_AXES, possible
from gradkeep.capturing.rules._rules import unit_gradients
from gradkeep.capturing.rules._units import LayerUnit, holder_that_ran, watched
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gradkeep.capturing.rules._gradients import LayerGradients, SampleAxis

Uncovered = Literal["dense", "error", "skip"]
"""What to do with parameters that no factor rule covers."""
_OTHER_WAYS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, UserWarning)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
_LOW = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRules:
    """How every unit is captured from now on."""

    units: tuple[LayerUnit, ...]
    pieces: dict[LayerUnit, LayerGradients]
    """The gradients of the batch."""
    patterns: dict[LayerUnit, tuple[Any, ...]]
    """How each unit's modules were called, see `call_pattern`."""
    unused: tuple[LayerUnit, ...]
    aside: frozenset[LayerUnit]
    """Those of the unused whose modules the backward pass came by all the same."""
    skipped: tuple[LayerUnit, ...]
    tolerance: float
    """The relative error that a proof accepts, by the precision that the model computes in."""
    example: torch.Tensor
    """A tensor of the dtype and device of gradients."""
    tokens: int | None
    """T, where samples have tokens `[B, T]`."""


def choose_rules(
    tracer: Tracer,
    units: Sequence[LayerUnit],
    batch: Any,
    *,
    uncovered: Uncovered,
    single: Collection[str] = (),
) -> ChosenRules:
    """Choose a way for each unit that gives autograd's gradients on this batch.

    Units named in `single` are captured by passes over single samples, whatever else would fit.
    Cost: one forward and two backward passes, and for what only the last resort covers, one pass
    per sample. Of autograd's gradients one layer's is held at a time, and those that no factors give.
    """
    rows = batch_size(batch)
    modules = [*watched(units), *tracer.model.modules()]
    with _seeing_precision() as precision:
        measured, target, calls = tracer.forward(modules, batch)
    tolerance = precision.tolerance(target.dtype)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(0)).add_(0.5).to(target)
    fill(calls, target, retain=True)
    by_module: dict[nn.Module, list[LayerCall]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    truths: dict[LayerUnit, torch.Tensor] = {}
    found: dict[LayerUnit, tuple[LayerUnit, LayerGradients]] = {}

    def arrived(unit: LayerUnit, truth: torch.Tensor) -> None:
        if unit.name not in single and not is_shared(unit, by_module, rows):
            ways = ways_to_capture(tracer.model, unit, by_module, rows=rows)
            cheap = itertools.takewhile(lambda way: way.rule not in DENSE_RULES, ways)
            settled = _first_that_fits(cheap, by_module, truth, weights, rows, tolerance)
            if settled is not None:
                found[unit] = settled
                return
        truths[unit] = truth  # of what runs the layer once more, when the pass is over

    unused = told_of_gradients((target * weights).sum(), units, arrived)
    left: list[LayerUnit] = []
    for unit, truth in truths.items():
        if unit.name in single:
            left.append(unit)
            continue
        if is_shared(unit, by_module, rows):
            shared = _spread(tracer, unit, truth, weights, batch, target, tolerance)
            if shared is not None:
                found[unit] = shared
                continue
        with torch.no_grad():
            ways = ways_to_capture(tracer.model, unit, by_module, rows=rows)
            settled = _first_that_fits(ways, by_module, truth, weights, rows, tolerance)
        if settled is None:
            left.append(unit)
        else:
            found[unit] = settled
    used = [unit for unit in units if unit in found or unit in truths]
    dense = [unit for unit in used if unit in left or found[unit][0].rule in DENSE_RULES]
    if dense and uncovered != "dense":
        if uncovered == "error":
            raise _uncovered(dense)
        for unit in dense:
            found.pop(unit, None)
        left = []
    if left:
        found |= _by_the_last_resort(tracer, left, truths, weights, batch, tolerance)
    return ChosenRules(
        units=tuple(found[unit][0] for unit in used if unit in found),
        pieces={found[unit][0]: found[unit][1] for unit in used if unit in found},
        patterns={rule: _pattern(rule, by_module, rows) for rule, _ in found.values()},
        unused=tuple(unused),
        aside=frozenset(unit for unit in unused if passed(unit, by_module)),
        skipped=tuple(dense) if uncovered == "skip" else (),
        tolerance=tolerance,
        example=target.detach(),
        tokens=None if measured.tokens is None else measured.tokens.shape[1],
    )


@dataclass(slots=True)
class _Precision:
    """The dtypes of what autograd saves: a model may compute parts of itself with fewer bits."""

    dtypes: set[torch.dtype]

    def tolerance(self, own: torch.dtype) -> float:
        """The relative error of the least precise dtype."""
        known = {dtype for dtype in self.dtypes if dtype.is_floating_point} | {own}
        return max(_TOLERANCE.get(dtype, _LOW) for dtype in known)


@contextlib.contextmanager
def _seeing_precision() -> Iterator[_Precision]:
    seen = _Precision(set())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def _pattern(
    rule: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int
) -> tuple[Any, ...]:
    own = [call for module in dict.fromkeys(rule.modules) for call in calls.get(module, ())]
    return call_pattern(own, rows, spread=rule.axis == "shared")


def is_shared(unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], rows: int) -> bool:
    """Whether an embedding is read once for all samples, as positions `[T]` or `[1, T]` are."""
    if unit.rule != "embedding" or rows < 2:
        return False
    own = [call for module in unit.modules for call in calls.get(module, ())]
    return bool(own) and all(call.input.shape[:1] != (rows,) for call in own)


def _spread(
    tracer: Tracer,
    unit: LayerUnit,
    truth: torch.Tensor,
    weights: torch.Tensor,
    batch: Any,
    target: torch.Tensor,
    tolerance: float,
) -> tuple[LayerUnit, LayerGradients] | None:
    """The unit with its output spread to all samples, if the model then says and learns the same."""
    rows = batch_size(batch)
    candidate = dataclasses.replace(unit, axis="shared")
    alone = dataclasses.replace(tracer, units=[candidate])
    try:
        _, again, calls = alone.forward(list(unit.modules), batch)
        if not torch.equal(again, target):
            return None
        fill(calls, again)
        with torch.no_grad():
            piece = unit_gradients(candidate, calls, rows=rows)
            total = _weighted_sum(piece, weights)
    except _OTHER_WAYS:
        return None
    return (candidate, piece) if fits(total, truth, tolerance) else None


def _first_that_fits(
    ways: Iterable[LayerUnit],
    calls: dict[nn.Module, list[LayerCall]],
    truth: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    tolerance: float,
) -> tuple[LayerUnit, LayerGradients] | None:
    for candidate in ways:
        own = [call for module in dict.fromkeys(candidate.modules) for call in calls[module]]
        try:
            piece = unit_gradients(candidate, own, rows=rows)
            total = _weighted_sum(piece, weights)
        except _OTHER_WAYS:
            # A layer that is called in another way than its rule or its first sample expects:
            # the next way is tried, and the last one works for every model.
            continue
        if fits(total, truth, tolerance):
            return candidate, piece
    return None


def ways_to_capture(
    model: nn.Module, unit: LayerUnit, calls: dict[nn.Module, list[LayerCall]], *, rows: int
) -> Iterator[LayerUnit]:
    """Ways to capture a unit, the cheapest first."""
    if unit.rule not in DENSE_RULES and all(calls.get(module) for module in unit.modules):
        for axis in (*SAMPLE_AXES, *INTERLEAVED):
            own = [call for module in unit.modules for call in calls[module]]
            shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
            if all(possible(shape, rows, axis) for shape in shapes):
                yield dataclasses.replace(unit, axis=axis)
    holder = holder_that_ran(model, unit, set(calls)) if unit.modules[0] not in calls else None
    module = unit.modules[0] if unit.modules[0] in calls else holder[1] if holder else None
    if module is None or len(unit.modules) > 1:
        return
    first = getattr(module, "batch_first", True)
    lays: tuple[SampleAxis, ...] = SAMPLE_AXES if first else ("second", "first", "flat")
    for axis in lays:
        yield dataclasses.replace(unit, rule="module", modules=(module,), axis=axis)
    if module is not model:
        # Of the whole model, the last resort does the same.
        for axis in lays:
            yield dataclasses.replace(unit, rule="one by one", modules=(module,), axis=axis)


def _by_the_last_resort(
    tracer: Tracer,
    units: Sequence[LayerUnit],
    truths: dict[LayerUnit, torch.Tensor],
    weights: torch.Tensor,
    batch: Any,
    tolerance: float,
) -> dict[LayerUnit, tuple[LayerUnit, LayerGradients]]:
    rows = batch_size(batch)
    whole = {dataclasses.replace(unit, rule="whole"): unit for unit in units}
    pieces = whole_model_gradients(list(whole), tracer.target, tracer.model, batch, rows=rows)
    found = {}
    for unit, piece in pieces.items():
        total = _weighted_sum(piece, weights)
        if not fits(total, truths[whole[unit]], tolerance):
            raise CaptureError(
                f"layer {unit.name}: the gradients of single samples do not add up to the batch's",
                found="samples that influence each other, or randomness in the model",
                expected="a loss per sample that depends on that sample alone",
                fix="capture in eval mode (mode='eval'), without statistics over the batch",
            )
        found[whole[unit]] = (unit, piece)
    return found


def _weighted_sum(piece: LayerGradients, weights: torch.Tensor) -> torch.Tensor:
    return piece.form.weighted_sum(piece.rows, weights.unsqueeze(0).to(piece.rows.example))[0]


def fits(found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> bool:
    """Whether a captured sum is autograd's, up to rounding."""
    if found.shape != truth.shape:
        return False
    scale = float(truth.norm())
    error = float((found.to(truth.dtype) - truth).norm())
    # Not "error > bound": a NaN must not pass, unless autograd finds the same.
    if error <= tolerance * scale:
        return True
    return bool(torch.equal(found.isfinite(), truth.isfinite()) and not truth.isfinite().all())


def _uncovered(units: Sequence[LayerUnit]) -> CaptureError:
    names = ", ".join(f"{unit.name} ({unit.type})" for unit in units)
    return CaptureError(
        "some parameters are covered by no factor rule",
        found=names,
        expected="layers with a rule: linear, convolution, embedding, normalisation",
        fix="pass uncovered='dense' to keep their whole gradients, or 'skip' to leave them out",
    )
