"""The screen Evaluation: saved figures with their intervals and curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import GradkeepError
from gradkeep.web._responses import error_problem

if TYPE_CHECKING:
    from gradkeep.evaluate import Evaluation
    from gradkeep.web._served import ServedStore


def list_evaluations(served: ServedStore) -> dict[str, Any]:
    """Return every saved evaluation, and the problems of those that cannot be read."""
    versions = tuple((one.address.name, one.version) for one in served.info().evaluations)

    def compute(_: Any) -> dict[str, Any]:
        from gradkeep.evaluate import Evaluation

        evaluations, problems = [], []
        for name, _version in versions:
            try:
                evaluations.append(evaluation_view(name, Evaluation.load(served.store, name)))
            except GradkeepError as error:
                problems.append(error_problem(error))
        return {"evaluations": evaluations, "problems": problems}

    return served.tasks.get(
        ("evaluations", versions),
        "reading evaluations",
        compute,
        size=lambda answer: 4096 * (1 + len(answer["evaluations"])),
        timeout=5.0,
    )


def find_lds(served: ServedStore, method: str) -> dict[str, Any] | None:
    """Return the saved LDS of a method on the most queries, if there is one."""
    views = [
        view
        for view in list_evaluations(served)["evaluations"]
        if view["metric"].lower().startswith("lds") and view["subject"].split(" ")[0] == method
    ]
    return max(views, key=lambda view: sum(view["items"]), default=None)


def evaluation_view(name: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as the page shows it; `items` is a histogram over queries."""
    items = np.asarray(evaluation.items, np.float64)
    items = items[np.isfinite(items)]
    low, high = (float(items.min()), float(items.max())) if len(items) else (0.0, 0.0)
    counts, _ = np.histogram(
        items, bins=24, range=(low, high) if high > low else (low - 1, low + 1)
    )
    curve = evaluation.curve
    return {
        "name": name,
        "metric": evaluation.metric,
        "subject": evaluation.subject,
        "value": evaluation.value,
        "low": evaluation.interval[0],
        "high": evaluation.interval[1],
        "level": evaluation.level,
        "ceiling": evaluation.ceiling,
        "sizes": str(evaluation.sizes),
        "truth": evaluation.truth,
        "provenance": evaluation.provenance,
        "items": counts.tolist(),
        "item_range": (low, high),
        "curve": curve
        and {
            "along": curve.along,
            "at": curve.at,
            "names": curve.names,
            "values": curve.values,
            "low": curve.low,
            "high": curve.high,
        },
    }
