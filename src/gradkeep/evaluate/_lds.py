"""The linear datamodeling score: how well sums of scores predict the outcomes of retraining."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._registry import methods as all_methods
from gradkeep.attribution._scores import Scores
from gradkeep.attribution._tuning import subset_digests
from gradkeep.datamodels import fit
from gradkeep.errors import EvaluationError, GradkeepError
from gradkeep.evaluate._evaluation import (
    Difference,
    Evaluation,
    SampleSizes,
    compare,
    evaluate_correlations,
)
from gradkeep.evaluate._intervals import (
    Level,
    digest_of,
    format_interval,
    rank_correlations,
    spread_of,
)
from gradkeep.evaluate._recipe import labels_digest
from gradkeep.evaluate._truth import GroundTruth, captured_examples, check_order, load_truth
from gradkeep.store import CaptureKey
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gradkeep.evaluate._truth import TruthPart
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def lds(
    scores: Scores,
    truth: GroundTruth,
    *,
    part: TruthPart = "reporting",
    level: Level = 0.95,
) -> Evaluation:
    """Compute the linear datamodeling score, with an interval over queries and subsets.

        LDS = mean over queries of Spearman(sum of scores over a subset, output of its models)

    The queries of the truth are matched by the ids of the scores (or all, in order). Few subsets give a value
    that is too small; the interval is corrected for that (jackknife over subsets, Student's t). Cost: subsets² x
    queries.

    Args:
        scores: Scores `[Q, N]`.
        truth: The ground truth.
        part: Subsets to use: `reporting`, `choosing` or `all`.
        level: Level of the interval.

    Returns:
        The LDS with its interval and ceiling.

    Raises:
        EvaluationError: The scores were tuned on these subsets, or have other rows or queries.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> from gradkeep.evaluate._truth import GroundTruth
        >>> rng = np.random.default_rng(0)
        >>> masks, weights = rng.random((40, 30)) < 0.5, rng.standard_normal((5, 30)).astype("f4")
        >>> outputs = (masks @ weights.T)[:, None] + 0.1 * rng.standard_normal((40, 2, 5))
        >>> truth = GroundTruth("planted", masks, outputs)
        >>> score = lds(Scores(weights, np.arange(5), np.arange(30)), truth)
        >>> score.value > 0.95, score.sizes.subsets, score.interval[0] > 0.9
        (True, 20, True)
    """
    truth.require_not_tuned(scores.chosen_on, part)
    places = match_queries(scores, truth)
    half = truth.part(part)
    actual = half.outputs[:, places]
    predicted = half.masks.astype(np.float64) @ np.asarray(scores.values, np.float64).T
    universe = digest_of("lds", truth.digest(part, places), level)
    correlation = rank_correlations(predicted, actual)
    spread = spread_of(correlation.table)
    ceiling = truth.estimate_ceiling(part, places, level=level)
    defined = int(np.isfinite(correlation.items).sum())
    return evaluate_correlations(
        correlation,
        "lds",
        subject_of(scores),
        item_ids=scores.query_ids,
        sizes=SampleSizes(queries=defined, subsets=len(actual), seeds=truth.seeds),
        truth=half.name,
        universe=universe,
        level=level,
        ceiling=ceiling,
        spread_by_subsets=None if spread is None else math.sqrt(spread.by_columns),
        spread_by_queries=None if spread is None else math.sqrt(spread.by_rows),
        provenance=provenance_of(scores),
        captures=scores.captures,
    )


def match_queries(scores: Scores, truth: GroundTruth) -> AnyArray:
    """Return the positions `[Q]` of the scores' queries in the truth; raise unless the rows match."""
    if len(scores.train_ids) != truth.num_rows:
        raise EvaluationError(
            f"the subsets of {truth.name!r} have other rows than the scores",
            code="evaluate.other_rows",
            found=f"masks of {truth.num_rows} rows, scores of {len(scores.train_ids)}",
            fix="Capture all rows of the recipe in their order.",
        )
    if not np.isfinite(scores.values).all():
        missing = int((~np.isfinite(np.asarray(scores.values)).all(axis=0)).sum())
        raise EvaluationError(
            "some scores are not finite", code="evaluate.not_finite", found=f"in {missing} rows"
        )
    known = truth.labels if scores.train_labels is not None else None
    if known is not None and labels_digest(scores.train_labels) != known:
        raise EvaluationError(
            f"the ground truth {truth.name!r} has other labels than the capture",
            code="evaluate.other_labels",
            fix="Train a ground truth with the captured rows under another name.",
        )
    places = places_among(scores.query_ids, truth.num_queries)
    train = captured_examples(scores, scores.train, scores.train_ids)
    if train is not None:
        check_order(truth.rows, train, what="training rows")
    captured_queries = captured_examples(scores, scores.queries, scores.query_ids)
    if captured_queries is not None:
        by_place = np.zeros(truth.num_queries, np.uint64)
        by_place[places] = captured_queries
        check_order(truth.query_rows, by_place, what="queries")
    return places


def places_among(ids: AnyArray, count: int) -> AnyArray:
    """Return the positions `[Q]` of queries among those of the models: their ids, or all in order."""
    if len(ids) and ids.min() >= 0 and ids.max() < count:
        return np.asarray(ids)
    if len(ids) == count:
        return np.arange(count)
    raise EvaluationError(
        "the models have outputs of other queries",
        code="evaluate.other_queries",
        found=f"ids {ids[:3].tolist()} ... of {len(ids)} scored queries",
        expected=f"ids from 0 to {count - 1}, or all {count} queries in order",
    )


def places_of(what: str, ids: Any, known: AnyArray) -> AnyArray:
    """Return the positions of ids among the known ones; raise for unknown ids."""
    numbers = _arguments.whole_numbers(what, ids, error=EvaluationError)
    unknown = np.setdiff1d(numbers, known)
    if len(unknown) or not len(numbers):
        raise EvaluationError(
            f"{what} must be ids of scored rows",
            code="evaluate.not_scored",
            found=f"unknown ids {unknown[:5].tolist()}" if len(unknown) else "no id",
        )
    order = np.argsort(known, kind="stable")
    return np.asarray(order[np.searchsorted(known, numbers, sorter=order)])


def subject_of(scores: Scores) -> str:
    """Describe the method and checkpoints of scores."""
    at = ", ".join(scores.checkpoints[:3])
    more = len(scores.checkpoints) - 3
    return scores.method + (f" at {at}" if at else "") + (f" and {more} more" if more > 0 else "")


def provenance_of(scores: Scores) -> str:
    """Describe how scores were computed: scale, options, approximation and choices."""
    parts = [scores.scale, scores.options if scores.options != "{}" else ""]
    parts += [f"approximate: {scores.approximate}" if scores.approximate else ""]
    parts += [f"chosen: {scores.chosen}" if scores.chosen else ""]
    return "; ".join(filter(None, parts))


_FOLDS, _LEAST_IN_A_FOLD = 5, 3
"""Folds of `gk.datamodels.fit` with a prior, and fewest models in a fold."""


@checked(EvaluationError)
def hybrid(scores: Scores, truth: GroundTruth, *, variances: Any = None, **options: Any) -> Scores:
    """Fit datamodels of the choosing half with the scores as prior; mostly better than either.

    Weights shrink towards the scaled scores; the folds of `gk.datamodels.fit` choose how far, and the scores
    alone are among the choices. With few subsets the choice can be wrong.

    Args:
        scores: Scores `[Q, N]`.
        truth: The ground truth.
        variances: How far each row may differ from its score `[N]`; the mean 1 - p of a row is a good measure.
        options: Options of `gk.datamodels.fit`.

    Returns:
        Scores of the hybrid; evaluate them on the reporting half.

    Raises:
        EvaluationError: There are too few subsets, or the scores do not match the truth.
    """
    places = match_queries(scores, truth)
    truth.require_not_tuned(scores.chosen_on, "reporting")
    half = truth.choosing
    prior = np.asarray(scores.values)
    few = len(half.masks) < _FOLDS * _LEAST_IN_A_FOLD
    if few and not {"folds", "lam", "held_out"} & set(options):
        options["folds"] = _fewer_folds(len(half.masks))
    fitted = fit(half.masks, half.outputs[:, places], prior=prior, variances=variances, **options)
    alone = bool(np.isinf(fitted.lam).all())
    return dataclasses.replace(
        scores,
        values=np.ascontiguousarray(fitted.weights.T, np.float32),
        method=f"hybrid of {scores.method}",
        scale="weights of a datamodel with these scores as prior",
        exact=False,
        approximate=scores.approximate,
        chosen=f"{'the prior alone' if alone else 'a datamodel'}, by {len(half.masks)} subsets of "
        f"{half.name}",
        chosen_on=tuple(dict.fromkeys((*scores.chosen_on, *subset_digests(half.masks)))),
        confidence=None,
        per_layer=None,
        plan=None,
    )


def _fewer_folds(models: int) -> int:
    """Return the number of folds with three models each."""
    if models < 2 * _LEAST_IN_A_FOLD:
        raise EvaluationError(
            "there are too few subsets to fit a hybrid",
            code="evaluate.few_subsets",
            found=f"{models} in the choosing half",
            expected=f"at least {2 * _LEAST_IN_A_FOLD}",
            fix="Add subsets with gk.evaluate.ground_truth(..., subsets=...).",
        )
    return models // _LEAST_IN_A_FOLD


@checked(EvaluationError)
def datamodel_scores(truth: GroundTruth, **options: Any) -> Scores:
    """Return the weights of datamodels of the choosing half as scores `[T, N]`.

    Args:
        truth: The ground truth.
        options: Options of `gk.datamodels.fit`.

    Returns:
        The scores.
    """
    half = truth.choosing
    fitted = fit(half.masks, half.outputs, **options)
    return Scores(
        np.ascontiguousarray(fitted.weights.T, np.float32),
        np.arange(truth.num_queries),
        np.arange(truth.num_rows),
        method="datamodel",
        scale="change of the output with the row",
        exact=False,
        chosen=f"fitted to {len(half.masks)} subsets of {half.name}",
        chosen_on=subset_digests(half.masks),
    )


_NEEDS_A_MODEL = ("influence", "arnoldi")
"""Methods that use the curvature of a model by default; from a store, they use the Fisher matrix."""
_BASELINES = ("random", "label-match", "similarity", "knn-shapley", "loss")
_HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, eq=False)
class JudgedMethod:
    """Evaluation and cost of a method.

    Attributes:
        name: Name of the method.
        evaluation: Its LDS.
        cpu_seconds: CPU time of computing the scores from captures.
        bytes_per_row: Stored bytes per training row over all checkpoints, for methods that read gradients.
        scores: Its scores.
    """

    name: str
    evaluation: Evaluation
    cpu_seconds: float
    bytes_per_row: float | None
    scores: Scores


@dataclass(frozen=True, slots=True)
class RefusedMethod:
    """A method that could not be evaluated, with the reason `refused`."""

    name: str
    refused: str
    cpu_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Methods by their LDS, the best first, and the lead of the best.

    Attributes:
        truth: The ground truth.
        methods: Evaluated methods, the best first.
        refused: Methods that could not be evaluated.
    """

    truth: GroundTruth
    methods: tuple[JudgedMethod, ...]
    refused: tuple[RefusedMethod, ...]

    @property
    def best(self) -> JudgedMethod:
        """Method with the largest LDS."""
        return self.methods[0]

    def against_best(self, name: str) -> Difference:
        """Compare the best method with another, query by query and subset by subset."""
        (other,) = [one for one in self.methods if one.name == name]
        return compare(self.best.evaluation, other.evaluation)

    def __str__(self) -> str:
        ceiling = self.truth.estimate_ceiling()
        half = self.truth.reporting
        head = f"LDS on {half.name}: {len(half.masks)} subsets x {self.truth.seeds} seeds"
        lines = [head + ("" if ceiling is None else f", ceiling {ceiling}")]
        lines.append(
            f"{'method':28}{'LDS':>24}{'of ceiling':>12}{'CPU s':>9}{'bytes/row':>12}"
            "   lead of the best"
        )
        for one in self.methods:
            evaluation = one.evaluation
            share = "-" if evaluation.share is None else f"{evaluation.share:.0%}"
            size = "-" if one.bytes_per_row is None else f"{one.bytes_per_row:.0f}"
            cell = f"{evaluation.value:.3f} {format_interval(evaluation.interval)}"
            line = f"{one.name:28}{cell:>24}{share:>12}{one.cpu_seconds:>9.2f}{size:>12}"
            if one is not self.best:
                difference = self.against_best(one.name)
                line += f"   {difference.value:+.3f} {format_interval(difference.interval, '+.3f')}"
            lines.append(line)
        lines += [f"{one.name:28} not evaluated: {one.refused}" for one in self.refused]
        return "\n".join(lines)


@checked(EvaluationError)
def judge_methods(
    store: Store | str | os.PathLike[str],
    truth: GroundTruth | str | None = None,
    *,
    methods: Sequence[str] | None = None,
    extra_scores: Mapping[str, Scores] | None = None,
    checkpoints: str | Sequence[str] | None = None,
    run: str | Sequence[str] = "main",
    name: str = "main",
    queries: str = "test",
    train: str = "train",
    ids: Any = None,
    level: Level = 0.95,
    hybrid_of_best: bool = True,
    report: Callable[[JudgedMethod | RefusedMethod], None] | None = None,
) -> Judgement:
    """Compute the LDS of every method that the captures of a store support, baselines included.

    All values are of the reporting half. Cost: that of every method, and of the hybrid's fit.

    Args:
        store: The store, or its path.
        truth: The ground truth, or its name; the only one of the store by default.
        methods: Names of methods; all by default.
        extra_scores: Scores from elsewhere by name, such as text similarity or another library.
        checkpoints: Names of checkpoints; all by default.
        run: Name of the run, or of several.
        name: Name of the captures.
        queries: Split of the queries.
        train: Split of the training rows.
        ids: Ids of the queries; all by default.
        level: Level of the intervals.
        hybrid_of_best: Also fit a hybrid of the method that predicts the choosing half best.
        report: Called with each method when it is evaluated.

    Returns:
        The methods, the best first.

    Raises:
        EvaluationError: No method could be evaluated.
    """
    opened = open_store(store, create=False)
    ground_truth = truth if isinstance(truth, GroundTruth) else load_truth(opened, truth)
    about_queries = [one.name for one in all_methods() if one.about_queries]
    method_names = about_queries if methods is None else list(methods)
    where = {"queries": queries, "train": train, "run": run, "name": name, "ids": ids}
    done: list[JudgedMethod | RefusedMethod] = []
    for method in method_names:
        began = time.process_time()
        try:
            scores = score_method(opened, method, checkpoints=checkpoints, **where)
            took = time.process_time() - began
            size = None if method in _BASELINES else _bytes_per_row(opened, scores, train, name)
            evaluation = lds(scores, ground_truth, level=level)
            done.append(JudgedMethod(method, evaluation, took, size, scores))
        except GradkeepError as error:
            done.append(
                RefusedMethod(method, str(error).splitlines()[0], time.process_time() - began)
            )
        if report is not None:
            report(done[-1])
    for label, scores in (extra_scores or {}).items():
        evaluation = lds(scores, ground_truth, level=level)
        done.append(JudgedMethod(label, evaluation, 0.0, None, scores))
        if report is not None:
            report(done[-1])
    judged = [one for one in done if isinstance(one, JudgedMethod)]
    refused = [one for one in done if isinstance(one, RefusedMethod)]
    if not judged:
        raise EvaluationError(
            "no method could be evaluated",
            code="evaluate.no_methods",
            found=refused[0].refused if refused else "no method",
        )
    if hybrid_of_best:
        joined = _hybrid_of_best(judged, ground_truth, level)
        if isinstance(joined, JudgedMethod):
            judged.append(joined)
        else:
            refused.append(joined)
        if report is not None:
            report(joined)
    judged.sort(key=lambda one: one.evaluation.value, reverse=True)
    return Judgement(ground_truth, tuple(judged), tuple(refused))


def score_method(
    store: Store, method: str, *, checkpoints: str | Sequence[str] | None, **where: Any
) -> Scores:
    """Compute the scores of a method from a store alone; at one checkpoint if it needs one."""
    known = {one.name: one for one in all_methods()}
    options: dict[str, Any] = {"curvature": "fisher"} if method in _NEEDS_A_MODEL else {}
    single = method in known and known[method].over == "one"
    if single and checkpoints is not None and not isinstance(checkpoints, str):
        checkpoints = list(checkpoints)[-1] if len(checkpoints) else None
    return attribute(store, method=method, checkpoints=checkpoints, **where, **options)


def _hybrid_of_best(
    judged: list[JudgedMethod], truth: GroundTruth, level: float
) -> JudgedMethod | RefusedMethod:
    """Fit a hybrid of the method that is best on the choosing half."""

    def fits(one: JudgedMethod) -> float:
        if one.scores.chosen_on:
            return -1.0  # it was tuned on that half
        return lds(one.scores, truth, part="choosing").value

    best = max(judged, key=fits)
    name, began = f"{_HYBRID} of {best.name}", time.process_time()
    try:
        combined = hybrid(best.scores, truth)
    except GradkeepError as error:
        return RefusedMethod(name, str(error).splitlines()[0], 0.0)
    took = best.cpu_seconds + time.process_time() - began
    evaluation = lds(combined, truth, level=level)
    return JudgedMethod(name, evaluation, took, best.bytes_per_row, combined)


def _bytes_per_row(store: Store, scores: Scores, train: str, name: str) -> float | None:
    """Return the stored bytes per training row over all checkpoints."""
    total = 0.0
    for place in scores.checkpoints:
        run, _, checkpoint = place.rpartition("/")
        key = CaptureKey(checkpoint, train, run or "main", name)
        if not store.has(key):
            return None
        block = store.read(key)
        total += block.manifest.bytes / max(1, len(block)) if len(block) else 0.0
    return total or None
