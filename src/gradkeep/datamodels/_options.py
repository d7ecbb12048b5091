"""Validated options of a fit."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, PositiveInt, check_fields
from gradkeep._budgets import format_bytes
from gradkeep.datamodels._counts import pair_dtype
from gradkeep.datamodels._masks import as_array
from gradkeep.datamodels._path import PathSolver, Penalty
from gradkeep.errors import BudgetError, DatamodelsError, EvidenceWarning

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray, Masks


@dataclass(frozen=True, slots=True)
class FitLayout:
    """Division of a fit to stay within its memory budget."""

    in_memory: bool
    targets: int
    rows: int
    working: int


_LEAST_LEFT_OUT = 3
_FEW = 10
"""L1 needs about as many models as there are weights that count times their logarithm: with less than
a tenth of the examples it picks noise, slowly."""


def default_penalty(models: int, examples: int, *, prior: bool) -> Penalty:
    """L1 where there are models enough for it, else ridge."""
    return "ridge" if prior or models * _FEW < examples else "l1"


def warn_of_few(penalty: Penalty, models: int, examples: int) -> None:
    """Say that sparse weights of so few models cannot be trusted."""
    if penalty in ("l1", "elastic") and models * _FEW < examples:
        warnings.warn(
            f"{models} models for {examples} examples: a sparse fit picks noise, and takes long; leave "
            f"out penalty= (ridge), or train {examples // _FEW} models or more",
            EvidenceWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True, eq=False)
class FitOptions:
    """How a fit is solved, again and again as models are added: the checked options of `fit`."""

    penalty: Penalty
    share: Annotated[float, Limits(above=0, most=1)]
    tolerance: Annotated[float, Limits(above=0)]
    max_steps: PositiveInt
    dtype: Literal["float32", "float64"]
    device: str
    memory_budget: int | None
    scratch: Path | None
    variances: AnyArray | None

    def __post_init__(self) -> None:
        check_fields(self, DatamodelsError)
        if self.dtype == "float32" and self.tolerance < 1e-6:
            raise DatamodelsError(
                "float32 cannot certify such a small gap",
                code="datamodels.float32_tolerance",
                found=f"tolerance {self.tolerance}",
                expected="1e-6 or more",
                fix="Pass dtype='float64'.",
            )

    def check_prior(self, prior: AnyArray | None, examples: int) -> None:
        """Validate the prior and variances against the penalty and the number of examples."""
        if self.penalty == "means" and (prior is not None or self.variances is not None):
            raise DatamodelsError(
                "a difference of means takes no prior",
                code="datamodels.means_with_prior",
                fix="Use penalty='ridge' with a prior.",
            )
        allowed = self.variances
        if allowed is None:
            return
        if allowed.shape != (examples,) or not (np.isfinite(allowed) & (allowed > 0)).all():
            raise DatamodelsError(
                "variances must be one positive number per training example",
                code="datamodels.variances",
                found=f"shape {list(allowed.shape)}",
                expected=[examples],
            )

    def solver(self, working: int) -> PathSolver:
        """The solver with room for a working set."""
        share = self.share if self.penalty == "elastic" else 1.0
        return PathSolver(self.penalty, share, self.tolerance, self.max_steps, working)

    def layout(
        self, models: int, examples: int, targets: int, *, folds: int = 0, predictions: int = 0
    ) -> FitLayout:
        """The fastest division of the fit that fits into the budget; none is needed for None.

        In memory a fit takes n^2 (2 + 4) bytes in float32 (below 65,536 models), and as many as
        16 n t 4 for the targets solved together. Folds need their own counts, and `predictions` bytes;
        beyond the budget both lie in files.
        """
        budget, itemsize = self.memory_budget, np.dtype(self.dtype).itemsize
        most_rows, least_rows = 1024, 8
        if budget is None:
            return FitLayout(True, targets, most_rows, examples)
        # Arrays `[targets, examples]` that a solver holds at its peak, temporary ones included.
        each = 16 * examples * itemsize
        # A row of a panel: float64 counts, their products, the panel itself.
        row = 26 * examples
        # What is there however the work is divided: tables and tiles, sums, warm starts, results;
        # blocks of masks while pairs are counted, and in other passes.
        block = max(6 * min(models, 4032), 10 * min(models, 1024))
        held = (4 << 20) + examples * (targets * (16 + itemsize) + block) + row * least_rows
        pairs = examples * examples * pair_dtype(models).itemsize * (2 if folds else 1)
        spare = budget - (held + predictions + pairs + examples * examples * itemsize)
        if spare >= each:
            rows = max(least_rows, min(most_rows, spare // 2 // row))
            count = (spare - row * (rows - least_rows)) // each
            return FitLayout(True, max(1, min(targets, count)), rows, examples)
        spare = budget - (held + each)
        if spare < 0:
            least = held + each
            raise BudgetError(
                "the memory budget is too small for this fit",
                code="budget.fit_too_small",
                found=format_bytes(budget),
                expected=f"{format_bytes(least)} or more ({least} bytes)",
                fix="Raise memory_budget, or fit the targets in several parts.",
            )
        count, rows = 1 + spare // 4 // each, least_rows + spare // 4 // row
        working = int((spare / 4 / itemsize) ** 0.5)
        return FitLayout(False, min(targets, count), min(most_rows, rows), working)

    def folder(self, layout: FitLayout) -> Path | None:
        """Where counts lie that are too large for memory; None if they are not."""
        if layout.in_memory:
            return None
        return Path(tempfile.gettempdir()) if self.scratch is None else self.scratch


def checked_outputs(masks: Masks, outputs: Any) -> AnyArray:
    """Outputs `[m, t]` as floats: one row per mask, every value a finite number."""
    array = as_array(outputs)
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype.kind not in "fiub":
        raise DatamodelsError(
            "outputs must be numbers", code="datamodels.output_dtype", found=f"dtype {array.dtype}"
        )
    if array.ndim != 2 or len(array) != len(masks) or array.shape[1] == 0:
        raise DatamodelsError(
            "outputs need a row per mask and a column per target",
            code="datamodels.output_shape",
            found=f"outputs {list(array.shape)}, masks {list(masks.shape)}",
            expected=f"[{len(masks)}] or [{len(masks)}, targets]",
        )
    array = array if array.dtype.kind == "f" else array.astype(np.float64)
    wrong = ~np.isfinite(array)
    if wrong.any():
        row, target = np.argwhere(wrong)[0]
        models = np.flatnonzero(wrong.any(axis=1))
        raise DatamodelsError(
            "outputs hold NaN or infinity",
            code="datamodels.output_not_finite",
            found=f"{array[row, target]} for model {row}, target {target}; "
            f"{len(models)} of {len(array)} models are affected",
            fix="Leave those models out: keep = np.isfinite(outputs).all(1); "
            "fit(masks[keep], outputs[keep])",
        )
    return array


def checked_prior(prior: Any, examples: int, targets: int) -> AnyArray | None:
    """Prior weights `[n, t]` from attribution scores `[t, n]`, an array or anything with numpy()."""
    if prior is None:
        return None
    array = _arguments.array("prior", prior, error=DatamodelsError).astype(np.float64)
    array = array[None] if array.ndim == 1 else array
    if array.shape != (targets, examples) or not np.isfinite(array).all():
        raise DatamodelsError(
            "a prior needs one finite score per target and training example",
            code="datamodels.prior_shape",
            found=f"shape {list(array.shape)}",
            expected=[targets, examples],
            fix="scores are [queries, train]: the targets' order, and all training examples",
        )
    return np.ascontiguousarray(array.T)


def fractions(
    lambdas: Any, kind: Penalty, *, models: int, examples: int, targets: int, prior: bool
) -> tuple[float, ...]:
    """The path, from large to small, in parts of the penalty's natural scale."""
    if isinstance(lambdas, int | np.integer) and not isinstance(lambdas, bool):
        if lambdas < 1:
            raise DatamodelsError(
                "a path needs one penalty or more",
                code="datamodels.lambdas",
                found=f"lambdas={lambdas}",
            )
        low, high = (1e-2, 1.0) if kind != "ridge" else (1e-2, 1e2)
        if prior and kind == "ridge":
            # Below so many outputs a small ridge around a prior over-fits, whatever left-out rows
            # say.
            low, high = (0.1 if models * targets >= 400 else 10.0), 1e4
        return tuple(float(value) for value in np.geomspace(high, low, int(lambdas)))
    if isinstance(lambdas, Mapping | str) or not isinstance(lambdas, Iterable):
        raise DatamodelsError(
            "lambdas is a number of penalties or several fractions", code="datamodels.lambdas"
        )
    numbers = lambdas if hasattr(lambdas, "shape") else list(lambdas)
    array = _arguments.array("lambdas", numbers, error=DatamodelsError)
    values = tuple(sorted(array.astype(np.float64).ravel().tolist(), reverse=True))
    if not values or not all(np.isfinite(values)) or values[-1] < 0:
        raise DatamodelsError(
            "lambdas must be positive numbers", code="datamodels.lambdas", found=values
        )
    if values[-1] == 0:
        few = models <= examples
        raise DatamodelsError(
            f"{models} models cannot determine {examples} weights without a penalty"
            if few
            else "without a penalty no gap can be proven",
            code="datamodels.no_penalty",
            found="a lambda of 0",
            fix="Leave out the 0; a small one such as 1e-3 is nearly none"
            + (", or train more models" if few else ""),
        )
    return values


def left_out(held_out: Any, folds: int | None, *, models: int, prior: bool) -> tuple[Any, int]:
    """How penalties are chosen: rows to leave out, or a number of folds (0 for none).

    By default a tenth of the models; around a prior, where the choice matters most with few
    models, five folds below a thousand.
    """
    if held_out is not None and folds is not None:
        raise DatamodelsError(
            "held_out and folds exclude each other",
            code="datamodels.held_out_and_folds",
            fix="Pass one of them.",
        )
    if folds is not None:
        return None, folds
    if held_out is None and prior and models < 1000:
        return None, 5
    return (0.1 if held_out is None else held_out), 0


def rows_left_out(held_out: Any, models: int, *, seed: int) -> AnyArray:
    """Which models are left out to choose the penalty: sorted rows, from a part or from ids."""
    if isinstance(held_out, float):
        if not 0 < held_out < 1:
            raise DatamodelsError(
                "held_out as a part must be between 0 and 1",
                code="datamodels.held_out",
                found=held_out,
            )
        count = max(_LEAST_LEFT_OUT, round(held_out * models))
        rows = np.sort(np.random.default_rng(seed).permutation(models)[:count])
    else:
        rows = np.unique(_arguments.array("held_out", held_out, error=DatamodelsError))
        if rows.dtype.kind not in "iu" or len(rows) == 0 or rows[0] < 0 or rows[-1] >= models:
            raise DatamodelsError(
                "held_out must be a part, such as 0.1, or ids of models",
                code="datamodels.held_out",
                expected=f"0..{models - 1}",
            )
    if len(rows) < _LEAST_LEFT_OUT or models - len(rows) < _LEAST_LEFT_OUT:
        raise DatamodelsError(
            "too few models to hold some out",
            code="datamodels.too_few_models",
            found=f"{models} models, {len(rows)} left out",
            expected=f"{_LEAST_LEFT_OUT} or more on either side",
            fix="Train more models, or pass lam= and held_out=None.",
        )
    return rows


def fold_rows(folds: int, models: int, *, seed: int) -> list[AnyArray]:
    """The models of each fold, sorted."""
    if not 2 <= folds <= models // _LEAST_LEFT_OUT:
        raise DatamodelsError(
            "folds must leave three models or more in each",
            code="datamodels.folds",
            found=f"{folds} folds of {models} models",
            expected=f"2 to {models // _LEAST_LEFT_OUT}",
        )
    order = np.random.default_rng(seed).permutation(models)
    return [np.sort(part) for part in np.array_split(order, folds)]
