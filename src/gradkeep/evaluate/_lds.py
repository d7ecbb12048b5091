"""The linear datamodeling score: do sums of scores predict what retraining on subsets does?"""

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
    """The linear datamodeling score of scores `[Q, N]`, with an interval over queries and subsets.

        LDS = mean over queries of Spearman(sum of scores over a subset, what its models said)

    Queries are those of the truth with the ids of the scores (or all, in their order). Scores that were
    chosen by subsets of this part are refused. Cost: resamples x subsets x queries.

    >>> from gradkeep.attribution._scores import Scores
    >>> from gradkeep.evaluate._truth import GroundTruth
    >>> rng = np.random.default_rng(0)
    >>> masks, weights = rng.random((40, 30)) < 0.5, rng.standard_normal((5, 30)).astype("f4")
    >>> said = (masks @ weights.T)[:, None] + 0.1 * rng.standard_normal((40, 2, 5))
    >>> found = lds(Scores(weights, np.arange(5), np.arange(30)), GroundTruth("planted", masks, said))
    >>> found.value > 0.95, found.sizes.subsets, found.interval[0] > 0.9
    (True, 20, True)
    """
    check_bounds(level, resamples)
    truth.refuse_chosen(scores.chosen_on, part)
    places = fitting_queries(scores, truth)
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


def fitting_queries(scores: Scores, truth: GroundTruth) -> AnyArray:
    """The places `[Q]` of the scores' queries among those of the truth; rows must be the same."""
    if len(scores.train_ids) != truth.num_rows:
        raise EvaluationError(
            f"the subsets of {truth.name!r} are of other rows than the scores",
            found=f"masks of {truth.num_rows} rows, scores of {len(scores.train_ids)}",
            fix="capture the rows of the recipe in their order, all of them",
        )
    if not np.isfinite(scores.values).all():
        missing = int((~np.isfinite(np.asarray(scores.values)).all(axis=0)).sum())
        raise EvaluationError("some scores are not numbers", found=f"in {missing} rows")
    known = truth.labels if scores.train_labels is not None else None
    if known is not None and labels_digest(scores.train_labels) != known:
        raise EvaluationError(
            f"the ground truth {truth.name!r} was made with other data",
            fix="train a ground truth with the rows as they were captured, under another name",
        )
    places = places_among(scores.query_ids, truth.num_queries)
    train = captured_examples(scores, scores.train, scores.train_ids)
    if train is not None:
        check_order(truth.rows, train, what="training rows")
    asked = captured_examples(scores, scores.queries, scores.query_ids)
    if asked is not None:
        by_place = np.zeros(truth.num_queries, np.uint64)
        by_place[places] = asked
        check_order(truth.asked, by_place, what="queries")
    return places


def places_among(ids: AnyArray, count: int) -> AnyArray:
    """The places `[Q]` of queries among so many that models were asked: their ids, or all in order."""
    if len(ids) and ids.min() >= 0 and ids.max() < count:
        return np.asarray(ids)
    if len(ids) == count:
        return np.arange(count)
    raise EvaluationError(
        "the models were asked other queries",
        found=f"ids {ids[:3].tolist()} ... of {len(ids)} scored queries",
        expected=f"ids that are places, 0 to {count - 1}, or all {count} queries in their order",
    )


def places_of(what: str, ids: Any, known: AnyArray) -> AnyArray:
    """The places of ids among the known ones, in their order; all ids must be known."""
    numbers = _arguments.whole_numbers(what, ids, error=EvaluationError)
    unknown = np.setdiff1d(numbers, known)
    if len(unknown) or not len(numbers):
        raise EvaluationError(
            f"{what} must be ids of scored rows",
            found=f"{unknown[:5].tolist()}, which were not scored" if len(unknown) else "no id",
        )
    order = np.argsort(known, kind="stable")
    return np.asarray(order[np.searchsorted(known, numbers, sorter=order)])


def subject_of(scores: Scores) -> str:
    """What is judged, in a few words."""
    at = ", ".join(scores.checkpoints[:3])
    more = len(scores.checkpoints) - 3
    return scores.method + (f" at {at}" if at else "") + (f" and {more} more" if more > 0 else "")


def provenance_of(scores: Scores) -> str:
    """How scores were made: scale, options, what was approximated and chosen."""
    parts = [scores.scale, scores.options if scores.options != "{}" else ""]
    parts += [f"approximate: {scores.approximate}" if scores.approximate else ""]
    parts += [f"chosen: {scores.chosen}" if scores.chosen else ""]
    return "; ".join(filter(None, parts))
