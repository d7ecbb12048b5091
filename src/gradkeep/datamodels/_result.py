"""Fitted datamodels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.datamodels._choice import predict
from gradkeep.datamodels._correlation import Correlation, correlation
from gradkeep.datamodels._masks import AnyArray, Masks
from gradkeep.datamodels._request import checked_outputs
from gradkeep.errors import DatamodelsError

if TYPE_CHECKING:
    from typing import Literal

    from gradkeep.datamodels._counts import Counts
    from gradkeep.datamodels._request import Recipe
    from gradkeep.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Datamodels:
    """Linear maps from a training subset to a model's outputs: output = mask . weights + bias.

    Made by `fit`. `weights [n, t]` and `bias [t]` are in mask units: a weight is what training on
    that example adds to the output.
    """

    weights: AnyArray
    bias: AnyArray
    lam: AnyArray
    """`[t]`, the penalty in (1/2m) |y - b - Zw|^2 + lam |w|_1 with standard columns Z; lam/2 |w|^2
    for ridge, lam (share |w|_1 + (1 - share) / (2 sd(y)) |w|^2) for an elastic net."""
    gap: AnyArray
    """`[t]`, at most how far the objective is from its least value, in parts of half a variance."""
    num_models: int
    recipe: Recipe
    held_out: Correlation | None = None
    """Over models left out while the penalty was chosen; after `add`, over the models added, as
    predicted before. None if there were none."""
    held_out_rows: AnyArray = field(default_factory=lambda: np.zeros(0, np.int64))
    constant_targets: tuple[int, ...] = ()
    """Outputs that never changed: weights 0, bias the constant, gap 0."""
    constant_examples: tuple[int, ...] = ()
    """Examples in all subsets or in none: nothing can be learnt about them, weight 0."""
    repeated_masks: int = 0
    """Models with the mask of an earlier one; they count as further trainings of that subset."""
    prior_scale: AnyArray | None = None
    """`[t]`, what the prior's scores were multiplied by; 0 if they pointed the wrong way."""
    prior: AnyArray | None = field(default=None, repr=False)
    counts: Counts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for array in (self.weights, self.bias, self.lam, self.gap):
            array.flags.writeable = False

    def __repr__(self) -> str:
        examples, targets = self.weights.shape
        told = "" if self.held_out is None else f", held out: {self.held_out}"
        return (
            f"Datamodels({self.recipe.penalty}, {self.num_models} models, {examples} examples, "
            f"{targets} targets, gap <= {self.gap.max(initial=0.0):.1e}{told})"
        )

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Targets whose gap is above the tolerance: raise max_steps, or use float64."""
        return tuple(np.flatnonzero(self.gap > self.recipe.tolerance).tolist())

    def predict(self, masks: Any) -> AnyArray:
        """The outputs of models trained on these subsets, `[m, t]`: 2 m n t operations."""
        given = Masks.of(masks)
        self._check_examples(given)
        return predict(given, self.weights, self.bias)

    def score(
        self, masks: Any, outputs: Any, *, kind: Literal["pearson", "spearman"] = "pearson"
    ) -> Correlation:
        """How well the outputs of models that were not fitted are predicted, with intervals."""
        given = Masks.of(masks)
        return correlation(self.predict(given), self._outputs(given, outputs), kind=kind)

    def add(self, masks: Any, outputs: Any) -> Datamodels:
        """The fit of these and more models at the same penalties, started from this one.

        Costs the pairs of the new models and a few steps. The new models are predicted first:
        `held_out` of the result says how well.
        """
        from gradkeep.datamodels._final import grown

        given = Masks.of(masks)
        self._check_examples(given)
        return grown(self, given, self._outputs(given, outputs))

    def save(self, store: Store, name: str) -> None:
        """Keep the fit in a store, a row per target, under a name of its scores."""
        from gradkeep.datamodels._saved import save

        save(self, store, name)

    def _outputs(self, masks: Masks, outputs: Any) -> AnyArray:
        array = checked_outputs(masks, outputs)
        if array.shape[1] != self.weights.shape[1]:
            raise DatamodelsError(
                "these outputs have other targets than the fit",
                found=f"{array.shape[1]} targets",
                expected=f"{self.weights.shape[1]}",
            )
        return array

    def _check_examples(self, masks: Masks) -> None:
        if masks.num_examples != len(self.weights):
            raise DatamodelsError(
                "these masks are of another data set than the fit",
                found=f"{masks.num_examples} examples",
                expected=f"{len(self.weights)}",
            )
