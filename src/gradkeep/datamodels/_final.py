"""The last stage of every fit: all models counted, one penalty per target."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.datamodels._correlation import correlation
from gradkeep.datamodels._memory import Plan, plan
from gradkeep.datamodels._result import Datamodels
from gradkeep.datamodels._standard import Standard, after_prior, standardise
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradkeep.datamodels._counts import Counts
    from gradkeep.datamodels._masks import AnyArray, Masks
    from gradkeep.datamodels._request import Recipe

_ENOUGH_TO_SCORE = 10


def layout(
    made: Recipe, models: int, examples: int, targets: int, *, folds: int = 0, predictions: int = 0
) -> Plan:
    """How a fit is divided to stay within its budget."""
    return plan(
        models=models,
        examples=examples,
        targets=targets,
        itemsize=np.dtype(made.dtype).itemsize,
        folds=folds,
        predictions=predictions,
        budget=made.memory_budget,
    )


def folder(made: Recipe) -> Path:
    """Where counts lie that are too large for memory."""
    return Path(tempfile.gettempdir()) if made.scratch is None else made.scratch


@dataclass(frozen=True, slots=True, eq=False)
class Final:
    """Counts with the recipe to solve them by, in the parts that the layout allows."""

    made: Recipe
    layout: Plan
    counts: Counts
    prior: AnyArray | None

    def standard(self, counts: Counts) -> tuple[Standard, AnyArray | None]:
        """The regression of some counts, after the prior if there is one."""
        import torch

        standard = standardise(
            counts,
            dtype=getattr(torch, self.made.dtype),
            device=self.made.device,
            dense=self.layout.in_memory and self.made.penalty != "means",
            rows=self.layout.rows,
            variances=self.made.variances,
        )
        return (
            (standard, None)
            if self.prior is None
            else after_prior(standard, self.prior, counts.models)
        )

    def parts(self, targets: int) -> Iterator[slice]:
        """The targets that are solved together."""
        for start in range(0, targets, self.layout.targets):
            yield slice(start, min(targets, start + self.layout.targets))

    def fitted(self, lam: AnyArray | None, *, start: AnyArray | None = None) -> Datamodels:
        """The datamodels at these penalties, or the differences of means."""
        import torch

        with torch.inference_mode():
            standard, scale = self.standard(self.counts)
            targets, n = standard.c.shape
            weights, bias = np.zeros((n, targets), self.made.dtype), np.zeros(targets)
            gap = np.zeros(targets)
            solver = self.made.solver(self.layout.working)
            for part in self.parts(targets):
                now = standard.targets(torch.arange(targets)[part])
                if lam is None:
                    w = now.c
                else:
                    penalty = torch.from_numpy(lam[part] / solver.unit(now)).to(now.power)
                    warm = None if start is None else now.from_mask_units(start[:, part])
                    state = solver.start(now, warm)
                    found = solver.solve(now, state, penalty, now.largest.maximum(penalty))
                    w, gap[part] = state.x, found.double().cpu().numpy()
                weights[:, part], bias[part] = now.in_mask_units(w)
        mean, variance = standard.mean, self.counts.variance()
        constant = np.flatnonzero(variance == 0)
        weights[:, constant], bias[constant] = 0, self.counts.mean()[constant]
        return Datamodels(
            weights=weights,
            bias=bias,
            lam=np.full(targets, np.nan) if lam is None else lam.copy(),
            gap=gap,
            num_models=self.counts.models,
            recipe=self.made,
            constant_targets=tuple(constant.tolist()),
            constant_examples=tuple(np.flatnonzero((mean == 0) | (mean == 1)).tolist()),
            prior_scale=scale,
            prior=self.prior,
            counts=self.counts,
        )


def grown(found: Datamodels, masks: Masks, outputs: AnyArray) -> Datamodels:
    """The fit with more models: counts added, weights started from the earlier ones."""
    if found.counts is None:
        raise DatamodelsError(
            "this fit was loaded without its counts", fix="fit all models together"
        )
    made = found.recipe
    seen = None
    if len(masks) >= _ENOUGH_TO_SCORE:
        seen = correlation(found.predict(masks), outputs)
    division = layout(made, found.num_models + len(masks), *found.weights.shape)
    where = None if division.in_memory else folder(made)
    counts = found.counts.copy(where).add(masks, outputs, device=made.device)
    final = Final(made, division, counts, found.prior)
    start = found.weights if made.penalty != "means" else None
    return replace(
        final.fitted(found.lam if made.penalty != "means" else None, start=start),
        held_out=seen,
        repeated_masks=found.repeated_masks + masks.num_repeated(),
    )
