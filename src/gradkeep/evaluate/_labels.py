"""Detection of label errors, and out-of-fold probabilities."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, PositiveInt, checked
from gradkeep.attribution._suspects import Suspects, suspects
from gradkeep.datamodels import confidences
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import Curve, Evaluation, SampleSizes
from gradkeep.evaluate._groups import ChosenRows
from gradkeep.evaluate._intervals import Level, digest_of, draw_weights, interval_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gradkeep.datamodels import Output
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def out_of_fold(
    recipe: Recipe, *, store: Store, folds: int = 5, seeds: PositiveInt = 1, **options: Any
) -> AnyArray:
    """Compute class probabilities of rows by models that were not trained on them.

    The rows are divided at random into `folds`; each fold is left out of one training per seed, and the
    probabilities are averaged. Memorized labels cannot hide there. Cost: folds x seeds trainings, saved in the
    store.

    Args:
        recipe: How models are trained.
        store: Where trainings are saved.
        folds: Number of folds.
        seeds: Trainings per fold.
        options: Options of `gk.farm.run`.

    Returns:
        Probabilities `[N, C]`.

    Raises:
        EvaluationError: The recipe has no class labels.
    """
    total, labels = recipe.num_rows, recipe.labels()
    _arguments.count("folds", folds, error=EvaluationError, least=2, most=total)
    if labels is None or labels.dtype.kind not in "ui":
        raise EvaluationError(
            "out-of-fold probabilities need inputs and class labels",
            code="evaluate.no_labels",
            found="no labels" if labels is None else str(labels.dtype),
            fix="Build the recipe with train=(inputs, labels).",
        )
    classes = int(labels.max()) + 1
    fold = np.random.default_rng(0).permutation(total) % folds
    probability_recipe = dataclasses.replace(
        recipe, output=_probabilities(recipe, classes), falling=False
    )
    masks = fold[None] != np.arange(folds)[:, None]
    outputs = probability_recipe.retraining(store, "out-of-fold").retrain(
        masks, repeats=seeds, **options
    )
    mean = np.asarray(outputs, np.float64).mean(axis=1).reshape(folds, total, classes)
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
    """Suggest labels for rows that are probably wrong, by models that never saw them.

    The list is the longest of which a share `precision` is expected to be wrong
    (`gk.suspects(probabilities=...)`). Cost: that of `out_of_fold`.

    Args:
        recipe: How models are trained.
        store: Where trainings are saved.
        precision: Expected share of wrong labels in the list.
        folds: Number of folds.
        seeds: Trainings per fold.
        options: Options of `gk.farm.run`.

    Returns:
        The rows with suggested labels.
    """
    probabilities = out_of_fold(recipe, store=store, folds=folds, seeds=seeds, **options)
    labels = recipe.labels()
    assert labels is not None
    ranked = suspects(probabilities=probabilities, labels=labels)
    flagged = ranked.flagged(precision)
    predicted = probabilities[flagged].argmax(axis=1)
    noise = ranked.noise
    assert noise is not None
    wrong = dict(zip(ranked.ids.tolist(), noise.wrong.tolist(), strict=True))
    values = np.array([wrong[number] for number in flagged.tolist()])
    reasons = [
        f"wrong with probability {wrong[row]:.2f}: labeled {labels[row]}, models that never saw it "
        f"predict {label} ({probabilities[row, label]:.0%})"
        for row, label in zip(flagged.tolist(), predicted.tolist(), strict=True)
    ]
    return ChosenRows(
        flagged, values, tuple(reasons), tuple(str(label) for label in predicted.tolist())
    )


def _probabilities(recipe: Recipe, classes: int) -> Output:
    """Build the output of all class probabilities of all training rows, `[N x C]`."""
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
                "the model has fewer classes than there are labels",
                code="evaluate.few_classes",
                found=logits.shape[-1],
                expected=self.classes,
            )
        return logits.softmax(-1)[..., : self.classes].flatten(-2)


_AT_ONCE = 1 << 24
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Lengths of the lists, relative to the number of wrong labels."""


@checked(EvaluationError)
def label_detection(
    suspicion: Any,
    wrong: Any,
    *,
    ids: Any = None,
    subject: str | None = None,
    level: Level = 0.95,
    resamples: Annotated[int, Limits(least=100, most=1000000)] = 1000,
) -> Evaluation:
    """Evaluate how well suspicion finds labels that are known to be wrong, by the area under the ROC curve.

        AUC = probability that a wrong row is more suspicious than a right one, ties counting half

    The curve has precision and recall of lists of several lengths. Wrong and right rows are resampled
    separately. Cost: resamples x N.

    Args:
        suspicion: Result of `gk.suspects`, or numbers `[N]`, larger for more suspicious rows.
        wrong: Ids of the rows with wrong labels, or booleans `[N]`.
        ids: Ids of the rows `[N]`, if `suspicion` is an array.
        subject: Name of the detector.
        level: Level of the interval.
        resamples: Bootstrap resamples.

    Returns:
        The area, with an interval.

    Raises:
        EvaluationError: There are fewer than two wrong or two right labels.

    Example:
        >>> detection = label_detection(np.array([0.9, 0.8, 0.7, 0.2, 0.1] * 10), [0, 1, 5, 6] * 2)
        >>> round(detection.value, 2), detection.sizes.rows, detection.curve.names
        (0.83, 50, ('precision', 'recall'))
    """
    values, numbers, description = _suspicion(suspicion, ids)
    flipped = _flipped(wrong, numbers)
    num_wrong, total = int(flipped.sum()), len(flipped)
    if num_wrong < 2 or total - num_wrong < 2:
        raise EvaluationError(
            "label_detection needs at least two wrong and two right labels",
            code="evaluate.few_labels",
            found=f"{num_wrong} wrong of {total}",
        )
    order = np.argsort(values, kind="stable")
    # The universe excludes the values, so that detectors of the same labels are resampled alike.
    by_id = np.argsort(numbers, kind="stable")
    universe = digest_of("labels", numbers[by_id], flipped[by_id], level, resamples)
    place = np.empty(total, np.int64)
    place[by_id] = np.arange(total)
    groups = np.flatnonzero(np.concatenate([[True], np.diff(values[order]) > 0]))
    ranked = place[order]
    weights_of = _stratified(flipped[by_id], resamples, universe)
    list_sizes = np.unique(np.clip(np.round(num_wrong * np.array(_SHARES)).astype(int), 1, total))
    areas, lists = np.empty(resamples), np.empty((2, resamples, len(list_sizes)))
    step = max(1, _AT_ONCE // total)
    for start in range(0, resamples, step):
        weights = weights_of[start : start + step][:, ranked]
        areas[start : start + step] = _areas(weights, flipped[order], groups)
        lists[:, start : start + step] = _lists(weights, flipped[order], list_sizes)
    ones = np.ones((1, total))
    value = float(_areas(ones, flipped[order], groups)[0])
    exact = _lists(ones, flipped[order], list_sizes)[:, 0]
    spans = np.array(
        [
            [
                interval_of(lists[line, :, at], exact[line, at], level)
                for at in range(len(list_sizes))
            ]
            for line in range(2)
        ]
    )
    areas += value - areas.mean()
    return Evaluation(
        "label auc",
        subject or description,
        value,
        interval_of(areas, value, level),
        items=values,
        item_ids=numbers,
        draws=areas,
        sizes=SampleSizes(rows=total),
        truth=f"{num_wrong} labels known to be wrong",
        universe=universe,
        level=level,
        curve=Curve(
            "rows looked at",
            list_sizes,
            ("precision", "recall"),
            exact,
            np.clip(spans[..., 0], 0, 1),
            np.clip(spans[..., 1], 0, 1),
        ),
    )


@checked(EvaluationError)
def rank_sum(measures: Sequence[Any]) -> AnyArray:
    """Combine several measures of suspicion: the mean of their ranks, 0 to 1.

    Args:
        measures: Measures `[N]` of the same rows.

    Returns:
        Suspicion `[N]`.

    Raises:
        EvaluationError: The measures have different lengths.

    Example:
        >>> rank_sum([np.array([1.0, 5.0, 2.0]), np.array([0.1, 0.9, 0.8])]).tolist()
        [0.0, 1.0, 0.5]
    """
    from gradkeep._ranks import ranks

    arrays = [_arguments.array("measures", measure, error=EvaluationError) for measure in measures]
    if not arrays or len({measure.shape for measure in arrays}) > 1 or arrays[0].ndim != 1:
        raise EvaluationError(
            "measures must have one number per row, all for the same rows",
            code="evaluate.wrong_measures",
            found=[list(measure.shape) for measure in arrays],
        )
    together = np.stack([ranks(measure[:, None])[:, 0] for measure in arrays]).mean(axis=0)
    return np.asarray(together / max(1, len(together) - 1))


def _suspicion(suspicion: Any, ids: Any) -> tuple[AnyArray, AnyArray, str]:
    if isinstance(suspicion, Suspects):
        description = (
            f"suspects by {suspicion.by} at {', '.join(suspicion.checkpoints) or 'no checkpoint'}"
        )
        return np.asarray(suspicion.values, np.float64), np.asarray(suspicion.ids), description
    values = _arguments.array("suspicion", suspicion, error=EvaluationError).astype(np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise EvaluationError(
            "suspicion must have one finite number per row",
            code="evaluate.wrong_suspicion",
            found=f"shape {list(values.shape)}",
        )
    numbers: AnyArray = np.arange(len(values))
    if ids is not None:
        numbers = _arguments.whole_numbers(
            "ids", ids, error=EvaluationError, length=len(values), code="evaluate.wrong_ids"
        )
    return values, numbers, "passed suspicion"


def _flipped(wrong: Any, numbers: AnyArray) -> AnyArray:
    values = _arguments.array("wrong", wrong, error=EvaluationError)
    if values.dtype == bool:
        shape, code = numbers.shape, "evaluate.wrong_shape"
        _arguments.array("wrong", wrong, error=EvaluationError, shape=shape, code=code)
        if not np.array_equal(numbers, np.sort(numbers)):
            raise EvaluationError(
                "booleans need rows in the order of their ids",
                code="evaluate.unordered_rows",
                fix="Pass the ids of the wrong rows.",
            )
        return values
    wrong_ids = _arguments.whole_numbers("wrong", wrong, error=EvaluationError)
    unknown = np.setdiff1d(wrong_ids, numbers)
    if len(unknown):
        raise EvaluationError(
            "some wrong rows have no suspicion",
            code="evaluate.unknown_rows",
            found=f"ids {unknown[:5].tolist()}",
        )
    return np.isin(numbers, wrong_ids)


def _stratified(flipped: AnyArray, resamples: int, universe: str) -> AnyArray:
    """Draw how often each row occurs `[B, N]`, wrong and right ones separately."""
    weights = np.empty((resamples, len(flipped)))
    for kind, what in ((flipped, "wrong"), (~flipped, "right")):
        weights[:, kind] = draw_weights(int(kind.sum()), resamples, universe, what)
    return weights


def _areas(weights: AnyArray, flipped: AnyArray, groups: AnyArray) -> AnyArray:
    """Compute the area under the ROC curve for weights `[B, N]` of rows by increasing suspicion."""
    right = np.add.reduceat(weights * ~flipped, groups, axis=1)
    wrong = np.add.reduceat(weights * flipped, groups, axis=1)
    below = np.cumsum(right, axis=1) - right
    pairs = right.sum(axis=1) * wrong.sum(axis=1)
    return np.asarray((wrong * (below + right / 2)).sum(axis=1) / pairs)


def _lists(weights: AnyArray, flipped: AnyArray, list_sizes: AnyArray) -> AnyArray:
    """Compute precision and recall `[2, B, K]` of the most suspicious drawn rows."""
    decreasing = weights[:, ::-1]
    drawn = np.cumsum(decreasing, axis=1)
    hits = np.cumsum(decreasing * flipped[::-1], axis=1)
    out = np.empty((2, len(weights), len(list_sizes)))
    for column, size in enumerate(list_sizes):
        at = np.minimum((drawn < size).sum(axis=1), weights.shape[1] - 1)
        num_hits = hits[np.arange(len(hits)), at]
        out[0, :, column] = num_hits / np.maximum(drawn[np.arange(len(drawn)), at], 1)
        out[1, :, column] = num_hits / hits[:, -1]
    return out
