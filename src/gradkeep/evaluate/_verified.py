"""Verify effects of rows by retraining without them, or with them only, against random rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
from gradkeep.evaluate._lds import places_among, subject_of
from gradkeep.evaluate._removal import QueriesAndSeeds, retrained, store_of

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]

_CONTROLS = 5
"""Random sets of the same size."""
_LEAST_QUERIES = 5


@checked(EvaluationError)
def verify_rows(
    rows: Any,
    recipe: Recipe,
    *,
    store: Store | None = None,
    scores: Scores | None = None,
    queries: Any = None,
    train: Literal["without", "with only"] = "without",
    seeds: int = 3,
    level: float = 0.95,
    resamples: int = 1000,
    **options: Any,
) -> Evaluation:
    """Measure how training without some rows changes the queries' outputs, compared with random rows.

    Negative if the rows had helped. Cost: 6 x seeds trainings, saved in the store.

    Args:
        rows: Ids of the `scores`, or positions.
        recipe: How models are trained.
        store: Where trainings are saved; by default the store of the scores.
        scores: Scores that define the ids of rows and queries.
        queries: Ids of the `scores`, or positions; all by default.
        train: `without` the rows, or `with only` them.
        seeds: Trainings per set of rows.
        level: Level of the interval.
        resamples: Bootstrap resamples.
        options: Options of `gk.farm.run`.

    Returns:
        The mean gain over random rows, with an interval.

    Raises:
        EvaluationError: Rows or queries are unknown, or there is no store.
    """
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
    check_bounds(level, resamples)
    where = store_of(scores, store)
    row_positions = _places(
        rows, None if scores is None else scores.train_ids, recipe.num_rows, "rows"
    )
    count = recipe.num_queries
    own = None if scores is None else scores.query_ids
    query_positions = np.arange(count) if own is None else places_among(own, count)
    if queries is not None:
        query_positions = query_positions[_places(queries, own, count, "queries")]
    outputs = _with_controls(row_positions, recipe, where, seeds, train, options)[
        :, :, query_positions
    ]
    gain = (outputs[0] - outputs[1:].mean(axis=0)).T
    universe = digest_of("verified", train, query_positions, outputs[1:], level, resamples)
    sampler = QueriesAndSeeds(len(query_positions), seeds, resamples, universe, level)
    return Evaluation.from_draws(
        "gain over random rows",
        f"training {train} {len(row_positions)} rows",
        float(gain.mean()),
        sampler.draws(gain),
        gain.mean(axis=1),
        query_positions,
        sizes=SampleSizes(queries=len(query_positions), seeds=seeds, rows=len(row_positions)),
        truth=f"{_CONTROLS} random sets of as many rows",
        universe=universe,
        level=level,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRemoval:
    """Predicted and measured effect of removing rows.

    Attributes:
        rows: Ids of the rows.
        agreement: Rank correlation over queries of predicted and measured changes.
        change: Change of the queries' outputs beyond that of random rows.
    """

    rows: AnyArray
    agreement: Evaluation
    change: Evaluation

    @property
    def held(self) -> bool:
        """True if predicted and measured changes agree beyond chance."""
        return self.agreement.interval[0] > 0

    def __str__(self) -> str:
        verdict = "held" if self.held else "did not hold"
        return f"the prediction {verdict}\n  {self.agreement}\n  {self.change}"


@checked(EvaluationError)
def check_removal(
    scores: Scores,
    rows: Any,
    recipe: Recipe,
    *,
    store: Store | None = None,
    seeds: int = 5,
    level: float = 0.95,
    resamples: int = 1000,
    **options: Any,
) -> CheckedRemoval:
    """Retrain without some rows, and test if the queries change as the scores predict.

    The prediction is minus the sum of the rows' scores, up to scale: ranks over queries are compared. Cost: 6 x
    seeds trainings, saved in the store.

    Args:
        scores: Scores `[Q, N]`.
        rows: Ids of the rows.
        recipe: How models are trained.
        store: Where trainings are saved; by default the store of the scores.
        seeds: Trainings per set of rows.
        level: Level of the interval.
        resamples: Bootstrap resamples.
        options: Options of `gk.farm.run`.

    Returns:
        Agreement of the predicted and measured changes, and the change.

    Raises:
        EvaluationError: Rows are unknown, or there are too few queries.
    """
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
    check_bounds(level, resamples)
    where = store_of(scores, store)
    row_positions = _places(rows, scores.train_ids, recipe.num_rows, "rows")
    if len(scores.query_ids) < _LEAST_QUERIES:
        raise EvaluationError(
            "there are too few queries to rank",
            code="evaluate.few_queries",
            found=len(scores.query_ids),
            expected=f"at least {_LEAST_QUERIES}",
        )
    query_positions = places_among(scores.query_ids, recipe.num_queries)
    outputs = _with_controls(row_positions, recipe, where, seeds, "without", options)[
        :, :, query_positions
    ]
    measured = (outputs[0] - outputs[1:].mean(axis=0)).mean(axis=0)
    predicted = -np.asarray(scores.values, np.float64)[:, row_positions].sum(axis=1)
    universe = digest_of("check-removal", row_positions, outputs, level, resamples)
    correlation = rank_correlations(
        predicted[:, None], measured[:, None], resamples=resamples, universe=universe
    )
    change = verify_rows(
        scores.train_ids[row_positions],
        recipe,
        store=where,
        scores=scores,
        seeds=seeds,
        level=level,
        resamples=resamples,
        **options,
    )
    agreement = correlation.evaluation(
        "predicted and measured change",
        subject_of(scores),
        np.zeros(1, np.int64),
        sizes=SampleSizes(queries=len(predicted), seeds=seeds, rows=len(row_positions)),
        truth=f"models trained without {len(row_positions)} rows",
        universe=universe,
        level=level,
    )
    return CheckedRemoval(scores.train_ids[row_positions], agreement, change)


def _with_controls(
    row_positions: AnyArray,
    recipe: Recipe,
    store: Store,
    seeds: int,
    train: str,
    options: dict[str, Any],
) -> AnyArray:
    """Return outputs `[1 + controls, seeds, T]` of the rows, then of random sets of the same size."""
    total = recipe.num_rows
    rng = np.random.default_rng(len(row_positions))
    sets = [
        row_positions,
        *(rng.permutation(total)[: len(row_positions)] for _ in range(_CONTROLS)),
    ]
    return retrained(recipe, store, sets, seeds, options, train=train)


def _places(numbers_or_ids: Any, ids: AnyArray | None, total: int, what: str) -> AnyArray:
    numbers = np.unique(_arguments.whole_numbers(what, numbers_or_ids, error=EvaluationError))
    known = np.arange(total) if ids is None else ids
    unknown = np.setdiff1d(numbers, known)
    if len(unknown) or not 0 < len(numbers) < max(2, len(known) + (what == "queries")):
        raise EvaluationError(
            f"{what} must be known, and not none or all of them",
            code=f"evaluate.invalid_{what}",
            found=f"unknown ids {unknown[:5].tolist()}" if len(unknown) else f"{len(numbers)}",
            expected=f"some of {len(known)}",
        )
    return np.flatnonzero(np.isin(known, numbers))
