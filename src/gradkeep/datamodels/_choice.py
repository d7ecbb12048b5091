"""Which penalty predicts best the models that were left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.datamodels._path import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from gradkeep.datamodels._masks import AnyArray, Masks
    from gradkeep.datamodels._path import Solver
    from gradkeep.datamodels._standard import Standard

_ROWS = 1024
_PATIENCE = 4
"""A target leaves the path after so many penalties that predict worse than its best."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Per target: the place of the chosen penalty on the path `[t]`, the penalty in output units
    `[t]`, the weights there `[n, t]`, and what they predict for the left-out models `[m', t]`."""

    index: AnyArray
    lam: AnyArray
    weights: AnyArray
    predicted: AnyArray


def predict(masks: Masks, weights: AnyArray, bias: AnyArray) -> AnyArray:
    """mask . weights + bias for all models, float64 `[m, t]`."""
    out = np.empty((len(masks), weights.shape[1]))
    for start, rows in masks.blocks(_ROWS):
        out[start : start + len(rows)] = rows.astype(weights.dtype) @ weights
    out += bias
    return out


def choose_on_rows(
    solver: Solver,
    standard: Standard,
    fractions: Sequence[float],
    natural: float,
    masks: Masks,
    outputs: AnyArray,
    *,
    together: bool,
    progress: Callable[[], None],
) -> Choice:
    """The penalty of each target (or, `together`, the one of all) with the least error on rows.

    Keeps only the best weights so far, and lets a target go once its error keeps rising.
    """
    count, n = standard.c.shape
    best = Choice(
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros((n, count), np.float32),
        np.zeros((len(masks), count), np.float32),
    )
    least = np.full(count, np.inf)

    def visit(
        index: int, ids: torch.Tensor, lam: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor | None:
        import torch

        here = ids.cpu().numpy()
        now = standard.targets(ids)
        weights, bias = now.in_mask_units(w)
        predicted = predict(masks, weights.astype(np.float32), bias)
        error = ((predicted - outputs[:, here]) ** 2).mean(axis=0, dtype=np.float64)
        error /= now.spread**2
        if together:
            error = np.full_like(error, error.mean())
        better = error < least[here]
        won = here[better]
        least[won], best.index[won] = error[better], index
        best.lam[won] = (lam.double().cpu().numpy() * solver.unit(now))[better]
        best.weights[:, won], best.predicted[:, won] = weights[:, better], predicted[:, better]
        progress()
        return torch.from_numpy(index - best.index[here] < _PATIENCE).to(ids.device)

    walk(solver, standard, fractions, natural, visit)
    return best


def predict_path(
    solver: Solver,
    standard: Standard,
    fractions: Sequence[float],
    natural: float,
    masks: Masks,
    *,
    progress: Callable[[], None],
) -> AnyArray:
    """What every penalty of the path predicts for some models, float32 `[penalties, m', t]`."""
    found = np.empty((len(fractions), len(masks), len(standard.c)), np.float32)

    def visit(index: int, ids: torch.Tensor, lam: torch.Tensor, w: torch.Tensor) -> None:
        weights, bias = standard.in_mask_units(w)
        found[index] = predict(masks, weights.astype(np.float32), bias)
        progress()

    walk(solver, standard, fractions, natural, visit)
    return found
