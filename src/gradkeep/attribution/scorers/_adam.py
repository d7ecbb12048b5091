"""`adam`: products of gradients as Adam scales them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep._budgets import parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._kfac import SolvedQueries, layer_by_layer
from gradkeep.errors import AttributionError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.capturing._weights import AdamState
    from gradkeep.factors._form import AnyForm


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Options of `adam`."""

    state: Any = None
    """`gk.capturing.AdamState` of the checkpoint, from `gk.read_adam`."""


def _prepare_adam(at: CheckpointView, options: AdamOptions) -> Scorer:
    from gradkeep.capturing._weights import AdamState

    budget = at.question.memory_budget
    limit = None if budget is None else parse_bytes(budget)
    if not isinstance(options.state, AdamState):
        raise AttributionError(
            "adam needs the optimizer's second moments",
            code="attribute.no_adam_state",
            found=type(options.state).__name__,
            fix="Pass state=gk.read_adam(optimizer.state_dict() or a Trainer's folder, model).",
        )
    state: AdamState = options.state
    roots = {layer: _roots(state, form) for layer, form in at.train().forms.items()}

    def solve(layer: str, dense: Tensor) -> Tensor:
        return dense / roots[layer].to(dense)

    return layer_by_layer(at, SolvedQueries(at, solve, limit).scores, None)


def _roots(state: AdamState, form: AnyForm) -> Tensor:
    """Return the denominator of Adam for a layer's gradient `[P]`."""
    parts = []
    for parameter in form.parameters:
        second = state.second.get(parameter.name)
        if second is None or tuple(second.shape) != parameter.shape:
            raise AttributionError(
                f"the optimizer's state has no second moments for {parameter.name}",
                code="attribute.missing_moments",
                found="no such parameter" if second is None else f"shape {tuple(second.shape)}",
                expected=f"shape {parameter.shape}",
                fix="Read the state with the captured model, or pass layers= that were trained.",
            )
        parts.append(state.corrected(parameter.name).double().sqrt().flatten() + state.eps)
    return torch.cat(parts).float()


ADAM = Method(
    "adam",
    "query gradient x training gradient / (root of Adam's second moments + eps)",
    "gradients of both splits at one checkpoint, and the optimizer's state there",
    "Q restored gradients, then Q x N products",
    exact=True,
    reference="Xia et al., LESS, 2024 (the second moments alone)",
    prepare=_prepare_adam,
    over="one",
    options=AdamOptions,
    layered=True,
)
