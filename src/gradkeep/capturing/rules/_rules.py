"""The rules by which layers are captured: each knows some modules and their gradients.

A rule of one's own is registered from outside; it is asked before those here, and proved against
autograd on the first batch as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.capturing.rules._any_module import module_gradients
from gradkeep.capturing.rules._convolution import convolution_gradients, is_convolution
from gradkeep.capturing.rules._embedding import (
    embedding_gradients,
    is_embedding,
    tied_gradients,
)
from gradkeep.capturing.rules._linear import is_linear, linear_gradients
from gradkeep.capturing.rules._norms import is_norm, norm_gradients
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from gradkeep.capturing._calls import LayerCall
    from gradkeep.capturing.rules._gradients import LayerGradients
    from gradkeep.capturing.rules._units import LayerUnit

DENSE_RULES = ("module", "one by one", "whole")
"""What makes dense gradients of anything, some layers at a time: it runs the layer once more."""
_TIED = "tied"


@dataclass(frozen=True, slots=True)
class LayerRule:
    """How the gradients of one kind of module are made from its calls.

    `gradients(name, module, parameters, calls, rows=B, axis=axis)` gives `LayerGradients` of B
    samples: `calls` hold each call's input and the gradient at its output (`call.input`,
    `call.suffix()`), `axis` says which dimension of them counts the samples (`by_sample` turns
    it to the front), `parameters` name the weights in the order of `module.parameters()`.
    """

    name: str
    applies: Callable[[nn.Module], bool]
    gradients: Callable[..., LayerGradients]
    weights: tuple[tuple[str, ...], ...] | None = (("weight",), ("weight", "bias"))
    """The names that a module's parameters may have; None: any."""


_RULES: list[LayerRule] = [
    LayerRule("linear", is_linear, linear_gradients),
    LayerRule("convolution", is_convolution, convolution_gradients),
    LayerRule("embedding", is_embedding, embedding_gradients),
    LayerRule("norm", is_norm, norm_gradients, (("weight",), ("bias",), ("weight", "bias"))),
]


def register_layer_rule(rule: LayerRule) -> None:
    """Let `gk.capture` keep modules that the rule knows by it; the rule registered last is asked first.

    >>> import torch
    >>> from gradkeep.capturing.rules._rules import LayerRule, layer_rules, register_layer_rule
    >>> [rule.name for rule in layer_rules()][-4:]
    ['linear', 'convolution', 'embedding', 'norm']
    """
    if not isinstance(rule, LayerRule):
        raise CaptureError(
            "a layer rule is a gk.LayerRule",
            found=type(rule).__name__,
            fix="gk.LayerRule(name, applies, gradients)",
        )
    taken = [_TIED, *DENSE_RULES, *(known.name for known in _RULES)]
    if rule.name in taken:
        raise CaptureError(
            f"there is a layer rule {rule.name!r} already",
            found=", ".join(taken),
            fix="give it another name",
        )
    _RULES.insert(0, rule)


def unregister_layer_rule(name: str) -> None:
    """Forget a rule that was registered."""
    _RULES[:] = [rule for rule in _RULES if rule.name != name]


def layer_rules() -> tuple[LayerRule, ...]:
    """All rules, in the order in which they are asked."""
    return tuple(_RULES)


def rule_for(module: nn.Module, names: Sequence[str]) -> str | None:
    """The rule of a module whose own parameters have these names; None: there is none."""
    for rule in _RULES:
        if rule.applies(module) and (rule.weights is None or tuple(names) in rule.weights):
            return rule.name
    return None


def unit_gradients(unit: LayerUnit, calls: Sequence[LayerCall], *, rows: int) -> LayerGradients:
    """The gradients of B samples for a unit whose modules made these calls."""
    made: LayerGradients
    if unit.rule == _TIED:
        made = tied_gradients(unit, calls, rows=rows, axis=unit.axis)
    elif unit.rule in DENSE_RULES:
        made = module_gradients([unit], calls, rows=rows)[unit]
    else:
        rule = next(rule for rule in _RULES if rule.name == unit.rule)
        module: Any = unit.modules[0]
        made = rule.gradients(unit.name, module, unit.parameters, calls, rows=rows, axis=unit.axis)
    if made.form.gradient_size != unit.size:
        raise ValueError("the rule covers another number of values than the layer has")
    return made
