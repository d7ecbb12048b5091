"""Measure the effect of retraining without the highest-scored rows, against random rows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import Limits, PositiveInt, checked
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import (
    Curve,
    Evaluation,
    SampleSizes,
    evaluate_correlations,
    evaluate_table,
)
from gradkeep.evaluate._intervals import (
    Level,
    digest_of,
    mean_interval,
    rank_correlations,
    spread_of,
)
from gradkeep.evaluate._lds import places_among, places_of, provenance_of, subject_of
from gradkeep.evaluate._truth import ceiling_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._recipe import Recipe
    from gradkeep.store import Store

    AnyArray = np.ndarray[Any, np.dtype[Any]]


_RANDOM_SETS = 5
"""Random sets of each size, shared by all queries."""


@dataclass(frozen=True, slots=True, eq=False)
class RemovalCurve:
    """Outputs of queries after training without their highest-scored rows, or with them only.

    Attributes:
        change: Change of the output beyond that of random rows, mean over sizes; its curve has all lines.
        flipped: Share of correctly answered queries that become wrong at the largest size.
    """

    change: Evaluation
    flipped: Evaluation | None

    def __str__(self) -> str:
        parts = [str(self.change), str(self.change.curve)]
        if self.flipped is not None:
            parts += [str(self.flipped), str(self.flipped.curve)]
        return "\n".join(parts)


@checked(EvaluationError)
def removal_curve(
    scores: Scores,
    recipe: Recipe,
    *,
    store: Store | None = None,
    sizes: Sequence[int] | None = None,
    queries: Any = None,
    against: Sequence[Scores] = (),
    train: Literal["without", "with only"] = "without",
    seeds: Annotated[int, Limits(2)] = 3,
    level: Level = 0.95,
    **options: Any,
) -> RemovalCurve:
    """Retrain without the rows that helped each query most, and measure how much worse it is answered.

    Trainings are saved in the store; a second call trains only missing ones. Cost: (lines x queries + 5) x
    sizes x seeds trainings.

    Args:
        scores: Scores `[Q, N]`.
        recipe: How models are trained.
        store: Where trainings are saved; by default the store of the scores.
        sizes: Numbers of rows; 1, 3 and 10% of them by default.
        queries: Ids of the queries; ten by default.
        against: Scores of baselines, shown next to random rows.
        train: `without` the rows, or `with only` them, to measure how much of the answer they carry.
        seeds: Trainings per set of rows, at least 2; 3 for an interval.
        level: Level of the intervals.
        options: Options of `gk.farm.run`.

    Returns:
        The curve.

    Raises:
        EvaluationError: Scores and recipe have different rows, or there is no store.
    """
    where = store_of(scores, store)
    lines = [scores, *against]
    query_positions = _query_positions(scores, queries)
    total = _check_rows(lines, recipe)
    counts = _sizes(sizes, total)
    rng = np.random.default_rng(0)
    sets: list[AnyArray] = []
    for line in lines:
        for query in query_positions:
            order = np.argsort(-np.asarray(line.values[query]), kind="stable")
            sets += [order[:count] for count in counts]
    for count in counts:
        sets += [rng.permutation(total)[:count] for _ in range(_RANDOM_SETS)]
    columns = places_among(scores.query_ids, recipe.num_queries)[query_positions]
    outputs = retrained(recipe, where, sets, seeds, options, train=train, whole=True)
    outputs = outputs[:, :, columns]
    shape = (len(lines), len(query_positions), len(counts))
    split = int(np.prod(shape))
    named_outputs = outputs[:split].reshape(*shape, seeds, len(query_positions))
    own = np.stack(
        [named_outputs[:, q, :, :, q] for q in range(len(query_positions))], axis=1
    )  # [L, Q, K, S]
    random_sets = outputs[split:-1].reshape(len(counts), _RANDOM_SETS, seeds, len(query_positions))
    random = np.moveaxis(random_sets.mean(axis=1), -1, 0)[None]  # [1, Q, K, S]
    whole = outputs[-1].T[None, :, None, :]  # [1, Q, 1, S]
    every = np.concatenate([own, random])
    drops = whole - every if train == "without" else every
    names = (*(subject_of(line) for line in lines), "random rows")
    universe = digest_of(
        "removal",
        train,
        np.array(counts),
        scores.query_ids[query_positions],
        outputs[-1],
        level,
    )
    sample_sizes = SampleSizes(queries=len(query_positions), seeds=seeds, rows=max(counts))
    metric = "removal" if train == "without" else "retention"
    gains = (drops[0] - drops[-1]).mean(axis=1)
    change = evaluate_table(
        metric,
        subject_of(scores),
        gains,
        level=level,
        controls=random_sets.mean(axis=(0, 3)),
        sizes=sample_sizes,
        truth=f"models trained {train} up to {max(counts)} rows",
        universe=universe,
        item_ids=scores.query_ids[query_positions],
        provenance=provenance_of(scores),
        curve=_curve(np.array(counts), names, drops, level, controls=random_sets.mean(axis=3)),
        captures=scores.captures,
    )
    right = whole[0, :, 0].mean(axis=1) > 0  # positive margins; other outputs have no such sign
    flipped = None
    if recipe.output is None and right.sum() >= 2:
        flipped = _flips(change, (every[:, right] <= 0).astype(np.float64), right)
    return RemovalCurve(change, flipped)


@checked(EvaluationError)
def leave_one_out(
    scores: Scores,
    recipe: Recipe,
    *,
    store: Store | None = None,
    rows: Any = 40,
    seeds: PositiveInt = 5,
    level: Level = 0.95,
    **options: Any,
) -> Evaluation:
    """Compute the rank correlation of the rows' scores with the effects of leaving each of them out.

    One row hardly changes a model, so chance dominates: compare with the ceiling. Cost: (rows + 1) x seeds
    trainings.

    Args:
        scores: Scores `[Q, N]`.
        recipe: How models are trained.
        store: Where trainings are saved; by default the store of the scores.
        rows: Ids, or a number: half of them with the largest scores, half at random.
        seeds: Trainings per row.
        level: Level of the interval.
        options: Options of `gk.farm.run`.

    Returns:
        The correlation with its interval and ceiling.

    Raises:
        EvaluationError: Scores and recipe have different rows, or there are too few.
    """
    where = store_of(scores, store)
    total = _check_rows([scores], recipe)
    if isinstance(rows, int):
        _arguments.count("rows", rows, error=EvaluationError, least=5, most=total)
        strength = np.abs(np.asarray(scores.values, np.float64)).sum(axis=0)
        largest = np.argsort(-strength, kind="stable")[: rows // 2]
        others = np.setdiff1d(np.arange(total), largest)
        drawn = np.random.default_rng(0).permutation(others)[: rows - len(largest)]
        chosen = np.concatenate([largest, drawn])
    else:
        chosen = places_of("rows", rows, scores.train_ids)
    if len(chosen) < 2:
        raise EvaluationError(
            "leave_one_out needs at least two rows", code="evaluate.few_rows", found=len(chosen)
        )
    places = places_among(scores.query_ids, recipe.num_queries)
    outputs = retrained(recipe, where, chosen[:, None], seeds, options, whole=True)
    drops = (outputs[-1] - outputs[:-1])[:, :, places]
    universe = digest_of("loo", chosen, drops, level)
    predicted = np.asarray(scores.values, np.float64)[:, chosen].T
    actual = drops.mean(axis=1)
    correlation = rank_correlations(predicted, actual)
    spread = spread_of(correlation.table)
    ceiling = ceiling_of(drops, level)
    return evaluate_correlations(
        correlation,
        "leave-one-out",
        subject_of(scores),
        item_ids=scores.query_ids,
        sizes=SampleSizes(queries=len(places), seeds=seeds, rows=len(chosen)),
        truth="models trained without each row",
        universe=universe,
        level=level,
        ceiling=ceiling,
        spread_by_queries=None if spread is None else math.sqrt(spread.by_rows),
        provenance=provenance_of(scores),
        captures=scores.captures,
    )


def _curve(
    at: AnyArray,
    names: tuple[str, ...],
    values: AnyArray,
    level: float,
    *,
    controls: AnyArray | None = None,
    share: bool = False,
) -> Curve:
    """Build lines of means of values `[lines, Q, K, S]`; the last line is of `controls` `[K, sets, S]`."""
    ends = np.full((*values.shape[:3:2], 2), np.nan)
    for line, k in np.ndindex(ends.shape[:2]):
        sets = controls[k] if controls is not None and line == len(values) - 1 else None
        interval = mean_interval(values[line, :, k], level, controls=sets, share=share)
        if interval is not None:
            ends[line, k] = interval
    return Curve("rows", at, names, values.mean(axis=(1, 3)), ends[..., 0], ends[..., 1])


def _flips(change: Evaluation, flipped: AnyArray, right: AnyArray) -> Evaluation:
    """Evaluate how many of the `right` queries become wrong, from `flipped` `[lines, Q, K, S]`."""
    assert change.curve is not None
    table = flipped[0, :, -1]
    queries, seeds = table.shape
    rows = change.sizes.rows
    return evaluate_table(
        "brittleness",
        change.subject,
        table,
        level=change.level,
        share=True,
        sizes=SampleSizes(queries=queries, seeds=seeds, rows=rows),
        truth=f"queries answered right, without {rows} rows",
        universe=f"{change.universe} flips",
        item_ids=change.item_ids[right],
        provenance=change.provenance,
        curve=_curve(change.curve.at, change.curve.names, flipped, change.level, share=True),
        captures=change.captures,
    )


def retrained(
    recipe: Recipe,
    store: Store,
    sets: Sequence[AnyArray] | AnyArray,
    seeds: int,
    options: dict[str, Any],
    *,
    train: str = "without",
    whole: bool = False,
) -> AnyArray:
    """Train without each set of rows, or with it only, and with all rows if `whole`; return the outputs.

    Outputs `[K, seeds, T]` are larger for better answers.
    """
    masks = np.full((len(sets) + whole, recipe.num_rows), train == "without" or whole)
    for mask, rows in zip(masks, sets, strict=False):
        mask[:] = train == "without"
        mask[rows] = train == "with only"
    outputs = recipe.retraining(store).retrain(masks, repeats=seeds, **options)
    sign = -1.0 if recipe.is_falling() else 1.0
    return sign * np.asarray(outputs, np.float64)


def store_of(scores: Scores | None, store: Store | None) -> Store:
    """Return the store for trainings: the passed one, or that of the scores."""
    target = store if scores is None else store or scores.store
    if target is None:
        raise EvaluationError(
            "there is no store for the trainings",
            code="evaluate.no_store",
            fix="Pass store=gk.open(...).",
        )
    return target


def _check_rows(lines: Sequence[Scores], recipe: Recipe) -> int:
    for one in lines:
        if len(one.train_ids) != recipe.num_rows:
            raise EvaluationError(
                "the recipe and the scores have different rows",
                code="evaluate.other_rows",
                found=f"{recipe.num_rows} rows of the recipe, {len(one.train_ids)} of {one.method}",
            )
        recipe.check_captured(one)
    return recipe.num_rows


def _sizes(sizes: Sequence[int] | None, total: int) -> list[int]:
    if sizes is None:
        return sorted({max(1, round(share * total)) for share in (0.01, 0.03, 0.1)})
    for count in sizes:
        _arguments.count("sizes", count, error=EvaluationError, least=1, most=total - 1)
    if not len(sizes):
        raise EvaluationError("sizes is empty", code="evaluate.no_sizes")
    return sorted(set(sizes))


def _query_positions(scores: Scores, queries: Any) -> AnyArray:
    """Return the positions of the queries, ten evenly spaced ones by default."""
    if queries is None:
        count = min(10, len(scores.query_ids))
        return np.linspace(0, len(scores.query_ids) - 1, count).round().astype(np.int64)
    return places_of("queries", queries, scores.query_ids)


@checked(EvaluationError)
def verify_rows(
    rows: Any,
    recipe: Recipe,
    *,
    store: Store | None = None,
    scores: Scores | None = None,
    queries: Any = None,
    train: Literal["without", "with only"] = "without",
    seeds: Annotated[int, Limits(2)] = 3,
    level: Level = 0.95,
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
        seeds: Trainings per set of rows, at least 2; 3 for an interval.
        level: Level of the interval.
        options: Options of `gk.farm.run`.

    Returns:
        The mean gain over random rows, with an interval.

    Raises:
        EvaluationError: Rows or queries are unknown, or there is no store.
    """
    where = store_of(scores, store)
    row_positions = _places(
        rows, None if scores is None else scores.train_ids, recipe.num_rows, "rows"
    )
    count = recipe.num_queries
    own = None if scores is None else scores.query_ids
    if scores is not None:
        recipe.check_captured(scores)
    query_positions = np.arange(count) if own is None else places_among(own, count)
    if queries is not None:
        query_positions = query_positions[_places(queries, own, count, "queries")]
    outputs = _with_controls(row_positions, recipe, where, seeds, train, options)
    return _gain(outputs, row_positions, query_positions, train, level)


def _gain(
    outputs: AnyArray,
    row_positions: AnyArray,
    query_positions: AnyArray,
    train: str,
    level: float,
) -> Evaluation:
    """Evaluate the gain over random rows, from outputs `[1 + controls, seeds, T]` of all queries."""
    own = outputs[:, :, query_positions]
    gain = (own[0] - own[1:].mean(axis=0)).T
    queries, seeds = gain.shape
    return evaluate_table(
        "gain over random rows",
        f"training {train} {len(row_positions)} rows",
        gain,
        level=level,
        controls=own[1:].mean(axis=2),
        sizes=SampleSizes(queries=queries, seeds=seeds, rows=len(row_positions)),
        truth=f"{_RANDOM_SETS} random sets of as many rows",
        universe=digest_of("verified", train, query_positions, own[1:], level),
        item_ids=query_positions,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRemoval:
    """Predicted and measured effect of removing rows.

    Attributes:
        rows: Ids of the rows.
        agreement: Rank correlation over queries of predicted and measured changes, with its ceiling.
        change: Change of the queries' outputs beyond that of random rows.
    """

    rows: AnyArray
    agreement: Evaluation
    change: Evaluation

    @property
    def held(self) -> bool:
        """True if predicted and measured changes agree beyond chance."""
        return self.agreement.above_zero

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
    seeds: Annotated[int, Limits(2)] = 5,
    level: Level = 0.95,
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
        seeds: Trainings per set of rows, at least 2; 3 for an interval.
        level: Level of the interval.
        options: Options of `gk.farm.run`.

    Returns:
        Agreement of the predicted and measured changes, and the change.

    Raises:
        EvaluationError: Rows are unknown, or there are too few queries.
    """
    where = store_of(scores, store)
    row_positions = _places(rows, scores.train_ids, recipe.num_rows, "rows")
    if len(scores.query_ids) < 5:
        raise EvaluationError(
            "there are too few queries to rank",
            code="evaluate.few_queries",
            found=len(scores.query_ids),
            expected="at least 5",
        )
    query_positions = places_among(scores.query_ids, recipe.num_queries)
    recipe.check_captured(scores)
    outputs = _with_controls(row_positions, recipe, where, seeds, "without", options)
    change = _gain(outputs, row_positions, query_positions, "without", level)
    predicted = -np.asarray(scores.values, np.float64)[:, row_positions].sum(axis=1)
    own = outputs[:, :, query_positions]
    universe = digest_of("check-removal", row_positions, own, level)
    correlation = rank_correlations(predicted[:, None], change.items[:, None])
    assert change.table is not None
    ceiling = ceiling_of(change.table[:, :, None], level)
    agreement = evaluate_correlations(
        correlation,
        "predicted and measured change",
        subject_of(scores),
        item_ids=np.zeros(1, np.int64),
        sizes=SampleSizes(queries=len(predicted), seeds=seeds, rows=len(row_positions)),
        truth=f"models trained without {len(row_positions)} rows",
        universe=universe,
        level=level,
        ceiling=ceiling,
    )
    if change.interval is None:  # too few seeds
        agreement = dataclasses.replace(agreement, interval=None)
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
    count, rng = len(row_positions), np.random.default_rng(len(row_positions))
    random = [rng.permutation(recipe.num_rows)[:count] for _ in range(_RANDOM_SETS)]
    sets = [row_positions, *random]
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
