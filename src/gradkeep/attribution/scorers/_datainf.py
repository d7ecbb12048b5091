"""`datainf`: influence with the mean of inverses instead of the inverse of the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep import query
from gradkeep._budgets import parse_bytes
from gradkeep.attribution._question import Method, Scorer
from gradkeep.attribution.scorers._kfac import layer_by_layer
from gradkeep.curvature._eigen_influence import has_single_position
from gradkeep.curvature._fisher import DECADES, Damping
from gradkeep.curvature._row_parts import only_layer, weighted
from gradkeep.factors._outer import Outer
from gradkeep.query._engine import DEFAULT_BUDGET
from gradkeep.query._sums import Directions

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.query import Gradients

    Budget = float | str | None


@dataclass(frozen=True, slots=True)
class DataInfOptions:
    """Options of `datainf`."""

    damping: float | Literal["auto"] = 0.1
    """Damping relative to the layer's mean squared gradient entry, which is the mean eigenvalue of its Fisher
    matrix; "auto": chosen by subset outcomes.
    """
    absolute_damping: float | None = None
    """Absolute damping of all layers, instead of the relative one."""


def _prepare_data_inf(at: CheckpointView, options: DataInfOptions) -> Scorer:
    damping = Damping.parse(options.damping, options.absolute_damping)
    queries, train = at.queries(), at.train()
    squared = train.norms(per_layer=True).double().square()
    if not bool((squared > 0).any()):
        raise at.all_zero()
    lengths = dict(zip(train.forms, squared.T, strict=True))
    budget = at.question.memory_budget

    def scores(name: str, positions: list[int]) -> Tensor:
        """Compute (g_q . g_n - mean over m of (g_q . g_m)(g_m . g_n) / (damping + |g_m|^2)) / damping."""
        rows = only_layer(train, name)
        added = damping.of(float(lengths[name].mean()) / rows.size)
        if added <= 0:
            return torch.zeros(len(positions), len(train))
        ids = queries.ids[positions]
        products = query.dot(only_layer(queries, name), rows, ids=ids, memory_budget=budget).values
        share = products / (len(train) * (added + lengths[name])).float()
        if _sums_cost_less(rows, name, len(positions)):
            _subtract_by_sums(rows, name, share, products, budget)
        else:
            _subtract_by_kernel(rows, share, products, budget)
        return products / added

    return layer_by_layer(at, scores, "the inverse of a mean is replaced by the mean of inverses")


def _subtract_by_kernel(rows: Gradients, share: Tensor, scores: Tensor, budget: Budget) -> None:
    """Subtract share `[b, N]` x the products of all rows from the scores, some rows at a time."""
    step = max(1, _limit(budget) // (4 * len(rows)))
    for start in range(0, len(rows), step):
        some = rows.ids[start : start + step]
        kernel = query.dot(rows, rows, ids=some, memory_budget=budget).values
        scores[:, start : start + step] -= share @ kernel.t()


def _subtract_by_sums(
    rows: Gradients, name: str, share: Tensor, scores: Tensor, budget: Budget
) -> None:
    """Subtract the same by sums of gradients, some queries at a time."""
    step = max(1, _limit(budget) // (16 * rows.size + 4 * len(rows)))
    for start in range(0, len(share), step):
        some = share[start : start + step]
        sums = {name: weighted(rows, name, some, budget).float()}
        directions = Directions(tuple(range(len(some))), sums, rows.forms, rows.weights)
        scores[start : start + step] -= query.along(rows, directions, memory_budget=budget)


def _limit(budget: Budget) -> int:
    return (DEFAULT_BUDGET if budget is None else parse_bytes(budget)) // 8


def _sums_cost_less(rows: Gradients, name: str, queries: int) -> bool:
    """Return True if two products of all rows with every query cost less than all pairs of rows.

    Pairs are cheap if rows have one position: R + C operations instead of R C.
    """
    form, size = rows.forms[name], rows.size
    pair = size
    if has_single_position(rows, name) and isinstance(form, Outer):
        pair = form.d_in + form.d_out + queries
    return 2 * queries * size < len(rows) * pair


DATA_INF = Method(
    "datainf",
    "query gradient x mean over rows of (g g^T + damping)^-1 x training gradient, layer by layer",
    "gradients of both splits",
    "(Q + N) x N products, or 3 x Q x N where that is less",
    exact=False,
    reference="Kwon et al., DataInf, 2024",
    prepare=_prepare_data_inf,
    options=DataInfOptions,
    layered=True,
    tuned="damping",
    candidates=DECADES,
)
