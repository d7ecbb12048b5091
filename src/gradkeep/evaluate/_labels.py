"""Detection of label errors, and out-of-fold probabilities."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.attribution._suspects import Suspects, suspects
from gradkeep.datamodels import confidences
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import (
    Curve,
    Evaluation,
    SampleSizes,
    check_bounds,
    digest_of,
    draw_weights,
    interval_of,
)
from gradkeep.evaluate._groups import ChosenRows

if TYPE_CHECKING:
    from collections.abc import Sequence

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


_AT_ONCE = 1 << 24
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""How many rows are looked at, for each wrong label that there is."""


@checked(EvaluationError)
def label_detection(
    suspicion: Any,
    wrong: Any,
    *,
    ids: Any = None,
    subject: str | None = None,
    level: float = 0.95,
    resamples: int = 1000,
) -> Evaluation:
    """How well suspicion finds labels that are known to be wrong: the area under its ROC curve.

        AUC = probability that a wrong row is more suspicious than a right one, ties counting half

    `suspicion` is what `gk.suspects` returns, or numbers `[N]`, larger where more suspicious; `wrong`
    are the ids of the rows with wrong labels, or booleans `[N]`. The curve has precision and recall
    of lists of so many rows. Wrong and right rows are drawn anew apart. Cost: resamples x N.

    >>> found = label_detection(np.array([0.9, 0.8, 0.7, 0.2, 0.1] * 10), [0, 1, 5, 6] * 2)
    >>> round(found.value, 2), found.sizes.rows, found.curve.names
    (0.83, 50, ('precision', 'recall'))
    """
    check_bounds(level, resamples)
    values, numbers, told = _suspicion(suspicion, ids)
    flipped = _flipped(wrong, numbers)
    bad, total = int(flipped.sum()), len(flipped)
    if bad < 2 or total - bad < 2:
        raise EvaluationError(
            "detection needs wrong and right labels, two of each or more",
            found=f"{bad} wrong of {total}",
        )
    order = np.argsort(values, kind="stable")
    # A universe without the values: detectors of the same labels are resampled alike.
    by_id = np.argsort(numbers, kind="stable")
    universe = digest_of("labels", numbers[by_id], flipped[by_id], level, resamples)
    place = np.empty(total, np.int64)
    place[by_id] = np.arange(total)
    groups = np.flatnonzero(np.concatenate([[True], np.diff(values[order]) > 0]))
    ranked = place[order]
    weights_of = _stratified(flipped[by_id], resamples, universe)
    looked = np.unique(np.clip(np.round(bad * np.array(_SHARES)).astype(int), 1, total))
    areas, lists = np.empty(resamples), np.empty((2, resamples, len(looked)))
    step = max(1, _AT_ONCE // total)
    for start in range(0, resamples, step):
        weights = weights_of[start : start + step][:, ranked]
        areas[start : start + step] = _areas(weights, flipped[order], groups)
        lists[:, start : start + step] = _lists(weights, flipped[order], looked)
    ones = np.ones((1, total))
    value = float(_areas(ones, flipped[order], groups)[0])
    exact = _lists(ones, flipped[order], looked)[:, 0]
    spans = np.array(
        [
            [interval_of(lists[line, :, at], exact[line, at], level) for at in range(len(looked))]
            for line in range(2)
        ]
    )
    return Evaluation.from_draws(
        "label auc",
        subject or told,
        value,
        areas,
        values,
        numbers,
        sizes=SampleSizes(rows=total),
        truth=f"{bad} labels known to be wrong",
        universe=universe,
        level=level,
        curve=Curve(
            "rows looked at",
            looked,
            ("precision", "recall"),
            exact,
            np.clip(spans[..., 0], 0, 1),
            np.clip(spans[..., 1], 0, 1),
        ),
    )


@checked(EvaluationError)
def rank_sum(measures: Sequence[Any]) -> AnyArray:
    """One suspicion `[N]` from several measures `[N]` of it: the mean of their ranks, from 0 to 1.

    >>> rank_sum([np.array([1.0, 5.0, 2.0]), np.array([0.1, 0.9, 0.8])]).tolist()
    [0.0, 1.0, 0.5]
    """
    from gradkeep._ranks import ranks

    given = [_arguments.array("measures", one, error=EvaluationError) for one in measures]
    if not given or len({one.shape for one in given}) > 1 or given[0].ndim != 1:
        raise EvaluationError(
            "measures are lists of one number per row, all of the same rows",
            found=[list(one.shape) for one in given],
        )
    together = np.stack([ranks(one[:, None])[:, 0] for one in given]).mean(axis=0)
    return np.asarray(together / max(1, len(together) - 1))


def _suspicion(suspicion: Any, ids: Any) -> tuple[AnyArray, AnyArray, str]:
    if isinstance(suspicion, Suspects):
        told = (
            f"suspects by {suspicion.by} at {', '.join(suspicion.checkpoints) or 'no checkpoint'}"
        )
        return np.asarray(suspicion.values, np.float64), np.asarray(suspicion.ids), told
    values = _arguments.array("suspicion", suspicion, error=EvaluationError).astype(np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise EvaluationError(
            "suspicion is one finite number per row", found=f"shape {list(values.shape)}"
        )
    numbers = np.arange(len(values))
    if ids is not None:
        numbers = _arguments.whole_numbers("ids", ids, error=EvaluationError)
    if len(numbers) != len(values):
        raise EvaluationError(
            "every row needs one id", found=f"{len(numbers)} ids for {len(values)} rows"
        )
    return values, numbers, "given suspicion"


def _flipped(wrong: Any, numbers: AnyArray) -> AnyArray:
    given = _arguments.array("wrong", wrong, error=EvaluationError)
    if given.dtype == bool:
        if given.shape != numbers.shape:
            raise EvaluationError(
                "wrong is a boolean per row, or a list of ids",
                found=f"shape {list(given.shape)}",
                expected=f"[{len(numbers)}]",
            )
        if not np.array_equal(numbers, np.sort(numbers)):
            raise EvaluationError(
                "booleans say nothing about rows in another order", fix="pass the ids of wrong rows"
            )
        return given
    listed = _arguments.whole_numbers("wrong", wrong, error=EvaluationError)
    unknown = np.setdiff1d(listed, numbers)
    if len(unknown):
        raise EvaluationError(
            "some wrong labels are of rows that were not looked at", found=unknown[:5].tolist()
        )
    return np.isin(numbers, listed)


def _stratified(flipped: AnyArray, resamples: int, universe: str) -> AnyArray:
    """How often each row is drawn `[B, N]`, wrong and right ones apart."""
    weights = np.empty((resamples, len(flipped)))
    for kind, what in ((flipped, "wrong"), (~flipped, "right")):
        weights[:, kind] = draw_weights(int(kind.sum()), resamples, universe, what)
    return weights


def _areas(weights: AnyArray, flipped: AnyArray, groups: AnyArray) -> AnyArray:
    """The area under the ROC curve for weights `[B, N]` of rows in rising order of suspicion."""
    right = np.add.reduceat(weights * ~flipped, groups, axis=1)
    wrong = np.add.reduceat(weights * flipped, groups, axis=1)
    below = np.cumsum(right, axis=1) - right
    pairs = right.sum(axis=1) * wrong.sum(axis=1)
    return np.asarray((wrong * (below + right / 2)).sum(axis=1) / pairs)


def _lists(weights: AnyArray, flipped: AnyArray, looked: AnyArray) -> AnyArray:
    """Precision and recall `[2, B, K]` of the most suspicious rows, as far as they were drawn."""
    falling = weights[:, ::-1]
    drawn = np.cumsum(falling, axis=1)
    hits = np.cumsum(falling * flipped[::-1], axis=1)
    out = np.empty((2, len(weights), len(looked)))
    for column, size in enumerate(looked):
        at = np.minimum((drawn < size).sum(axis=1), weights.shape[1] - 1)
        found = hits[np.arange(len(hits)), at]
        out[0, :, column] = found / np.maximum(drawn[np.arange(len(drawn)), at], 1)
        out[1, :, column] = found / hits[:, -1]
    return out
