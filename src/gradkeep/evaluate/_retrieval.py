"""What scores bring up: rows of the query's class, and copies of the query that were planted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._bootstrap import digest_of
from gradkeep.evaluate._evaluation import Evaluation, SampleSizes, evaluated
from gradkeep.evaluate._lds import provenance_of, subject_of

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores

    AnyArray = np.ndarray[Any, np.dtype[Any]]


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
