"""Acts on rows, checked by retraining: without them, or with them alone, beside random rows."""

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
    """How much better queries are answered after training without some rows than without random ones.

    Negative where the rows had helped. `rows` are ids of the `scores`, or places; `queries` the same;
    by default all. `train="with only"` trains on these rows alone, and on as many random ones.
    Cost: 6 x seeds trainings, kept in the store.
    """
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
    check_bounds(level, resamples)
    where = store_of(scores, store)
    named = _places(rows, None if scores is None else scores.train_ids, recipe.num_rows, "rows")
    count = recipe.num_queries
    own = None if scores is None else scores.query_ids
    asked = np.arange(count) if own is None else places_among(own, count)
    if queries is not None:
        asked = asked[_places(queries, own, count, "queries")]
    outputs = _with_controls(named, recipe, where, seeds, train, options)[:, :, asked]
    gain = (outputs[0] - outputs[1:].mean(axis=0)).T
    universe = digest_of("verified", train, asked, outputs[1:], level, resamples)
    sampler = QueriesAndSeeds(len(asked), seeds, resamples, universe, level)
    return Evaluation.from_draws(
        "gain over random rows",
        f"training {train} {len(named)} rows",
        float(gain.mean()),
        sampler.draws(gain),
        gain.mean(axis=1),
        asked,
        sizes=SampleSizes(queries=len(asked), seeds=seeds, rows=len(named)),
        truth=f"{_CONTROLS} random sets of as many rows",
        universe=universe,
        level=level,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRemoval:
    """What scores said that leaving rows out would do, and what it did."""

    rows: AnyArray
    agreement: Evaluation
    """The rank correlation over queries of predicted and measured changes."""
    change: Evaluation
    """The change of the queries' outputs beyond that of random rows."""

    @property
    def held(self) -> bool:
        """Whether the queries that were said to lose most did, beyond chance."""
        return self.agreement.interval[0] > 0

    def __str__(self) -> str:
        said = "held" if self.held else "did not hold"
        return f"the prediction {said}\n  {self.agreement}\n  {self.change}"


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
    """Retrain without some rows (ids), and see whether the queries change as the scores predict.

    Predicted is minus the sum of the rows' scores, which is right up to scale: ranks over queries are
    compared. The ceiling is how far other seeds agree. Cost: 6 x seeds trainings, kept in the store.
    """
    _arguments.count("seeds", seeds, error=EvaluationError, least=1)
    check_bounds(level, resamples)
    where = store_of(scores, store)
    named = _places(rows, scores.train_ids, recipe.num_rows, "rows")
    if len(scores.query_ids) < _LEAST_QUERIES:
        raise EvaluationError(
            "too few queries to rank", found=len(scores.query_ids), expected=f"{_LEAST_QUERIES}"
        )
    asked = places_among(scores.query_ids, recipe.num_queries)
    outputs = _with_controls(named, recipe, where, seeds, "without", options)[:, :, asked]
    measured = (outputs[0] - outputs[1:].mean(axis=0)).mean(axis=0)
    predicted = -np.asarray(scores.values, np.float64)[:, named].sum(axis=1)
    universe = digest_of("check-removal", named, outputs, level, resamples)
    correlation = rank_correlations(
        predicted[:, None], measured[:, None], resamples=resamples, universe=universe
    )
    change = verify_rows(
        scores.train_ids[named],
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
        sizes=SampleSizes(queries=len(predicted), seeds=seeds, rows=len(named)),
        truth=f"models trained without {len(named)} rows",
        universe=universe,
        level=level,
    )
    return CheckedRemoval(scores.train_ids[named], agreement, change)


def _with_controls(
    named: AnyArray, recipe: Recipe, store: Store, seeds: int, train: str, options: dict[str, Any]
) -> AnyArray:
    """Outputs `[1 + controls, seeds, T]`: of the rows named, then of random sets of as many."""
    total = recipe.num_rows
    rng = np.random.default_rng(len(named))
    sets = [named, *(rng.permutation(total)[: len(named)] for _ in range(_CONTROLS))]
    return retrained(recipe, store, sets, seeds, options, train=train)


def _places(given: Any, ids: AnyArray | None, total: int, what: str) -> AnyArray:
    numbers = np.unique(_arguments.whole_numbers(what, given, error=EvaluationError))
    known = np.arange(total) if ids is None else ids
    unknown = np.setdiff1d(numbers, known)
    if len(unknown) or not 0 < len(numbers) < max(2, len(known) + (what == "queries")):
        raise EvaluationError(
            f"{what} must be some of those that there are",
            found=f"ids {unknown[:5].tolist()} that are not" if len(unknown) else f"{len(numbers)}",
            expected=f"some of {len(known)}",
        )
    return np.flatnonzero(np.isin(known, numbers))
