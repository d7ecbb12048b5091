"""How two ways to train differ in what they learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkeep.datamodels._components import Components, principal
from gradkeep.datamodels._near import unit_rows
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from gradkeep.datamodels._masks import AnyArray
    from gradkeep.datamodels._result import Datamodels


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Per target the cosine of both datamodels `[t]`, and the components of what the first has that
    the second has not, and the other way round."""

    agreement: AnyArray
    only_first: Components
    only_second: Components


def compare(
    first: Datamodels, second: Datamodels, count: int = 5, *, extremes: int = 5
) -> Comparison:
    """Compare two classes of models by their datamodels of the same targets (ModelDiff).

    From each target's weights under one class the part along its weights under the other is taken
    away; the principal components of what remains are training directions that matter to one
    class only. Costs t n min(t, n).

    >>> from gradkeep.datamodels import fit, planted
    >>> data = planted(300, 20, 4)
    >>> found = fit(data.masks, data.outputs)
    >>> compare(found, found).agreement.round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if first.weights.shape != second.weights.shape:
        raise DatamodelsError(
            "only fits of the same examples and targets can be compared",
            found=f"{list(first.weights.shape)} and {list(second.weights.shape)}",
        )
    a, b = unit_rows(first), unit_rows(second)
    agreement = (a * b).sum(axis=1)
    return Comparison(
        agreement,
        principal(a - agreement[:, None] * b, count, extremes),
        principal(b - agreement[:, None] * a, count, extremes),
    )
