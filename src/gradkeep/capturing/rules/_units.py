"""Dividing a model's parameters among units that are captured by one rule each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from gradkeep.capturing.rules._embedding import is_embedding
from gradkeep.capturing.rules._gradients import runs_as
from gradkeep.capturing.rules._rules import rule_for
from gradkeep.factors._form import Parameter

if TYPE_CHECKING:
    import builtins
    from collections.abc import Sequence

    import torch

    from gradkeep.capturing.rules._gradients import SampleAxis

HINT = "gk.layers(model) lists them"
"""Where a user finds the names of layers."""
ROOT = "model"
"""The name of the model itself, where its own parameters are a unit."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerUnit:
    """Some parameters of a model that are captured together: mostly those of one module."""

    name: str
    """The path of the module, `model` for the model itself."""
    modules: tuple[nn.Module, ...]
    """Whose calls are watched."""
    weights: tuple[nn.Parameter, ...]
    parameters: tuple[Parameter, ...]
    """Full names and shapes, in the order of `weights`."""
    rule: str
    """By which it is captured; "module", "one by one" and "whole" make dense gradients of anything."""
    also: tuple[str, ...] = ()
    """The paths of further modules that hold the same weight."""
    axis: SampleAxis = "first"
    """How the samples lie in the tensors that pass through the module."""

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all modules that hold the weight."""
        return (self.name, *self.also)

    def is_a(self, kind: builtins.type) -> bool:
        """Whether one of its modules is of that class."""
        return any(isinstance(module, kind) for module in self.modules)

    @property
    def type(self) -> str:
        """The class of the module."""
        return type(self.modules[0]).__name__

    @property
    def size(self) -> int:
        """The number of parameter values."""
        return sum(parameter.size for parameter in self.parameters)


def units_of(model: nn.Module) -> list[LayerUnit]:
    """All trainable parameters of a model, each in exactly one unit, in the model's order.

    A module with a rule and with parameters of its own is a unit. A weight that several modules
    hold makes one unit of them. What no rule knows is captured as the dense gradient of the module
    that holds it.
    """
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                holders.setdefault(parameter, []).append((path, module, name))
    taken: set[nn.Parameter] = set()
    units: list[LayerUnit] = []
    for parameter, held in holders.items():
        if parameter in taken:
            continue
        modules = [module for _, module, _ in held]
        paths = [path for path, _, _ in held]
        own = [
            (path, name, weight)
            for path, module in zip(paths, modules, strict=True)
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad
        ]
        weights: dict[nn.Parameter, str] = {}
        for path, name, weight in own:
            if weight not in taken:
                weights.setdefault(weight, f"{path}.{name}" if path else name)
        taken |= set(weights)
        units.append(
            LayerUnit(
                name=paths[0] or ROOT,
                modules=tuple(modules),
                weights=tuple(weights),
                parameters=tuple(
                    Parameter(name, tuple(weight.shape)) for weight, name in weights.items()
                ),
                rule=_rule(modules, weights, shared=len(held) > 1, holders=holders),
                also=tuple(paths[1:]),
            )
        )
    return units


def _rule(
    modules: Sequence[nn.Module],
    weights: dict[nn.Parameter, str],
    *,
    shared: bool,
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]],
) -> str:
    if shared:
        return "tied" if _is_tied_head(modules, weights) else "whole"
    module = modules[0]
    if any(len(holders[weight]) > 1 for weight in weights):
        return "whole"  # a second weight of the module is held elsewhere too
    names = [name.rsplit(".", 1)[-1] for name in weights.values()]
    return rule_for(module, names) or "module"


def _is_tied_head(modules: Sequence[nn.Module], weights: dict[nn.Parameter, str]) -> bool:
    """An embedding and the linear layer that reads its table, with perhaps a bias."""
    if len(modules) != 2 or len(weights) > 2:
        return False
    kinds = {is_embedding(module) for module in modules}
    head = modules[1] if is_embedding(modules[0]) else modules[0]
    return kinds == {True, False} and runs_as(head, nn.Linear)


def watched(units: Sequence[LayerUnit]) -> list[nn.Module]:
    """The modules whose calls have to be seen for these units, each once."""
    found: dict[nn.Module, None] = {}
    for unit in units:
        if unit.rule != "whole":
            found.update(dict.fromkeys(unit.modules))
    return list(found)


def holder_that_ran(
    model: nn.Module, unit: LayerUnit, ran: set[nn.Module]
) -> tuple[str, nn.Module] | None:
    """The nearest module around a unit that was called; torch calls some of its layers by weight."""
    parts = [] if unit.name == ROOT and unit.modules[0] is model else unit.name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:length])
        module = model.get_submodule(path)
        if module in ran:
            return path, module
    return None


def tensors(units: Sequence[LayerUnit]) -> list[torch.Tensor]:
    """All weights of the units, in order."""
    return [weight for unit in units for weight in unit.weights]
