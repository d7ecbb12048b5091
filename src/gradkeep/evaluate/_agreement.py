"""Agreement of scores: between runs and seeds, and with classes that should be retrieved."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._arguments import checked
from gradkeep._ranks import rank_correlation
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._evaluation import (
    Difference,
    Evaluation,
    SampleSizes,
    compare,
    digest_of,
    evaluated,
)
from gradkeep.evaluate._lds import lds, provenance_of, subject_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gradkeep.attribution._scores import Scores
    from gradkeep.evaluate._truth import GroundTruth

    AnyArray = np.ndarray[Any, np.dtype[Any]]


@checked(EvaluationError)
def agreement(
    first: Scores, second: Scores, *, k: int = 10, level: float = 0.95, resamples: int = 1000
) -> Evaluation:
    """The mean over queries of the rank correlation of two scores `[Q, N]` of the same rows.

    The provenance has the mean share of their `k` most helpful rows that both name. Cost: Q x N log N.

    >>> from gradkeep.attribution._scores import Scores
    >>> values = np.random.default_rng(0).standard_normal((6, 40)).astype("f4")
    >>> one = Scores(values, np.arange(6), np.arange(40))
    >>> agreement(one, one).value
    1.0
    """
    _arguments.count("k", k, error=EvaluationError, least=1)
    return _agree([first, second], "agreement", k, level, resamples)


@checked(EvaluationError)
def stability(
    scores: Sequence[Scores], *, k: int = 10, level: float = 0.95, resamples: int = 1000
) -> Evaluation:
    """How far the scores of models that differ in their seeds agree: the mean over all pairs of them."""
    _arguments.count("k", k, error=EvaluationError, least=1)
    if len(scores) < 2:
        raise EvaluationError("stability needs scores of two seeds or more", found=len(scores))
    return _agree(list(scores), "stability", k, level, resamples)


@dataclass(frozen=True, slots=True, eq=False)
class SanityCheck:
    """Whether scores come from the rows, and from what the model learnt about them."""

    trained: Evaluation
    """The LDS of the scores."""
    shuffled: Evaluation
    """The LDS of the same scores with every query's rows in another order: zero, or something leaks."""
    randomised: Evaluation | None
    """The LDS of the same method with a model of random weights."""
    gain: Difference | None
    """What training adds to that."""

    @property
    def passed(self) -> bool:
        """Whether shuffled scores predict nothing, the scores something, and training adds to it."""
        learnt = self.gain is None or self.gain.interval[0] > 0
        return not self.shuffled.from_zero and self.trained.interval[0] > 0 and learnt

    def __str__(self) -> str:
        parts = (self.trained, self.shuffled, self.randomised, self.gain)
        lines = [str(part) for part in parts if part is not None]
        return "\n  ".join([f"sanity {'passed' if self.passed else 'FAILED'}", *lines])


@checked(EvaluationError)
def sanity_check(
    scores: Scores,
    truth: GroundTruth,
    *,
    randomised: Scores | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> SanityCheck:
    """Hold scores against themselves shuffled, and against those of a random model (`randomise`).

    A random network still knows which inputs are alike, and inputs that are alike mostly help each
    other: its score is seldom zero. What the trained model's is above it comes from what was learnt.
    """
    _arguments.count("seed", seed, error=EvaluationError)
    rng = np.random.default_rng(seed)
    values = rng.permuted(np.asarray(scores.values), axis=1)
    mixed = dataclasses.replace(scores, values=values, method=f"shuffled {scores.method}")
    trained = lds(scores, truth, level=level)
    twin = None if randomised is None else lds(randomised, truth, level=level)
    return SanityCheck(
        trained,
        lds(mixed, truth, level=level),
        twin,
        None if twin is None else compare(trained, twin),
    )


def randomise(model: torch.nn.Module, *, seed: int = 0) -> torch.nn.Module:
    """A copy of a model with random weights: modules begin anew, other parameters are shuffled.

    >>> import torch
    >>> net = torch.nn.Linear(3, 2)
    >>> bool((randomise(net, seed=1).weight != net.weight).any())
    True
    """
    import torch

    _arguments.count("seed", seed, error=EvaluationError)
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        begun: set[int] = set()
        for module in twin.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
                begun |= {id(one) for one in module.parameters(recurse=False)}
        for one in twin.parameters():
            if id(one) not in begun:
                one.copy_(one.flatten()[torch.randperm(one.numel())].reshape(one.shape))
    return twin


def _agree(scores: list[Scores], metric: str, k: int, level: float, resamples: int) -> Evaluation:
    first = scores[0]
    for other in scores[1:]:
        for part in ("query_ids", "train_ids"):
            if not np.array_equal(getattr(first, part), getattr(other, part)):
                raise EvaluationError(
                    f"scores of different {part.replace('_', ' ')} cannot agree or differ",
                    found=f"{len(getattr(first, part))} and {len(getattr(other, part))}",
                    fix="ask about the same queries and training rows",
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
        universe=digest_of(metric, first.query_ids, first.train_ids, level, resamples),
        truth="each other",
        item_ids=first.query_ids,
        level=level,
        resamples=resamples,
        sizes=SampleSizes(queries=len(items), rows=len(first.train_ids)),
        provenance=f"{shared.mean():.1%} of the {k} most helpful rows in common",
    )


@checked(EvaluationError)
def leakage(
    scores: Scores, copies: Any, *, k: int = 1, level: float = 0.95, resamples: int = 1000
) -> Evaluation:
    """The share of queries whose copy among the training rows is one of the `k` that helped most.

    `copies` `[Q]` is the training id of each query's copy, -1 where there is none. Cost: Q x N.

    >>> from gradkeep.attribution._scores import Scores
    >>> scores = Scores(np.eye(4, 9, dtype=np.float32), np.arange(4), np.arange(9))
    >>> leakage(scores, [0, 1, 2, 8]).value
    0.75
    """
    _arguments.count("k", k, error=EvaluationError, least=1)
    wanted = _arguments.whole_numbers("copies", copies, error=EvaluationError, least=-1)
    if wanted.shape != scores.query_ids.shape:
        raise EvaluationError(
            "copies are one training id for each query, or -1",
            found=f"{len(wanted)} for {len(scores.query_ids)} queries",
        )
    planted = np.flatnonzero(wanted >= 0)
    unknown = np.setdiff1d(wanted[planted], scores.train_ids)
    if not len(planted) or len(unknown):
        raise EvaluationError(
            "copies must be rows that were scored",
            found=f"ids {unknown[:5].tolist()} that were not" if len(unknown) else "no copy",
        )
    columns = {int(number): at for at, number in enumerate(scores.train_ids)}
    items = np.full(len(wanted), np.nan)
    for query in planted:
        row = np.asarray(scores.values[query])
        # Equal scores count against the copy: a constant method finds nothing.
        items[query] = (row >= row[columns[int(wanted[query])]]).sum() <= k
    return evaluated(
        f"leakage recall at {k}",
        subject_of(scores),
        items,
        universe=digest_of("leakage", scores.query_ids, wanted, k, level, resamples),
        truth=f"{len(planted)} planted copies",
        item_ids=scores.query_ids,
        level=level,
        resamples=resamples,
        sizes=SampleSizes(queries=len(planted), rows=len(scores.train_ids)),
        provenance=provenance_of(scores),
        captures=scores.captures,
    )


@checked(EvaluationError)
def class_retrieval(
    scores: Scores,
    query_classes: Any = None,
    train_classes: Any = None,
    *,
    k: int = 10,
    level: float = 0.95,
    resamples: int = 1000,
) -> Evaluation:
    """The share of the `k` rows that helped a query most which are of its class, or subclass.

    Classes default to the labels that were kept. Plausibility, not truth: what retraining does is
    another question (`lds`). The provenance says what chance would give. Cost: Q x N.
    """
    _arguments.count("k", k, error=EvaluationError, least=1)
    asked = _classes("query", query_classes, scores.query_labels, len(scores.query_ids))
    known = _classes("train", train_classes, scores.train_labels, len(scores.train_ids))
    k = min(k, len(known))
    items, chance = np.empty(len(asked)), np.empty(len(asked))
    for query, own in enumerate(asked):
        row = np.asarray(scores.values[query])
        best = np.argpartition(-row, k - 1)[:k]
        items[query] = (known[best] == own).mean()
        chance[query] = (known == own).mean()
    return evaluated(
        f"class retrieval at {k}",
        subject_of(scores),
        items,
        universe=digest_of("retrieval", scores.query_ids, asked.astype(str), k, level, resamples),
        truth=f"{len(np.unique(known))} classes",
        item_ids=scores.query_ids,
        level=level,
        resamples=resamples,
        sizes=SampleSizes(queries=len(asked), rows=len(known)),
        provenance=f"chance {chance.mean():.3f}; {provenance_of(scores)}",
        captures=scores.captures,
    )


def _classes(side: str, given: Any, kept: Any, count: int) -> AnyArray:
    found = kept if given is None else given
    if found is None:
        raise EvaluationError(
            f"the classes of the {side} rows are not known",
            fix=f"pass {side}_classes=, or capture with labels",
        )
    classes = _arguments.array(
        f"{side}_classes", found, error=EvaluationError, kinds="biufUS", expected="numbers or words"
    )
    if classes.shape != (count,):
        raise EvaluationError(
            f"{side}_classes are one for each row", found=list(classes.shape), expected=[count]
        )
    return classes
