"""Agreement of scores: between runs and seeds, and with classes that should be retrieved."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import NonNegativeInt, PositiveInt, checked
from gradkeep._ranks import rank_correlation
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import Difference, Evaluation, SampleSizes, compare, evaluated
from gradkeep.evaluate._intervals import Level, digest_of
from gradkeep.evaluate._lds import lds, provenance_of, subject_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._truth import GroundTruth

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def agreement(
    first: Scores, second: Scores, *, k: PositiveInt = 10, level: Level = 0.95
) -> Evaluation:
    """Compute the mean over queries of the rank correlation of two scores of the same rows.

    The provenance contains the mean share of their `k` most helpful rows that both have. Cost: Q x N log N.

    Args:
        first: Scores `[Q, N]`.
        second: Scores `[Q, N]`.
        k: Number of most helpful rows to compare.
        level: Level of the interval.

    Returns:
        The mean rank correlation, with an interval over queries.

    Raises:
        EvaluationError: The scores have different queries or rows.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> values = np.random.default_rng(0).standard_normal((6, 40)).astype("f4")
        >>> one = Scores(values, np.arange(6), np.arange(40))
        >>> agreement(one, one).value
        1.0
    """
    return _agree([first, second], "agreement", k, level)


@checked(EvaluationError)
def stability(scores: Sequence[Scores], *, k: PositiveInt = 10, level: Level = 0.95) -> Evaluation:
    """Compute the agreement of scores of models that differ in their seeds: the mean over all pairs.

    Args:
        scores: Two or more scores `[Q, N]`.
        k: Number of most helpful rows to compare.
        level: Level of the interval.

    Returns:
        The mean rank correlation, with an interval over queries.

    Raises:
        EvaluationError: There are fewer than two scores, or they have different queries or rows.
    """
    if len(scores) < 2:
        raise EvaluationError(
            "stability needs the scores of at least two seeds",
            code="evaluate.few_seeds",
            found=len(scores),
        )
    return _agree(list(scores), "stability", k, level)


@dataclass(frozen=True, slots=True, eq=False)
class SanityCheck:
    """Comparison of scores with shuffled scores and with scores of a random model.

    Attributes:
        trained: LDS of the scores.
        shuffled: LDS of the scores with every query's rows permuted: zero unless something leaks.
        randomized: LDS of the same method with a model of random weights.
        gain: Difference of `trained` and `randomized`.
    """

    trained: Evaluation
    shuffled: Evaluation
    randomized: Evaluation | None
    gain: Difference | None

    @property
    def passed(self) -> bool:
        """True if shuffled scores predict nothing, the scores something, and training adds to it."""
        learnt = self.gain is None or self.gain.above_zero
        return not self.shuffled.from_zero and self.trained.above_zero and learnt

    def __str__(self) -> str:
        parts = (self.trained, self.shuffled, self.randomized, self.gain)
        lines = [str(part) for part in parts if part is not None]
        return "\n  ".join([f"sanity {'passed' if self.passed else 'FAILED'}", *lines])


@checked(EvaluationError)
def sanity_check(
    scores: Scores,
    truth: GroundTruth,
    *,
    randomized: Scores | None = None,
    level: Level = 0.95,
    seed: NonNegativeInt = 0,
) -> SanityCheck:
    """Compare scores with themselves shuffled, and with those of a random model.

    A random network still reflects which inputs are similar, and similar inputs mostly help each other, so its
    score is rarely zero. The difference to the trained model comes from learning.

    Args:
        scores: Scores `[Q, N]`.
        truth: The ground truth.
        randomized: Scores of the same method for a model with random weights.
        level: Level of the intervals.
        seed: Seed of the permutations.

    Returns:
        The evaluations and their difference.
    """
    rng = np.random.default_rng(seed)
    values = rng.permuted(np.asarray(scores.values), axis=1)
    mixed = dataclasses.replace(scores, values=values, method=f"shuffled {scores.method}")
    trained = lds(scores, truth, level=level)
    twin = None if randomized is None else lds(randomized, truth, level=level)
    return SanityCheck(
        trained,
        lds(mixed, truth, level=level),
        twin,
        None if twin is None else compare(trained, twin),
    )


def randomize(model: torch.nn.Module, *, seed: int = 0) -> torch.nn.Module:
    """Return a copy of a model with random weights: modules are reset, other parameters permuted.

    >>> import torch
    >>> net = torch.nn.Linear(3, 2)
    >>> bool((randomize(net, seed=1).weight != net.weight).any())
    True
    """
    import torch

    _arguments.count("seed", seed, error=EvaluationError)
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        reset_ids: set[int] = set()
        for module in twin.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
                reset_ids |= {id(parameter) for parameter in module.parameters(recurse=False)}
        for parameter in twin.parameters():
            if id(parameter) not in reset_ids:
                parameter.copy_(
                    parameter.flatten()[torch.randperm(parameter.numel())].reshape(parameter.shape)
                )
    return twin


def _agree(scores: list[Scores], metric: str, k: int, level: float) -> Evaluation:
    first = scores[0]
    for other in scores[1:]:
        for part in ("query_ids", "train_ids"):
            if not np.array_equal(getattr(first, part), getattr(other, part)):
                raise EvaluationError(
                    f"scores of different {part.replace('_', ' ')} cannot be compared",
                    code="evaluate.different_ids",
                    found=f"{len(getattr(first, part))} and {len(getattr(other, part))}",
                    fix="Use the same queries and training rows.",
                )
    k = min(k, len(first.train_ids))
    items, shared = np.empty(len(first.query_ids)), np.empty(len(first.query_ids))
    for query in range(len(items)):
        rows = [np.asarray(one.values[query]) for one in scores]
        best = [set(np.argpartition(-row, k - 1)[:k].tolist()) for row in rows]
        pairs = list(combinations(range(len(rows)), 2))
        items[query] = np.mean([rank_correlation(rows[a], rows[b]) for a, b in pairs])
        shared[query] = np.mean([len(best[a] & best[b]) / k for a, b in pairs])
    names = list(dict.fromkeys(subject_of(one) for one in scores))
    return evaluated(
        metric,
        " and ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        items,
        universe=digest_of(metric, first.query_ids, first.train_ids, level),
        truth="each other",
        item_ids=first.query_ids,
        level=level,
        sizes=SampleSizes(queries=len(items), rows=len(first.train_ids)),
        provenance=f"{shared.mean():.1%} of the {k} most helpful rows in common",
    )


@checked(EvaluationError)
def leakage(scores: Scores, copies: Any, *, k: PositiveInt = 1, level: Level = 0.95) -> Evaluation:
    """Compute the share of queries whose copy among the training rows is one of the `k` most helpful; Q x N.

    Args:
        scores: Scores `[Q, N]`.
        copies: Training id of each query's copy `[Q]`, -1 for none.
        k: Number of most helpful rows.
        level: Level of the interval.

    Returns:
        The share, with an interval over queries.

    Raises:
        EvaluationError: `copies` has the wrong length or unknown ids.

    Example:
        >>> from gradkeep.attribution._scores import Scores
        >>> scores = Scores(np.eye(4, 9, dtype=np.float32), np.arange(4), np.arange(9))
        >>> leakage(scores, [0, 1, 2, 8]).value
        0.75
    """
    copy_ids = _arguments.whole_numbers(
        "copies",
        copies,
        error=EvaluationError,
        least=-1,
        length=len(scores.query_ids),
        code="evaluate.wrong_copies",
    )
    with_copy = np.flatnonzero(copy_ids >= 0)
    unknown = np.setdiff1d(copy_ids[with_copy], scores.train_ids)
    if not len(with_copy) or len(unknown):
        raise EvaluationError(
            "copies must be ids of scored rows",
            code="evaluate.unknown_copies",
            found=f"unknown ids {unknown[:5].tolist()}" if len(unknown) else "no copy",
        )
    columns = {int(number): at for at, number in enumerate(scores.train_ids)}
    items = np.full(len(copy_ids), np.nan)
    for query in with_copy:
        row = np.asarray(scores.values[query])
        # Ties count against the copy, so that constant scores find nothing.
        items[query] = (row >= row[columns[int(copy_ids[query])]]).sum() <= k
    return evaluated(
        f"leakage recall at {k}",
        subject_of(scores),
        items,
        universe=digest_of("leakage", scores.query_ids, copy_ids, k, level),
        truth=f"{len(with_copy)} planted copies",
        share=True,
        item_ids=scores.query_ids,
        level=level,
        sizes=SampleSizes(queries=len(with_copy), rows=len(scores.train_ids)),
        provenance=provenance_of(scores),
        captures=scores.captures,
    )


@checked(EvaluationError)
def class_retrieval(
    scores: Scores,
    query_classes: Any = None,
    train_classes: Any = None,
    *,
    k: PositiveInt = 10,
    level: Level = 0.95,
) -> Evaluation:
    """Compute the share of the `k` most helpful rows of a query that have its class.

    This measures plausibility, not the effect of retraining (`lds`). The provenance contains the share
    expected by chance. Cost: Q x N.

    Args:
        scores: Scores `[Q, N]`.
        query_classes: Classes of the queries `[Q]`; the captured labels by default.
        train_classes: Classes of the training rows `[N]`; the captured labels by default.
        k: Number of most helpful rows.
        level: Level of the interval.

    Returns:
        The share, with an interval over queries.

    Raises:
        EvaluationError: There are no classes.
    """
    query_labels = _classes("query", query_classes, scores.query_labels, len(scores.query_ids))
    train_labels = _classes("train", train_classes, scores.train_labels, len(scores.train_ids))
    k = min(k, len(train_labels))
    items, chance = np.empty(len(query_labels)), np.empty(len(query_labels))
    for query, own in enumerate(query_labels):
        row = np.asarray(scores.values[query])
        best = np.argpartition(-row, k - 1)[:k]
        items[query] = (train_labels[best] == own).mean()
        chance[query] = (train_labels == own).mean()
    return evaluated(
        f"class retrieval at {k}",
        subject_of(scores),
        items,
        universe=digest_of("retrieval", scores.query_ids, query_labels.astype(str), k, level),
        truth=f"{len(np.unique(train_labels))} classes",
        item_ids=scores.query_ids,
        level=level,
        sizes=SampleSizes(queries=len(query_labels), rows=len(train_labels)),
        provenance=f"chance {chance.mean():.3f}; {provenance_of(scores)}",
        captures=scores.captures,
    )


def _classes(side: str, passed: Any, captured: Any, count: int) -> AnyArray:
    values = captured if passed is None else passed
    if values is None:
        raise EvaluationError(
            f"the classes of the {side} rows are unknown",
            code="evaluate.no_classes",
            fix=f"Pass {side}_classes=, or capture with labels.",
        )
    return _arguments.array(
        f"{side}_classes",
        values,
        error=EvaluationError,
        kinds="biufUS",
        expected="numbers or words",
        shape=(count,),
        code="evaluate.wrong_classes",
    )
