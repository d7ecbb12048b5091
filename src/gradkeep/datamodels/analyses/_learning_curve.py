"""How much better datamodels get with more models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._annotations import checked
from gradkeep.datamodels.fitting._fit import fit
from gradkeep.datamodels.fitting._masks import Masks
from gradkeep.datamodels.fitting._options import checked_outputs, rows_left_out
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from gradkeep.datamodels.fitting._correlation import Correlation
    from gradkeep.datamodels.fitting._masks import AnyArray

_LEAST = 20
"""Fits of fewer models tell nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class LearningCurve:
    """The correlation on the same left-out models after fits of more and more others: `models [k]`,
    its `mean` over targets and the interval `low`, `high` `[k]`, and each whole `Correlation`."""

    models: AnyArray
    mean: AnyArray
    low: AnyArray
    high: AnyArray
    correlations: tuple[Correlation, ...]


@checked(DatamodelsError)
def learning_curve(
    masks: Any,
    outputs: Any,
    sizes: Sequence[int] | None = None,
    *,
    held_out: Any = 0.1,
    kind: Literal["pearson", "spearman"] = "pearson",
    seed: int = 0,
    **options: Any,
) -> LearningCurve:
    """Fit growing numbers of models, in their order, and predict those that were left out.

    The left-out models choose nothing, so the correlations are honest. `sizes` are by default five
    doublings up to all others; `options` go to `fit`. Costs a fit per size.

    >>> from gradkeep.datamodels import planted
    >>> data = planted(800, 30, 4)
    >>> curve = learning_curve(data.masks, data.outputs, [100, 600])
    >>> bool(curve.mean[1] > curve.mean[0])
    True
    """
    packed = Masks.of(masks)
    y = checked_outputs(packed, outputs)
    out = rows_left_out(held_out, len(packed), seed=seed)
    rest = np.setdiff1d(np.arange(len(packed)), out)
    wanted = sorted({len(rest) >> k for k in range(5)}) if sizes is None else sorted(sizes)
    wanted = [size for size in wanted if sizes is not None or size >= _LEAST]
    if not wanted or wanted[0] < 1 or wanted[-1] > len(rest):
        raise DatamodelsError(
            "these sizes cannot be taken from the models that are not left out",
            found=wanted,
            expected=f"1 to {len(rest)}",
        )
    found = []
    for size in wanted:
        rows = rest[:size]
        fitted = fit(packed[rows], y[rows], seed=seed, **options)
        found.append(fitted.score(packed[out], y[out], kind=kind))
    return LearningCurve(
        np.array(wanted),
        np.array([one.mean for one in found]),
        np.array([one.mean_low for one in found]),
        np.array([one.mean_high for one in found]),
        tuple(found),
    )
