"""`logra`: influence by the Fisher matrix of gradients projected on both sides of every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution._row_features import RowStorage
from gradkeep.attribution.scorers._kfac import layer_by_layer
from gradkeep.curvature._cholesky import by_features
from gradkeep.curvature._fisher import DECADES, Damping
from gradkeep.curvature._project import TwoSided, two_sided
from gradkeep.curvature._row_parts import only_layer
from gradkeep.errors import BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView


@dataclass(frozen=True, slots=True)
class LograOptions:
    """Options of `logra`."""

    rank: int = 16
    """Dimension of each side of a weight; its gradient becomes rank x rank."""
    damping: float | Literal["auto"] = 0.1
    """Damping relative to the mean diagonal of the layer's projected Fisher matrix; "auto": chosen by subset
    outcomes.
    """
    seed: int = 0
    """Seed of the projection."""


def _prepare_logra(at: CheckpointView, options: LograOptions) -> Scorer:
    damping, projection = (
        Damping.parse(options.damping),
        TwoSided(options.rank, options.rank, options.seed),
    )
    _require_room(at, projection)
    budget, train = at.question.memory_budget, at.train()
    weight, pull = torch.full((len(train),), 1 / len(train)), torch.ones(len(train))
    layers = {}
    for name in train.forms:
        rows, queries = (
            two_sided(only_layer(side, name), projection, memory_budget=budget)
            for side in (train, at.queries())
        )
        mean = float(rows.double().square().mean())
        # A layer whose gradients are all zero contributes nothing.
        if mean > 0:
            solve = by_features(
                RowStorage.of(rows), weight=weight, pull=pull, damping=damping.of(mean)
            )
            layers[name] = (solve, queries)
    if not layers:
        raise at.all_zero()

    def scores(name: str, positions: list[int]) -> Tensor:
        if name not in layers:
            return torch.zeros(len(positions), len(train))
        solve, queries = layers[name]
        return solve(queries[positions])

    return layer_by_layer(at, scores, f"weights projected to {options.rank} x {options.rank}")


def _require_room(at: CheckpointView, projection: TwoSided) -> None:
    budget, train = at.question.memory_budget, at.train()
    sizes = [projection.width(form.parameters) for form in train.forms.values()]
    rows = len(train) + len(at.query_block)
    need = 4 * sum(size * (rows + min(size, len(train))) for size in sizes) + 8 * max(sizes) ** 2
    if budget is not None and need > parse_bytes(budget):
        raise BudgetError(
            f"projections to {projection.rows} x {projection.cols} numbers do not fit in the budget",
            code="budget.projections",
            found=str(budget),
            expected=f"at least {format_bytes(need)}",
            fix="Pass a smaller rank= or a larger memory_budget=.",
        )


LOGRA = Method(
    "logra",
    "query gradient x (Fisher + damping)^-1 x training gradient, of gradients projected on both "
    "sides of each weight",
    "gradients of both splits",
    "a projection of every row, a rank^2 x rank^2 matrix for each layer",
    exact=False,
    reference="Choe et al., What is Your Data Worth to GPT?, 2024",
    prepare=_prepare_logra,
    options=LograOptions,
    layered=True,
    tuned="damping",
    candidates=DECADES,
)
