"""Rules by which layers are captured, and the units of a model's parameters that each covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from gradkeep.capturing.rules._layers import (
    broadcast_gradients,
    convolution_gradients,
    embedding_gradients,
    is_convolution,
    is_embedding,
    is_linear,
    is_norm,
    linear_gradients,
    module_gradients,
    norm_gradients,
    runs_as,
    tied_gradients,
)
from gradkeep.capturing.rules._uses import WeightUse
from gradkeep.errors import CaptureError
from gradkeep.factors._form import Parameter

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from gradkeep.capturing._tracer import LayerCall
    from gradkeep.capturing.rules._layers import LayerGradients, SampleAxis

DENSE_RULES = ("module", "one by one", "whole")
"""Rules that compute dense gradients of any module by running it again."""
_TIED = "tied"
BROADCAST = "broadcast"
"""Rule of parameters that are replaced by a copy per sample."""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Computes the gradients of one kind of module from its calls.

    `gradients(unit, calls, rows)` returns `LayerGradients` of that many samples: `calls` hold each call's input
    and the gradient at its output (`call.input`, `call.suffix()`), `unit.axis` is the dimension that counts the
    samples (`by_sample` moves it to the front), and `unit.parameters` name the weights in the order of
    `module.parameters()`.

    Attributes:
        name: Unique name of the rule.
        applies: Returns True for modules that the rule covers.
        gradients: Computes the gradients, see above.
        weights: Names that a module's parameters may have; None for any.
    """

    name: str
    applies: Callable[[nn.Module], bool]
    gradients: Callable[..., LayerGradients]
    weights: tuple[tuple[str, ...], ...] | None = (("weight",), ("weight", "bias"))


_RULES: list[LayerRule] = [
    LayerRule("linear", is_linear, linear_gradients),
    LayerRule("convolution", is_convolution, convolution_gradients),
    LayerRule("embedding", is_embedding, embedding_gradients),
    LayerRule("norm", is_norm, norm_gradients, (("weight",), ("bias",), ("weight", "bias"))),
]


def register_layer_rule(rule: LayerRule) -> None:
    """Register a rule for `gk.capture`; the rule registered last is tried first.

    Args:
        rule: Rule with a name of its own.

    Raises:
        CaptureError: It is not a `gk.LayerRule`, or its name is taken.

    Example:
        >>> import torch
        >>> from gradkeep.capturing.rules._rules import LayerRule, layer_rules, register_layer_rule
        >>> [rule.name for rule in layer_rules()][-4:]
        ['linear', 'convolution', 'embedding', 'norm']
    """
    if not isinstance(rule, LayerRule):
        raise CaptureError(
            f"rule must be a gk.LayerRule, not {type(rule).__name__}", code="capture.not_a_rule"
        )
    taken = [_TIED, BROADCAST, *DENSE_RULES, *(known.name for known in _RULES)]
    if rule.name in taken:
        raise CaptureError(
            f"a layer rule {rule.name!r} exists already",
            code="capture.rule_exists",
            fix="Use another name.",
        )
    _RULES.insert(0, rule)


def unregister_layer_rule(name: str) -> None:
    """Remove a registered rule.

    Args:
        name: Name of the rule.
    """
    _RULES[:] = [rule for rule in _RULES if rule.name != name]


def layer_rules() -> tuple[LayerRule, ...]:
    """Return all rules, in the order in which they are tried."""
    return tuple(_RULES)


def rule_for(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the rule of a module whose own parameters have these names; None if there is none."""
    for rule in _RULES:
        if rule.applies(module) and (rule.weights is None or tuple(names) in rule.weights):
            return rule.name
    return None


def unit_gradients(unit: LayerUnit, calls: Sequence[LayerCall], *, rows: int) -> LayerGradients:
    """Compute the gradients of B samples for a unit whose modules made these calls."""
    gradients: LayerGradients
    if unit.rule == _TIED:
        gradients = tied_gradients(unit, calls, rows)
    elif unit.rule == BROADCAST:
        gradients = broadcast_gradients(unit, calls, rows)
    elif unit.rule in DENSE_RULES:
        gradients = module_gradients([unit], calls, rows=rows)[unit]
    else:
        rule = next(rule for rule in _RULES if rule.name == unit.rule)
        gradients = rule.gradients(unit, calls, rows)
    if gradients.form.gradient_size != unit.size:
        raise ValueError("the rule computes another number of values than the layer has")
    return gradients


HINT = "gk.layers(model) lists them."
"""How a user finds the names of layers."""
ROOT = "model"
"""Name of the unit of the model's own parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerUnit:
    """Parameters of a model that are captured together, mostly those of one module."""

    name: str
    """Path of the module, `model` for the model itself."""
    modules: tuple[nn.Module, ...]
    """Modules whose calls are recorded."""
    weights: tuple[nn.Parameter, ...]
    parameters: tuple[Parameter, ...]
    """Full names and shapes, in the order of `weights`."""
    rule: str
    """Name of the rule; "module", "one by one" and "whole" compute dense gradients of any
    module."""
    also: tuple[str, ...] = ()
    """Paths of further modules that hold the same weight."""
    axis: SampleAxis = "first"
    """Axis of the samples in the module's tensors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of all modules that hold the weight."""
        return (self.name, *self.also)

    def is_a(self, kind: builtins.type) -> bool:
        """Return True if one of its modules is of that class."""
        return any(isinstance(module, kind) for module in self.owners)

    @property
    def owners(self) -> tuple[nn.Module, ...]:
        """Modules that hold the weights."""
        return tuple(m.owner if isinstance(m, WeightUse) else m for m in self.modules)

    @property
    def type(self) -> str:
        """Class name of the module."""
        return type(self.owners[0]).__name__

    @property
    def size(self) -> int:
        """Number of parameter values."""
        return sum(parameter.size for parameter in self.parameters)


def units_of(model: nn.Module) -> list[LayerUnit]:
    """Group all trainable parameters of a model into units, in the model's order.

    A module with a rule and its own parameters is a unit. Modules that share a weight form one unit. Parameters
    without a rule are captured as the dense gradient of the module that holds them.
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
        weights: dict[nn.Parameter, str] = {}
        for path, module in zip(paths, modules, strict=True):
            for name, weight in module.named_parameters(path, recurse=False):
                if weight.requires_grad and weight not in taken:
                    weights.setdefault(weight, name)
        taken |= set(weights)
        names = [name.rsplit(".", 1)[-1] for name in weights.values()]
        rule = rule_for(modules[0], names) or "module"
        if len(held) > 1:
            rule = _TIED if _is_tied_head(modules, weights) else "whole"
        elif any(len(holders[weight]) > 1 for weight in weights):
            rule = "whole"  # another module holds a second weight of this one
        parameters = tuple(Parameter(name, tuple(w.shape)) for w, name in weights.items())
        units.append(
            LayerUnit(
                *(paths[0] or ROOT, tuple(modules), tuple(weights), parameters, rule),
                also=tuple(paths[1:]),
            )
        )
    return units


def _is_tied_head(modules: Sequence[nn.Module], weights: dict[nn.Parameter, str]) -> bool:
    """Return True for an embedding and the linear layer that reads its table, optionally with a bias."""
    if len(modules) != 2 or len(weights) > 2:
        return False
    kinds = {is_embedding(module) for module in modules}
    head = modules[1] if is_embedding(modules[0]) else modules[0]
    return kinds == {True, False} and runs_as(head, nn.Linear)


def watched_modules(units: Sequence[LayerUnit]) -> list[nn.Module]:
    """Return the modules whose calls must be recorded for these units, each once."""
    modules: dict[nn.Module, None] = {}
    for unit in units:
        if unit.rule != "whole":
            modules.update(dict.fromkeys(unit.modules))
    return list(modules)


def calls_by_module(calls: Iterable[LayerCall]) -> dict[nn.Module, list[LayerCall]]:
    """Group calls by module, in order."""
    grouped: dict[nn.Module, list[LayerCall]] = {}
    for call in calls:
        grouped.setdefault(call.module, []).append(call)
    return grouped


def calls_of(unit: LayerUnit, calls: Mapping[nn.Module, Sequence[LayerCall]]) -> list[LayerCall]:
    """Return the calls of a unit's modules."""
    return [call for module in dict.fromkeys(unit.modules) for call in calls.get(module, ())]


def find_called_module(
    model: nn.Module, unit: LayerUnit, calls: Mapping[nn.Module, Any]
) -> nn.Module | None:
    """Find a unit's module, or the nearest one around it that is called with a tensor.

    Torch reads some weights without a call, and a table of position biases has no input.
    """
    if any(call.args or call.kwargs for call in calls.get(unit.modules[0], ())):
        return unit.modules[0]
    parts = [] if unit.name == ROOT and unit.modules[0] is model else unit.name.split(".")
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1))
    return next((module for module in around if module in calls), None)


def tensors(units: Sequence[LayerUnit]) -> list[torch.Tensor]:
    """Return all weights of the units, in order."""
    return [weight for unit in units for weight in unit.weights]
