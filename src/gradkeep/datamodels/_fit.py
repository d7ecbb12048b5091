"""Fitting datamodels: counts, choice of the penalty, the final weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._choice import Choice, choose_on_rows, predict, predict_path
from gradkeep.datamodels._correlation import correlation
from gradkeep.datamodels._counts import Counts, zeros
from gradkeep.datamodels._final import Final, folder, layout
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._request import (
    Recipe,
    checked_outputs,
    checked_prior,
    fold_rows,
    fractions,
    left_out,
    recipe,
    split,
)
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._memory import Plan
    from gradkeep.datamodels._result import Datamodels


def fit(
    masks: Any,
    outputs: Any,
    *,
    penalty: str | None = None,
    lambdas: int | Sequence[float] = 20,
    lam: Any = None,
    held_out: Any = None,
    folds: int | None = None,
    share: float = 0.5,
    prior: Any = None,
    variances: Any = None,
    tolerance: float = 1e-4,
    max_steps: int = 5000,
    dtype: str = "float32",
    device: str = "cpu",
    memory_budget: str | int | None = None,
    scratch: Any = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Datamodels:
    """Datamodels of t outputs of m models trained on subsets `masks [m, n]` of n examples.

    `penalty` is `l1` (the default), `elastic` (with the given `share` of L1), `ridge` (the default
    with a prior) or `means` (difference of means, which has none). `lambdas` are tried from large to
    small, as a number of them or as fractions of each target's least penalty without weights (of
    n / m for ridge). Each target takes the one that predicts best the models that were left out:
    `held_out`, a part (by default a tenth) or rows, or all in turn with `folds`; then all models
    are fitted. `lam [t]` skips the choice. `prior [t, n]` are attribution scores that the weights
    shrink towards, as far as `variances [n]` allow each example to differ; all targets then share
    one choice, made with five folds below 1,000 models. Same input and seed, same bits.

    Costs m n^2 / 24 additions for the pairs, then 2 n^2 t for each of about ten steps per penalty;
    n^2 (2 + 4) bytes in float32. Under `memory_budget` the counts go to a file in `scratch`.

    >>> rng = np.random.default_rng(0)
    >>> masks = rng.random((400, 30)) < 0.5
    >>> outputs = 3.0 * masks[:, 4] - 2.0 * masks[:, 7] + 1 + 0.1 * rng.standard_normal(400)
    >>> found = fit(masks, outputs)
    >>> found.weights[[4, 7], 0].round(1).tolist(), found.held_out.mean > 0.99
    ([3.0, -2.0], True)
    """
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    models, examples = packed.shape
    scores = checked_prior(prior, examples, y.shape[1])
    made = recipe(
        penalty=penalty,
        share=share,
        tolerance=tolerance,
        max_steps=max_steps,
        dtype=dtype,
        device=device,
        memory_budget=memory_budget,
        scratch=scratch,
        variances=variances,
        prior=scores is not None,
        examples=examples,
    )
    path = fractions(
        lambdas,
        made.penalty,
        models=models,
        examples=examples,
        targets=y.shape[1],
        prior=scores is not None,
    )
    given = None if lam is None else _checked_lam(lam, y)
    work = _Work(made, packed, y, scores, path, seed, progress)
    if given is not None:
        return work.at(given)
    rows, parts = left_out(held_out, folds, models=models, prior=scores is not None)
    if parts and made.penalty == "means":
        raise DatamodelsError(
            "a difference of means has no penalty that folds could choose", fix="pass held_out="
        )
    if parts:
        return work.by_folds(parts)
    return work.by_rows(rows) if made.penalty != "means" else work.at(None, held_out=rows)


def _checked_lam(lam: Any, outputs: AnyArray) -> AnyArray:
    values = np.broadcast_to(np.asarray(lam, np.float64), (outputs.shape[1],)).copy()
    varying = np.ptp(outputs, axis=0) > 0
    if not (np.isfinite(values) & ((values > 0) | ~varying)).all():
        raise DatamodelsError(
            "lam must be one positive number per target, or one for all", found=values.tolist()
        )
    return values


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """One call of `fit`."""

    made: Recipe
    masks: Masks
    outputs: AnyArray
    prior: AnyArray | None
    path: tuple[float, ...]
    seed: int
    progress: Callable[[int, int], None] | None

    def at(self, lam: AnyArray | None, *, held_out: Any = None) -> Datamodels:
        """The fit at known penalties; models left out of a first one tell how well it predicts."""
        division = layout(self.made, *self.masks.shape, self.outputs.shape[1])
        if held_out is None:
            return self._noted(self._final(division, self._count(division, None)).fitted(lam))
        out = split(held_out, len(self.masks), seed=self.seed)
        kept = np.setdiff1d(np.arange(len(self.masks)), out)
        first = self._final(division, self._count(division, kept))
        before = first.fitted(lam)
        predicted = predict(self.masks[out], before.weights, before.bias)
        counts = first.counts.add(self.masks[out], self.outputs[out], device=self.made.device)
        return self._noted(self._final(division, counts).fitted(lam), out, predicted)

    def by_rows(self, held_out: Any) -> Datamodels:
        """The fit with penalties chosen on some rows."""
        import torch

        division = layout(self.made, *self.masks.shape, self.outputs.shape[1])
        out = split(held_out, len(self.masks), seed=self.seed)
        kept = np.setdiff1d(np.arange(len(self.masks)), out)
        first = self._final(division, self._count(division, kept))
        parts = list(first.parts(self.outputs.shape[1]))
        ticks = _Ticks(self.progress, len(parts) * len(self.path) + 1)
        choices = []
        with torch.inference_mode():
            standard, _ = first.standard(first.counts)
            for number, part in enumerate(parts, 1):
                choices.append(
                    choose_on_rows(
                        self.made.solver(division.working),
                        standard.targets(torch.arange(self.outputs.shape[1])[part]),
                        self.path,
                        self._natural(len(kept)),
                        self.masks[out],
                        self.outputs[out, part],
                        together=self.prior is not None,
                        progress=ticks,
                    )
                )
                ticks.reach(number * len(self.path))
            del standard  # the largest array: the next one takes its place
        choice = _joined(choices)
        counts = first.counts.add(self.masks[out], self.outputs[out], device=self.made.device)
        final = self._final(division, counts)
        lam = choice.lam
        if self.made.penalty == "ridge":  # its scale is n / m: more models, less of it
            lam = lam * len(kept) / len(self.masks)
        found = final.fitted(lam, start=choice.weights)
        ticks.reach(ticks.total)
        return self._noted(found, out, choice.predicted)

    def by_folds(self, folds: int) -> Datamodels:
        """The fit with penalties chosen by leaving out each fold in turn."""
        import torch

        models, targets = self.outputs.shape
        size = 4 * len(self.path) * models * targets
        division = layout(self.made, *self.masks.shape, targets, folds=folds, predictions=size)
        all_models = self._final(division, self._count(division, None))
        where = None if division.in_memory else folder(self.made)
        predicted = zeros((len(self.path), models, targets), np.float32, where)
        parts = list(all_models.parts(targets))
        ticks = _Ticks(self.progress, folds * len(parts) * len(self.path) + 1)
        with torch.inference_mode():
            for rows in fold_rows(folds, models, seed=self.seed):
                counts = all_models.counts.without(
                    self.masks[rows], self.outputs[rows], folder=where, device=self.made.device
                )
                standard, _ = all_models.standard(counts)
                for part in parts:
                    predicted[:, rows, part] = predict_path(
                        self.made.solver(division.working),
                        standard.targets(torch.arange(targets)[part]),
                        self.path,
                        self._natural(counts.models),
                        self.masks[rows],
                        progress=ticks,
                    )
                del counts, standard
            standard, _ = all_models.standard(all_models.counts)
            solver = self.made.solver(division.working)
            unit, spread = solver.unit(standard), standard.spread
            natural = self._natural(models)
            penalties = [
                solver.penalties(standard, fraction, natural).double().cpu().numpy() * unit
                for fraction in self.path
            ]
            del standard
        errors = np.stack([((one - self.outputs) ** 2).mean(axis=0) for one in predicted])
        if self.prior is not None:
            errors = np.repeat((errors / spread**2).mean(axis=1, keepdims=True), targets, axis=1)
        index = errors.argmin(axis=0)
        lam = np.stack(penalties)[index, np.arange(targets)]
        found = all_models.fitted(lam)
        ticks.reach(ticks.total)
        every = np.arange(models)
        out_of_fold = predicted[index, :, np.arange(targets)].T
        return self._noted(found, every, out_of_fold)

    def _natural(self, models: int) -> float:
        """The ridge at which a weight's prior and data weigh the same: n / m in standard units."""
        return self.masks.num_examples / models

    def _count(self, division: Plan, rows: AnyArray | None) -> Counts:
        some = slice(None) if rows is None else rows
        return Counts.of(
            self.masks[some],
            self.outputs[some],
            most=len(self.masks),
            folder=None if division.in_memory else folder(self.made),
            device=self.made.device,
        )

    def _final(self, division: Plan, counts: Counts) -> Final:
        return Final(self.made, division, counts, self.prior)

    def _noted(
        self, found: Datamodels, rows: AnyArray | None = None, predicted: AnyArray | None = None
    ) -> Datamodels:
        noted = replace(found, repeated_masks=self.masks.num_repeated())
        if rows is None or predicted is None:
            return noted
        return replace(
            noted,
            held_out=correlation(predicted, self.outputs[rows], seed=self.seed),
            held_out_rows=rows,
        )


class _Ticks:
    """Tells how far the work is; targets that leave a path early make it jump."""

    def __init__(self, report: Callable[[int, int], None] | None, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def __call__(self) -> None:
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        self.done = done
        if self.report is not None:
            self.report(done, self.total)


def _joined(choices: list[Choice]) -> Choice:
    return Choice(
        np.concatenate([one.index for one in choices]),
        np.concatenate([one.lam for one in choices]),
        np.concatenate([one.weights for one in choices], axis=1),
        np.concatenate([one.predicted for one in choices], axis=1),
    )
