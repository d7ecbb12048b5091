"""Rows to act on: those worth training on for a target, and those that leak into it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep import _arguments
from gradkeep._annotations import checked
from gradkeep.errors import EvaluationError

if TYPE_CHECKING:
    import os

    from gradkeep.attribution._scores import Scores

    AnyArray = np.ndarray[Any, np.dtype[Any]]

_CLOSE = 0.95
"""A cosine of gradients above which two rows are taken for copies."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Training rows that something should be done about, each with its reason."""

    ids: AnyArray
    """`[K]`, the first to act on first"""
    values: AnyArray
    """`[K]`"""
    reasons: tuple[str, ...]
    suggested: tuple[str, ...] | None = None
    """What each label should be, where something is suggested."""

    def __len__(self) -> int:
        return len(self.ids)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file of ids, values and reasons."""
        columns = ["id", "value", "reason"] + (["suggested"] if self.suggested is not None else [])
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(columns)
            for at, number in enumerate(self.ids.tolist()):
                row = [number, f"{float(self.values[at]):.6g}", self.reasons[at]]
                out.writerow(row + ([self.suggested[at]] if self.suggested is not None else []))


@checked(EvaluationError)
def select_rows(scores: Scores, keep: float, *, kinds: Any = None) -> ChosenRows:
    """The rows most worth training on for what was asked: `keep` of them, or that share.

    Each query's scores are standardised and averaged within its kind (its label, or `kinds` `[Q]`);
    a row counts by the kind that it serves best, so that no kind is left without rows (as LESS does
    over its subtasks). Cost: Q x N.

    >>> from gradkeep.attribution._scores import Scores
    >>> scores = Scores(np.eye(3, 9, dtype=np.float32), np.arange(3), np.arange(9))
    >>> select_rows(scores, 3, kinds=["a", "b", "c"]).ids.tolist()
    [0, 1, 2]
    """
    total = len(scores.train_ids)
    count = _count(keep, total)
    given = kinds if kinds is not None else scores.query_labels
    names = np.zeros(len(scores.query_ids), int)
    if given is not None:
        names = _arguments.array(
            "kinds", given, error=EvaluationError, kinds="biufUS", expected="numbers or words"
        )
    if names.shape != scores.query_ids.shape:
        raise EvaluationError(
            "kinds are one for each query", found=list(names.shape), expected=len(scores.query_ids)
        )
    values = np.asarray(scores.values, np.float64)
    spread = values.std(axis=1, keepdims=True)
    centred = values - values.mean(axis=1, keepdims=True)
    standard = np.divide(centred, spread, out=np.zeros_like(values), where=spread > 0)
    every = np.unique(names)
    by_kind = np.stack([standard[names == one].mean(axis=0) for one in every])
    best, serves = by_kind.max(axis=0), by_kind.argmax(axis=0)
    order = np.argsort(-best, kind="stable")[:count]
    told = (
        [f"helps queries of kind {every[serves[row]]}" for row in order] if len(every) > 1 else []
    )
    reasons = told or [f"helps the {scores.queries} queries" for _ in order]
    return ChosenRows(scores.train_ids[order], best[order], tuple(reasons))


@checked(EvaluationError)
def find_leaks(cosines: Scores, *, above: float = _CLOSE) -> ChosenRows:
    """Training rows that are as good as copies of a query: cosines of gradients above a bound.

    `cosines` are scores of the method `cos` (or of `similarity`). A row that several queries name is
    listed with the closest. Cost: Q x N.
    """
    _arguments.number("above", above, error=EvaluationError, least=-1, most=1)
    values = np.asarray(cosines.values)
    if np.abs(values).max(initial=0) > 1 + 1e-3:
        raise EvaluationError(
            "leaks are found by cosines, which lie between -1 and 1",
            found=f"scores of {cosines.method} up to {float(np.abs(values).max()):.3g}",
            fix='pass gk.attribute(store, method="cos")',
        )
    best, nearest = values.max(axis=0), values.argmax(axis=0)
    order = np.argsort(-best, kind="stable")
    order = order[best[order] >= above]
    reasons = [
        f"cosine {best[row]:.3f} with {cosines.queries} {cosines.query_ids[nearest[row]]}"
        for row in order
    ]
    return ChosenRows(cosines.train_ids[order], best[order], tuple(reasons))


def _count(keep: float, total: int) -> int:
    if isinstance(keep, float):
        share = _arguments.number("keep", keep, error=EvaluationError, above=0, most=1)
        return max(1, round(share * total))
    return _arguments.count("keep", keep, error=EvaluationError, least=1, most=total)
