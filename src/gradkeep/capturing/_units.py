"""Dividing a model's parameters among units that are captured one way each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from gradkeep.capturing import _convolution, _embedding, _linear, _norms
from gradkeep.factors import Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gradkeep.capturing._positions import Lay

Way = Literal["linear", "convolution", "embedding", "norm", "tied", "module", "one by one", "whole"]
"""By which rule a unit is captured; the last three make dense gradients of anything."""
DENSE_WAYS = ("module", "one by one", "whole")

ROOT = "model"
"""The name of the model itself, where its own parameters are a unit."""
_RULES: tuple[tuple[Way, object], ...] = (
    ("linear", _linear.applies),
    ("convolution", _convolution.applies),
    ("embedding", _embedding.applies),
    ("norm", _norms.applies),
)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Some parameters of a model that are captured together: mostly those of one module."""

    name: str
    """The path of the module, `model` for the model itself."""
    modules: tuple[nn.Module, ...]
    """Whose calls are watched."""
    weights: tuple[nn.Parameter, ...]
    parameters: tuple[Parameter, ...]
    """Full names and shapes, in the order of `weights`."""
    way: Way
    also: tuple[str, ...] = ()
    """The paths of further modules that hold the same weight."""
    lay: Lay = "first"
    """How the samples lie in the tensors that pass through the module."""

    @property
    def type(self) -> str:
        """The class of the module."""
        return type(self.modules[0]).__name__

    @property
    def size(self) -> int:
        """The number of parameter values."""
        return sum(parameter.size for parameter in self.parameters)


def units_of(model: nn.Module) -> list[Unit]:
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
    units: list[Unit] = []
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
            Unit(
                name=paths[0] or ROOT,
                modules=tuple(modules),
                weights=tuple(weights),
                parameters=tuple(
                    Parameter(name, tuple(weight.shape)) for weight, name in weights.items()
                ),
                way=_way(modules, weights, shared=len(held) > 1, holders=holders),
                also=tuple(paths[1:]),
            )
        )
    return units


def _way(
    modules: Sequence[nn.Module],
    weights: dict[nn.Parameter, str],
    *,
    shared: bool,
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]],
) -> Way:
    if shared:
        return "tied" if _is_tied_head(modules, weights) else "whole"
    module = modules[0]
    if any(len(holders[weight]) > 1 for weight in weights):
        return "whole"  # a second weight of the module is held elsewhere too
    for way, applies in _RULES:
        if applies(module) and _in_order(module, weights):  # type: ignore[operator]
            return way
    return "module"


def _in_order(module: nn.Module, weights: dict[nn.Parameter, str]) -> bool:
    """Whether the weights are those a rule expects: the weight, then perhaps the bias."""
    names = [name.rsplit(".", 1)[-1] for name in weights.values()]
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
        return set(names) <= {"weight", "bias"}
    return names in (["weight"], ["weight", "bias"])


def _is_tied_head(modules: Sequence[nn.Module], weights: dict[nn.Parameter, str]) -> bool:
    """An embedding and the linear layer that reads its table, with perhaps a bias."""
    if len(modules) != 2 or len(weights) > 2:
        return False
    kinds = {_embedding.applies(module) for module in modules}
    head = modules[1] if _embedding.applies(modules[0]) else modules[0]
    return kinds == {True, False} and isinstance(head, nn.Linear)


def watched(units: Sequence[Unit]) -> list[nn.Module]:
    """The modules whose calls have to be seen for these units, each once."""
    found: dict[nn.Module, None] = {}
    for unit in units:
        if unit.way != "whole":
            found.update(dict.fromkeys(unit.modules))
    return list(found)


def holder_that_ran(
    model: nn.Module, unit: Unit, ran: set[nn.Module]
) -> tuple[str, nn.Module] | None:
    """The nearest module around a unit that was called; torch calls some of its layers by weight."""
    parts = [] if unit.name == ROOT and unit.modules[0] is model else unit.name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:length])
        module = model.get_submodule(path)
        if module in ran:
            return path, module
    return None


def tensors(units: Sequence[Unit]) -> list[torch.Tensor]:
    """All weights of the units, in order."""
    return [weight for unit in units for weight in unit.weights]
