"""The linear datamodeling score: how well sums of scores predict the outcomes of retraining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import (
    Evaluation,
    SampleSizes,
    check_bounds,
    digest_of,
    rank_correlations,
)
from gradkeep.evaluate._recipe import labels_digest
from gradkeep.evaluate._truth import captured_examples, check_order

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._truth import GroundTruth, TruthPart

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def lds(
    scores: Scores,
    truth: GroundTruth,
    *,
    part: TruthPart = "reporting",
    level: float = 0.95,
    resamples: int = 1000,
) -> Evaluation:
    """Compute the linear datamodeling score, with an interval over queries and subsets.

        LDS = mean over queries of Spearman(sum of scores over a subset, output of its models)

    The queries of the truth are matched by the ids of the scores (or all, in order). Cost: resamples x subsets
    x queries.

    Args:
        scores: Scores `[Q, N]`.
        truth: The ground truth.
        part: Subsets to use: `reporting`, `choosing` or `all`.
        level: Level of the interval.
        resamples: Bootstrap resamples.

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
    check_bounds(level, resamples)
    truth.require_not_tuned(scores.chosen_on, part)
    places = match_queries(scores, truth)
    half = truth.part(part)
    actual = half.outputs[:, places]
    predicted = half.masks.astype(np.float64) @ np.asarray(scores.values, np.float64).T
    universe = digest_of("lds", truth.digest(part, places), level, resamples)
    correlation = rank_correlations(predicted, actual, resamples=resamples, universe=universe)
    defined = int(np.isfinite(correlation.items).sum())
    return correlation.evaluation(
        "lds",
        subject_of(scores),
        scores.query_ids,
        sizes=SampleSizes(queries=defined, subsets=len(actual), seeds=truth.seeds),
        truth=half.name,
        universe=universe,
        level=level,
        ceiling=truth.ceiling(part, places),
        spread_by_subsets=correlation.by_subsets,
        spread_by_queries=correlation.by_queries,
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
