"""Fitting datamodels: counts, choice of the penalty, the final weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._budgets import parse_bytes
from gradkeep.datamodels._correlation import correlation
from gradkeep.datamodels._counts import (
    Counts,
    StandardizedRegression,
    after_prior,
    standardize,
    zeros,
)
from gradkeep.datamodels._masks import Masks
from gradkeep.datamodels._options import (
    FitOptions,
    checked_outputs,
    checked_prior,
    default_penalty,
    fold_rows,
    fractions,
    left_out,
    rows_left_out,
    warn_of_few,
)
from gradkeep.datamodels._path import (
    PenaltyChoice,
    PenaltyStep,
    choose_on_rows,
    predict,
    predict_path,
    step_of,
)
from gradkeep.datamodels._result import Datamodels
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._options import FitLayout
    from gradkeep.datamodels._path import PathSolver


@checked(DatamodelsError)
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
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
    memory_budget: str | int | None = None,
    scratch: Any = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    each_penalty: Callable[[PenaltyStep], None] | None = None,
) -> Datamodels:
    """Fit datamodels to the outputs of models trained on subsets.

    Penalties are tried from large to small, and each target takes the one that best predicts held-out models; then all models are fitted. With a
    prior, all targets share one choice, made with five folds below 1,000 models, and the prior alone (an infinite penalty) is used unless
    held-out models show a significant gain. The same input and seed give the same bits.

    Costs m n^2 / 24 additions for the pair counts, then 2 n^2 t for each of about ten steps per penalty, and n^2 (2 + 4) bytes in float32.

    Args:
        masks: Training subsets `[m, n]`: booleans, zeros and ones, or `Masks`.
        outputs: Outputs `[m, t]` or `[m]`.
        penalty: `"l1"` (default), `"elastic"`, `"ridge"` (default with a prior, and with fewer models than a tenth of the examples) or `"means"`
            (difference of means).
        lambdas: Number of penalties, or fractions of the smallest penalty without weights (of n / m for ridge).
        lam: Fixed penalties `[t]`; skips the selection.
        held_out: Share of the models, or rows, to hold out; a tenth by default.
        folds: Number of cross-validation folds instead of `held_out`.
        share: Share of L1 in an elastic net.
        prior: Attribution scores `[t, n]` that the weights shrink towards.
        variances: How much each example may differ from the prior `[n]`.
        tolerance: Duality gap to reach, in units of half the output's variance.
        max_steps: Maximum number of solver steps.
        dtype: `"float32"` or `"float64"`.
        device: Device of the solver.
        memory_budget: Memory limit in bytes, or as `"4GiB"`; counts go to a file if needed.
        scratch: Folder of that file.
        seed: Seed of the held-out choice.
        progress: Called with the number of finished and of all steps.
        each_penalty: Called with the result of each penalty.

    Returns:
        The fitted datamodels.

    Raises:
        DatamodelsError: If masks, outputs or options do not fit together.
        BudgetError: If the memory budget is too small.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> masks = rng.random((400, 30)) < 0.5
        >>> outputs = 3.0 * masks[:, 4] - 2.0 * masks[:, 7] + 1 + 0.1 * rng.standard_normal(400)
        >>> fitted = fit(masks, outputs)
        >>> fitted.weights[[4, 7], 0].round(1).tolist(), fitted.held_out.mean > 0.99
        ([3.0, -2.0], True)
    """
    _arguments.count("seed", seed, error=DatamodelsError)
    _check_device(device)
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    models, examples = packed.shape
    scores = checked_prior(prior, examples, y.shape[1])
    options = FitOptions(
        penalty=cast("Any", penalty) or default_penalty(models, examples, prior=scores is not None),
        share=float(share),
        tolerance=float(tolerance),
        max_steps=max_steps,
        dtype=dtype,
        device=device,
        memory_budget=None if memory_budget is None else parse_bytes(memory_budget),
        scratch=None
        if scratch is None
        else Path(_arguments.file_path("scratch", scratch, error=DatamodelsError)),
        variances=None
        if variances is None
        else _arguments.array("variances", variances, error=DatamodelsError).astype(np.float64),
    )
    options.check_prior(scores, examples)
    warn_of_few(options.penalty, models, examples)
    path = fractions(
        lambdas,
        options.penalty,
        models=models,
        examples=examples,
        targets=y.shape[1],
        prior=scores is not None,
    )
    fixed_lambdas = None if lam is None else _checked_lam(lam, y)
    work = _FitCall(options, packed, y, scores, path, seed, progress, each_penalty)
    if fixed_lambdas is not None:
        return work.at(fixed_lambdas)
    rows, parts = left_out(held_out, folds, models=models, prior=scores is not None)
    if parts and options.penalty == "means":
        raise DatamodelsError(
            "penalty='means' has no penalty to select by folds",
            code="datamodels.means_have_no_penalty",
            fix="Pass held_out=.",
        )
    if parts:
        return work.by_folds(parts)
    return work.by_rows(rows) if options.penalty != "means" else work.at(None, held_out=rows)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        message = str(error).splitlines()[0][:200]
        raise DatamodelsError(
            "unknown device", code="datamodels.device", found=message, expected="cpu"
        ) from error


def _checked_lam(lam: Any, outputs: AnyArray) -> AnyArray:
    lambdas = _arguments.array("lam", lam, error=DatamodelsError).astype(np.float64)
    if lambdas.shape not in ((), (1,), (outputs.shape[1],)):
        raise DatamodelsError(
            "lam must be one positive number per target, or one for all",
            code="datamodels.lam",
            found=f"shape {list(lambdas.shape)}",
            expected=[outputs.shape[1]],
        )
    values = np.broadcast_to(lambdas, (outputs.shape[1],)).copy()
    varying = np.ptp(outputs, axis=0) > 0
    if not (np.isfinite(values) & ((values > 0) | ~varying)).all():
        raise DatamodelsError(
            "lam must be one positive number per target, or one for all",
            code="datamodels.lam",
            found=values.tolist(),
        )
    return values


@dataclass(frozen=True, slots=True, eq=False)
class _FitCall:
    """One call of `fit`."""

    options: FitOptions
    masks: Masks
    outputs: AnyArray
    prior: AnyArray | None
    path: tuple[float, ...]
    seed: int
    progress: Callable[[int, int], None] | None
    each_penalty: Callable[[PenaltyStep], None] | None = None

    def at(self, lam: AnyArray | None, *, held_out: Any = None) -> Datamodels:
        """The fit at known penalties; models left out of a first one tell how well it predicts."""
        if held_out is None:
            return self._noted(self._counted(self._layout()).fitted(lam))
        out = rows_left_out(held_out, len(self.masks), seed=self.seed)
        first = self._counted(self._layout(), without=out)
        before = first.fitted(lam)
        predicted = predict(self.masks[out], before.weights, before.bias)
        return self._noted(self._with(first, out).fitted(lam), out, predicted)

    def by_rows(self, held_out: Any) -> Datamodels:
        """The fit with penalties chosen on some rows."""
        import torch

        out = rows_left_out(held_out, len(self.masks), seed=self.seed)
        first = self._counted(self._layout(), without=out)
        parts = list(first.parts(self.outputs.shape[1]))
        ticks = _Ticks(self.progress, len(parts) * len(self.path) + 1)
        choices = []
        with torch.inference_mode():
            standard, _ = first.standard(first.counts)
            for number, part in enumerate(parts, 1):
                choices.append(
                    choose_on_rows(
                        first.solver,
                        standard.targets(torch.arange(self.outputs.shape[1])[part]),
                        self.path,
                        self._natural(first.counts.models),
                        self.masks[out],
                        self.outputs[out, part],
                        together=self.prior is not None,
                        progress=ticks,
                        each_penalty=self.each_penalty,
                        first=part.start,
                    )
                )
                ticks.reach(number * len(self.path))
            del standard  # the largest array: the next one takes its place
        choice = _joined(choices)
        lam = choice.lam
        if self.options.penalty == "ridge":  # its scale is n / m: more models, less of it
            lam = lam * first.counts.models / len(self.masks)
        solution = self._with(first, out).fitted(lam, start=choice.weights)
        ticks.reach(ticks.total)
        return self._noted(solution, out, choice.predicted)

    def by_folds(self, folds: int) -> Datamodels:
        """The fit with penalties chosen by leaving out each fold in turn."""
        import torch

        models, targets = self.outputs.shape
        size = 4 * len(self.path) * models * targets
        all_models = self._counted(self._layout(folds=folds, predictions=size))
        where = self.options.folder(all_models.layout)
        predicted = zeros((len(self.path), models, targets), np.float32, where)
        alone = np.zeros((models, targets), np.float32)
        parts = list(all_models.parts(targets))
        ticks = _Ticks(self.progress, folds * len(parts) * len(self.path) + 1)
        with torch.inference_mode():
            for rows in fold_rows(folds, models, seed=self.seed):
                counts = all_models.counts.without(
                    self.masks[rows], self.outputs[rows], folder=where
                )
                standard, _ = all_models.standard(counts)
                for part in parts:
                    some = standard.targets(torch.arange(targets)[part])
                    predicted[:, rows, part] = predict_path(
                        all_models.solver,
                        some,
                        self.path,
                        self._natural(counts.models),
                        self.masks[rows],
                        progress=ticks,
                    )
                    if self.prior is not None:
                        without_weights = some.in_mask_units(torch.zeros_like(some.c))
                        alone[rows, part] = predict(self.masks[rows], *without_weights)
                del counts, standard
            standard, _ = all_models.standard(all_models.counts)
            solver, natural = all_models.solver, self._natural(models)
            unit, spread = solver.unit(standard), standard.spread
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
        chosen = predicted[index, :, np.arange(targets)].T
        if self.prior is not None and not _betters(chosen, alone, self.outputs, spread):
            lam, chosen = np.full(targets, np.inf), alone
        solution = all_models.fitted(lam)
        ticks.reach(ticks.total)
        return self._noted(solution, np.arange(models), chosen)

    def _natural(self, models: int) -> float:
        """The ridge at which a weight's prior and data weigh the same: n / m in standard units."""
        return self.masks.num_examples / models

    def _layout(self, **more: int) -> FitLayout:
        return self.options.layout(*self.masks.shape, self.outputs.shape[1], **more)

    def _counted(self, layout: FitLayout, *, without: AnyArray | None = None) -> CountedFit:
        """All models counted, or all but some."""
        training_rows: Any = slice(None)
        if without is not None:
            training_rows = np.setdiff1d(np.arange(len(self.masks)), without)
        counts = Counts.of(
            self.masks[training_rows],
            self.outputs[training_rows],
            most=len(self.masks),
            folder=self.options.folder(layout),
        )
        return CountedFit(self.options, layout, counts, self.prior, self.each_penalty)

    def _with(self, first: CountedFit, rows: AnyArray) -> CountedFit:
        """The counts with some models more; takes over those it is given."""
        return replace(first, counts=first.counts.add(self.masks[rows], self.outputs[rows]))

    def _noted(
        self, fitted: Datamodels, rows: AnyArray | None = None, predicted: AnyArray | None = None
    ) -> Datamodels:
        noted = replace(fitted, repeated_masks=self.masks.num_repeated())
        if rows is None or predicted is None:
            return noted
        return replace(
            noted,
            held_out=correlation(predicted, self.outputs[rows], seed=self.seed),
            held_out_rows=rows,
        )


def _betters(chosen: AnyArray, alone: AnyArray, outputs: AnyArray, spread: AnyArray) -> bool:
    """Return True if a fit predicts held-out models significantly better than the prior alone.

    The gain of a model is the mean over targets of the difference of squared errors, in variances;
    its mean must be above its standard error over models.
    """
    gain = (((alone - outputs) ** 2 - (chosen - outputs) ** 2) / spread**2).mean(axis=1)
    return bool(gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)))


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


def _joined(choices: list[PenaltyChoice]) -> PenaltyChoice:
    return PenaltyChoice(
        np.concatenate([one.index for one in choices]),
        np.concatenate([one.lam for one in choices]),
        np.concatenate([one.weights for one in choices], axis=1),
        np.concatenate([one.predicted for one in choices], axis=1),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CountedFit:
    """Counts with the options to solve them by, in the parts that the layout allows."""

    options: FitOptions
    layout: FitLayout
    counts: Counts
    prior: AnyArray | None
    each_penalty: Callable[[PenaltyStep], None] | None = None

    @property
    def solver(self) -> PathSolver:
        """The solver, with room for the working set that the layout allows."""
        return self.options.solver(self.layout.working)

    def standard(self, counts: Counts) -> tuple[StandardizedRegression, AnyArray | None]:
        """The regression of some counts, after the prior if there is one."""
        import torch

        standard = standardize(
            counts,
            dtype=getattr(torch, self.options.dtype),
            device=self.options.device,
            dense=self.layout.in_memory and self.options.penalty != "means",
            rows=self.layout.rows,
            variances=self.options.variances,
        )
        if self.prior is None:
            return standard, None
        return after_prior(standard, self.prior, counts.models)

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
            weights, bias = np.zeros((n, targets), self.options.dtype), np.zeros(targets)
            gap = np.zeros(targets)
            solver = self.solver
            for part in self.parts(targets):
                now = standard.targets(torch.arange(targets)[part])
                if lam is None:
                    w = now.c
                elif np.isinf(lam[part]).all():
                    w = torch.zeros_like(now.c)
                else:
                    penalty = torch.from_numpy(lam[part] / solver.unit(now)).to(now.power)
                    warm = None if start is None else now.from_mask_units(start[:, part])
                    state = solver.start(now, warm)
                    solution = solver.solve(now, state, penalty, now.largest.maximum(penalty))
                    w, gap[part] = state.x, solution.double().cpu().numpy()
                    if self.each_penalty is not None:
                        here, none = np.arange(targets)[part], np.full(len(w), np.nan)
                        self.each_penalty(step_of(now, w, -1, here, lam[part], none, solution))
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
            options=self.options,
            constant_targets=tuple(constant.tolist()),
            constant_examples=tuple(np.flatnonzero((mean == 0) | (mean == 1)).tolist()),
            prior_scale=scale,
            prior=self.prior,
            counts=self.counts,
        )


def grown(fitted: Datamodels, masks: Masks, outputs: AnyArray) -> Datamodels:
    """The fit with more models: counts added, weights started from the earlier ones."""
    if fitted.counts is None:
        raise DatamodelsError(
            "the fit was loaded without its counts",
            code="datamodels.no_counts",
            fix="Fit all models together.",
        )
    options = fitted.options
    seen = None
    if len(masks) >= 10:
        seen = correlation(fitted.predict(masks), outputs)
    division = options.layout(fitted.num_models + len(masks), *fitted.weights.shape)
    counts = fitted.counts.copy(options.folder(division)).add(masks, outputs)
    final = CountedFit(options, division, counts, fitted.prior)
    start = fitted.weights if options.penalty != "means" else None
    return replace(
        final.fitted(fitted.lam if options.penalty != "means" else None, start=start),
        held_out=seen,
        repeated_masks=fitted.repeated_masks + masks.num_repeated(),
    )
