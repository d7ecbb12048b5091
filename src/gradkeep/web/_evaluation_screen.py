"""The screen of evaluations: methods against metrics, each figure with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradkeep.errors import GradkeepError
from gradkeep.web._responses import ProblemView, problem_of

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.web._served import ServedStore


@dataclass(frozen=True, slots=True)
class CurveView:
    """Lines over one axis."""

    along: str
    at: list[float]
    names: tuple[str, ...]
    values: list[list[float]]
    low: list[list[float]]
    high: list[list[float]]


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """A figure with its interval, what it was found with, and its ceiling."""

    name: str
    metric: str
    subject: str
    value: float
    low: float
    high: float
    level: float
    ceiling: float | None
    sizes: str
    truth: str
    provenance: str
    items: list[int]
    """How the figures of single queries are spread, from the least to the largest."""
    item_range: tuple[float, float]
    curve: CurveView | None


@dataclass(frozen=True, slots=True)
class EvaluationsView:
    """All evaluations that are kept, and those that cannot be read."""

    evaluations: list[EvaluationView]
    problems: list[ProblemView]


def list_evaluations(served: ServedStore) -> EvaluationsView:
    """Every evaluation that the store keeps."""
    names = tuple((one.address.name, one.version) for one in served.info().evaluations)
    return served.desk.ask(
        ("evaluations", names),
        "reading evaluations",
        lambda _: _read(served, [name for name, _ in names]),
        size=lambda found: 4096 * (1 + len(found.evaluations)),
        patience=5.0,
    )


def lds_of(served: ServedStore, method: str) -> EvaluationView | None:
    """How well a method predicts retraining, if that was evaluated: the figure on most queries."""
    found = [
        one
        for one in list_evaluations(served).evaluations
        if one.metric.lower().startswith("lds") and one.subject.split(" ")[0] == method
    ]
    return max(found, key=lambda one: sum(one.items), default=None)


def _read(served: ServedStore, names: list[str]) -> EvaluationsView:
    from gradkeep.evaluate import Evaluation

    found, problems = [], []
    for name in names:
        try:
            found.append(evaluation_view(name, Evaluation.load(served.store, name)))
        except GradkeepError as error:
            problems.append(problem_of(error))
    return EvaluationsView(found, problems)


def evaluation_view(name: str, found: Evaluation) -> EvaluationView:
    """An evaluation as it is shown."""
    items = np.asarray(found.items, np.float64)
    items = items[np.isfinite(items)]
    low, high = (float(items.min()), float(items.max())) if len(items) else (0.0, 0.0)
    counts = np.histogram(items, bins=24, range=(low, high) if high > low else (low - 1, low + 1))
    curve = found.curve
    return EvaluationView(
        name=name,
        metric=found.metric,
        subject=found.subject,
        value=found.value,
        low=found.interval[0],
        high=found.interval[1],
        level=found.level,
        ceiling=found.ceiling,
        sizes=str(found.sizes),
        truth=found.truth,
        provenance=found.provenance,
        items=counts[0].tolist(),
        item_range=(low, high),
        curve=None
        if curve is None
        else CurveView(
            curve.along,
            curve.at.tolist(),
            curve.names,
            curve.values.tolist(),
            curve.low.tolist(),
            curve.high.tolist(),
        ),
    )
