"""What models say of rows that they have not seen: every row is left out of one training."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.attribution._suspects import suspects
from gradkeep.datamodels import confidences
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._selection import ChosenRows

if TYPE_CHECKING:
    import torch

    from gradkeep.datamodels import Output
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def out_of_fold(
    recipe: Recipe, *, store: Store, folds: int = 5, seeds: int = 1, **options: Any
) -> AnyArray:
    """The probabilities `[N, C]` that models give to the classes of rows they were not trained on.

    The rows are divided at random into `folds`; each is left out of one training (of `seeds`, whose
    probabilities are averaged). What a model learnt by heart cannot hide there. Cost: folds x seeds
    trainings, kept in the store; `options` are those of `gk.farm.run`.
    """
    total, labels = recipe.num_rows, recipe.labels()
    _arguments.count("folds", folds, error=EvaluationError, least=2, most=total)
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
    if labels is None or labels.dtype.kind not in "ui":
        raise EvaluationError(
            "out-of-fold probabilities need inputs and labels of classes",
            found="no labels" if labels is None else str(labels.dtype),
            fix="make the recipe with train=(inputs, labels)",
        )
    classes = int(labels.max()) + 1
    fold = np.random.default_rng(0).permutation(total) % folds
    asked = dataclasses.replace(recipe, output=_probabilities(recipe, classes), falling=False)
    masks = fold[None] != np.arange(folds)[:, None]
    said = asked.retraining(store, "out-of-fold").retrain(masks, repeats=seeds, **options)
    mean = np.asarray(said, np.float64).mean(axis=1).reshape(folds, total, classes)
    return np.asarray(mean[fold, np.arange(total)])


@checked(EvaluationError)
def suggest_labels(
    recipe: Recipe,
    *,
    store: Store,
    precision: float = 0.8,
    folds: int = 5,
    seeds: int = 1,
    **options: Any,
) -> ChosenRows:
    """Rows whose labels are probably wrong, with the label that models say which never saw them.

    The list is the longest of which a share `precision` is expected to be wrong
    (`gk.suspects(probabilities=...)`). Cost: that of `out_of_fold`.
    """
    told = out_of_fold(recipe, store=store, folds=folds, seeds=seeds, **options)
    labels = recipe.labels()
    assert labels is not None
    found = suspects(probabilities=told, labels=labels)
    flagged = found.flagged(precision)
    said = told[flagged].argmax(axis=1)
    noise = found.noise
    assert noise is not None
    wrong = dict(zip(found.ids.tolist(), noise.wrong.tolist(), strict=True))
    values = np.array([wrong[number] for number in flagged.tolist()])
    reasons = [
        f"wrong with probability {wrong[row]:.2f}: labelled {labels[row]}, models that never saw it "
        f"say {label} ({told[row, label]:.0%})"
        for row, label in zip(flagged.tolist(), said.tolist(), strict=True)
    ]
    return ChosenRows(flagged, values, tuple(reasons), tuple(str(label) for label in said.tolist()))


def _probabilities(recipe: Recipe, classes: int) -> Output:
    """All class probabilities of all training rows, one after the other `[N x C]`."""
    of_logits = _AllProbabilities(classes)
    like = confidences(recipe.train)
    return dataclasses.replace(
        like,
        shape=(recipe.num_rows * classes,),
        of_model=dataclasses.replace(like.of_model, of_logits=of_logits),  # type: ignore[type-var]
        of_logits=of_logits,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _AllProbabilities:
    """Probabilities `[..., N x C]` from logits `[..., N, C]`."""

    classes: int

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] < self.classes:
            raise EvaluationError(
                "the model knows fewer classes than there are labels",
                found=logits.shape[-1],
                expected=self.classes,
            )
        return logits.softmax(-1)[..., : self.classes].flatten(-2)
