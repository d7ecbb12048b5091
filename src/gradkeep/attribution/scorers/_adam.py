"""`adam`: products of gradients as the optimizer saw them."""

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
    """What `adam` must be told."""

    state: Any = None
    """A `gk.capturing.AdamState`, from `gk.read_adam`; of the checkpoint that is asked."""


def _prepare_adam(at: CheckpointView, options: AdamOptions) -> Scorer:
    from gradkeep.capturing._weights import AdamState

    budget = at.question.memory_budget
    limit = None if budget is None else parse_bytes(budget)
    if not isinstance(options.state, AdamState):
        raise AttributionError(
            "adam needs the optimizer's second moments",
            found=type(options.state).__name__,
            fix="pass state=gk.read_adam(optimizer.state_dict() or a Trainer's folder, model)",
        )
    state: AdamState = options.state
    roots = {layer: _roots(state, form) for layer, form in at.train().forms.items()}

    def solve(layer: str, dense: Tensor) -> Tensor:
        return dense / roots[layer].to(dense)

    return layer_by_layer(at, SolvedQueries(at, solve, limit).scores, None)


def _roots(state: AdamState, form: AnyForm) -> Tensor:
    """What Adam divides a layer's gradient `[P]` by."""
    parts = []
    for parameter in form.parameters:
        found = state.second.get(parameter.name)
        if found is None or tuple(found.shape) != parameter.shape:
            raise AttributionError(
                f"the optimizer's state has no second moments for {parameter.name}",
                found="no such parameter" if found is None else f"shape {tuple(found.shape)}",
                expected=f"shape {parameter.shape}",
                fix="read the state with the captured model, or choose layers= that were trained",
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
