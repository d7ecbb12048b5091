"""The first batch: find out how each unit can be captured, and prove it against autograd.

With random weights w, autograd's gradient of sum_n w_n target_n must equal sum_n w_n gradient_n of
the captured rows. One backward pass checks all rows of all layers at once: a wrong rule, a mistaken
batch dimension or samples that influence each other do not pass.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from gradkeep.capturing import _whole
from gradkeep.capturing._batches import size_of
from gradkeep.capturing._calls import Call, fill
from gradkeep.capturing._positions import LAYS, possible
from gradkeep.capturing._rules import piece_of
from gradkeep.capturing._tracer import passed
from gradkeep.capturing._units import DENSE_WAYS, Unit, holder_that_ran, tensors, watched
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._positions import Lay
    from gradkeep.capturing._tracer import Tracer

Uncovered = Literal["dense", "error", "skip"]
"""What to do with parameters that no factor rule covers."""
_OTHER_WAYS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, UserWarning)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """How every unit is captured from now on."""

    units: tuple[Unit, ...]
    pieces: dict[Unit, Piece]
    """Those of the first batch."""
    unused: tuple[Unit, ...]
    aside: frozenset[Unit]
    """Those of the unused whose modules the backward pass came by all the same."""
    skipped: tuple[Unit, ...]


def settle(tracer: Tracer, units: Sequence[Unit], batch: Any, *, uncovered: Uncovered) -> Settled:
    """Choose a way for each unit that gives autograd's gradients on this batch.

    Cost: one forward and two backward passes, and for what only the last resort covers, one pass
    per sample.
    """
    rows = size_of(batch)
    modules = [*watched(units), *tracer.model.modules()]
    _, target, calls = tracer.forward(modules, batch)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(0)).add_(0.5).to(target)
    wanted = torch.autograd.grad(
        (target * weights).sum(), tensors(units), retain_graph=True, allow_unused=True
    )
    fill(calls, target)
    by_module: dict[nn.Module, list[Call]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    at = 0
    truths: dict[Unit, torch.Tensor] = {}
    unused: list[Unit] = []
    for unit in units:
        own = wanted[at : at + len(unit.weights)]
        at += len(unit.weights)
        if all(gradient is None for gradient in own):
            unused.append(unit)
            continue
        flat = [
            torch.zeros_like(weight).reshape(-1) if gradient is None else gradient.reshape(-1)
            for weight, gradient in zip(unit.weights, own, strict=True)
        ]
        truths[unit] = torch.cat(flat)
    found: dict[Unit, tuple[Unit, Piece]] = {}
    left: list[Unit] = []
    for unit, truth in truths.items():
        with torch.no_grad():
            settled = _first_that_fits(tracer.model, unit, by_module, truth, weights, rows=rows)
        if settled is None:
            left.append(unit)
        else:
            found[unit] = settled
    dense = [unit for unit in truths if unit in left or found[unit][0].way in DENSE_WAYS]
    if dense and uncovered != "dense":
        if uncovered == "error":
            raise _uncovered(dense)
        for unit in dense:
            found.pop(unit, None)
        left = []
    if left:
        found |= _by_the_last_resort(tracer, left, truths, weights, batch, rows=rows)
    return Settled(
        units=tuple(found[unit][0] for unit in truths if unit in found),
        pieces={found[unit][0]: found[unit][1] for unit in truths if unit in found},
        unused=tuple(unused),
        aside=frozenset(unit for unit in unused if passed(unit, by_module)),
        skipped=tuple(dense) if uncovered == "skip" else (),
    )


def _first_that_fits(
    model: nn.Module,
    unit: Unit,
    calls: dict[nn.Module, list[Call]],
    truth: torch.Tensor,
    weights: torch.Tensor,
    *,
    rows: int,
) -> tuple[Unit, Piece] | None:
    for candidate in _candidates(model, unit, calls, rows=rows):
        own = [call for module in dict.fromkeys(candidate.modules) for call in calls[module]]
        try:
            piece = piece_of(candidate, own, rows=rows)
            total = piece.form.weighted_sum(piece.rows, weights.unsqueeze(0))[0]
        except _OTHER_WAYS:
            # A layer that is called in another way than its rule or its first sample expects:
            # the next way is tried, and the last one works for every model.
            continue
        if _fits(total, truth):
            return candidate, piece
    return None


def _candidates(
    model: nn.Module, unit: Unit, calls: dict[nn.Module, list[Call]], *, rows: int
) -> Iterator[Unit]:
    """Ways to capture a unit, the cheapest first."""
    if unit.way not in DENSE_WAYS and all(calls.get(module) for module in unit.modules):
        for lay in LAYS:
            own = [call for module in unit.modules for call in calls[module]]
            shapes = [shape for call in own for shape in (call.input.shape, call.shapes[0])]
            if all(possible(shape, rows, lay) for shape in shapes):
                yield dataclasses.replace(unit, lay=lay)
    holder = holder_that_ran(model, unit, set(calls)) if unit.modules[0] not in calls else None
    module = unit.modules[0] if unit.modules[0] in calls else holder[1] if holder else None
    if module is None or len(unit.modules) > 1:
        return
    first = getattr(module, "batch_first", True)
    lays: tuple[Lay, ...] = LAYS if first else ("second", "first", "flat")
    for lay in lays:
        yield dataclasses.replace(unit, way="module", modules=(module,), lay=lay)
    if module is not model:
        # Of the whole model, the last resort does the same.
        for lay in lays:
            yield dataclasses.replace(unit, way="one by one", modules=(module,), lay=lay)


def _by_the_last_resort(
    tracer: Tracer,
    units: Sequence[Unit],
    truths: dict[Unit, torch.Tensor],
    weights: torch.Tensor,
    batch: Any,
    *,
    rows: int,
) -> dict[Unit, tuple[Unit, Piece]]:
    whole = {dataclasses.replace(unit, way="whole"): unit for unit in units}
    pieces = _whole.pieces(list(whole), tracer.target, tracer.model, batch, rows=rows)
    found = {}
    for unit, piece in pieces.items():
        total = piece.form.weighted_sum(piece.rows, weights.unsqueeze(0))[0]
        if not _fits(total, truths[whole[unit]]):
            raise CaptureError(
                f"layer {unit.name}: the gradients of single samples do not add up to the batch's",
                found="samples that influence each other, or randomness in the model",
                expected="a loss per sample that depends on that sample alone",
                fix="capture in eval mode (mode='eval'), without statistics over the batch",
            )
        found[whole[unit]] = (unit, piece)
    return found


def _fits(found: torch.Tensor, truth: torch.Tensor) -> bool:
    if found.shape != truth.shape:
        return False
    scale = float(truth.norm())
    error = float((found.to(truth.dtype) - truth).norm())
    # Not "error > bound": a NaN must not pass, unless autograd finds the same.
    if error <= _TOLERANCE.get(truth.dtype, 1e-2) * scale:
        return True
    return bool(torch.equal(found.isfinite(), truth.isfinite()) and not truth.isfinite().all())


def _uncovered(units: Sequence[Unit]) -> CaptureError:
    names = ", ".join(f"{unit.name} ({unit.type})" for unit in units)
    return CaptureError(
        "some parameters are covered by no factor rule",
        found=names,
        expected="layers with a rule: linear, convolution, embedding, normalisation",
        fix="pass uncovered='dense' to keep their whole gradients, or 'skip' to leave them out",
    )
