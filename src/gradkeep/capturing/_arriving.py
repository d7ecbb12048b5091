"""Autograd's own gradients of weights, unit by unit while the backward pass goes on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.overrides import has_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from gradkeep.capturing.rules._units import LayerUnit


def told_of_gradients(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    """Tell of each unit's gradient `[P]` of a scalar, and give the units that have none.

    A unit is told of when the gradients of all its weights are there; those whose weights do not all
    take part come last. Nothing but what is told is held: a model's gradients take as much as it does.
    Only of what stands in for other weights, as for those of 16 bits, all gradients come at once.
    """
    standing_in = [unit for unit in units if has_torch_function(unit.weights)]
    unused = _all_at_once(target, standing_in, tell)
    leaves = [unit for unit in units if unit not in standing_in]
    unused += _one_by_one(target, leaves, tell) if leaves else []
    return [unit for unit in units if unit in unused]


def _all_at_once(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    weights = [weight for unit in units for weight in unit.weights]
    if not weights:
        return []
    gradients = torch.autograd.grad(target, weights, retain_graph=True, allow_unused=True)
    there = {w: g for w, g in zip(weights, gradients, strict=True) if g is not None}
    used = [unit for unit in units if any(weight in there for weight in unit.weights)]
    with torch.no_grad():
        for unit in used:
            tell(unit, _flat(unit, there))
    return [unit for unit in units if unit not in used]


def _one_by_one(
    target: Tensor, units: Sequence[LayerUnit], tell: Callable[[LayerUnit, Tensor], None]
) -> list[LayerUnit]:
    owners = {weight: unit for unit in units for weight in unit.weights}
    there: dict[LayerUnit, dict[nn.Parameter, Tensor]] = {}

    @torch.no_grad()
    def arrived(weight: Tensor) -> None:
        unit = owners[weight]  # type: ignore[index]  # a leaf's hook is given the leaf
        own = there.setdefault(unit, {})
        assert weight.grad is not None
        own[weight], weight.grad = weight.grad, None  # type: ignore[index]
        if len(own) == len(unit.weights):
            tell(unit, _flat(unit, there.pop(unit)))
            done.add(unit)

    done: set[LayerUnit] = set()
    before = {weight: weight.grad for weight in owners}
    with contextlib.ExitStack() as stack:
        for weight in owners:
            weight.grad = None
            handle = weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        try:
            torch.autograd.backward(target, inputs=list(owners))
        finally:
            for weight, gradient in before.items():
                weight.grad = gradient
    for unit in [unit for unit in units if unit in there]:
        tell(unit, _flat(unit, there.pop(unit)))
        done.add(unit)
    return [unit for unit in units if unit not in done]


def _flat(unit: LayerUnit, own: dict[nn.Parameter, Tensor]) -> Tensor:
    parts = [
        own[weight].to_dense().reshape(-1)  # of embeddings with sparse=True
        if weight in own
        else torch.zeros_like(weight).reshape(-1)
        for weight in unit.weights
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
