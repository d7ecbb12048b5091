"""Tables and figures of an experiment: one of each per model."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import format_bytes
from gradkeep.compat.dtr.experiments._trial import FAILED
from gradkeep.errors import MissingExtraError
from gradkeep.remat.simulator._plots import (
    MARKERS,
    FigureStyle,
    draw_sweep,
    new_figure,
    save_figure,
)
from gradkeep.remat.simulator._program import replace_file
from gradkeep.remat.simulator._sweep import SweepRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from gradkeep.remat.simulator._sweep import RowSource

_SOURCES: dict[str, RowSource] = {
    "simrd": "simulated",
    "optimal": "optimum",
    "dtr": "online",
    "planned": "planned",
    "checkpoint": "checkpoint",
}

_COLUMNS = (
    *("model", "zoo", "type", "kind", "batch_size", "seed", "heuristic", "policy", "limit"),
    *("sample", "skip_small", "placement", "ratio", "budget", "status", "overhead"),
    *("least_overhead", "most_overhead", "time", "least_time", "base_time", "remat_time"),
    *("search_time", "copy_time", "cpu_time", "plain_cpu_time", "planning_seconds", "floor"),
    *("predicted_peak", "predicted_overhead", "peak", "unlimited_peak", "constant_bytes"),
    *("operators", "evictions", "rematerializations", "heuristic_evaluations", "accesses"),
    *("simulation_seconds", "retries", "sizes", "message", "key"),
)

# Statuses without information about a budget.
_NOTHING = (*FAILED, "too large")


def write_summaries(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write a CSV table per model; times are seconds, sizes bytes."""
    paths = []
    for model, rows in _per_model(results):
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "sizes": json.dumps(row["sizes"], sort_keys=True)})
        paths.append(folder / f"{_file_name(model)}.csv")
        replace_file(paths[-1], text.getvalue())
    return paths


def write_graphs(
    results: Sequence[dict[str, Any]], folder: Path
) -> tuple[list[Path], tuple[str, ...]]:
    """Write a figure of the budgets per model, and one of its batch sizes if there are any.

    Also return notes about figures that could not be drawn.
    """
    paths: list[Path] = []
    for model, rows in _per_model(results):
        drawn = points([row for row in rows if row["kind"] != "param_sweep"])
        swept = any(row["kind"] == "param_sweep" for row in rows)
        style = FigureStyle(f"Time against memory budget, {model}")
        try:
            if drawn:
                paths += draw_sweep(drawn, folder, _file_name(model), style)
            if swept:
                paths += draw_batch_sizes(model, rows, folder, f"{_file_name(model)}-sweep")
        except MissingExtraError as error:
            return paths, (f"no figures: {error.message}; {error.fix}",)
    return paths, ()


def points(results: Sequence[dict[str, Any]]) -> list[SweepRow]:
    """Return the trials with budgets and checkpoints as rows of a sweep."""
    return [
        _point(row, rows)
        for _, rows in _per_model(results)
        for row in rows
        if row["type"] in _SOURCES
        and row["status"] not in _NOTHING
        and _budget_ratio(row) is not None
    ]


def _per_model(
    results: Iterable[dict[str, Any]],
) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    models: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        models.setdefault(result["model"], []).append(result)
    return models.items()


def _point(row: dict[str, Any], rows: list[dict[str, Any]]) -> SweepRow:
    """Convert a trial to a row of a sweep: one panel per size, ratios to its own peak."""
    parts = [row["model"]] + [
        f"{key.replace('_size', '')} {value:g}"
        for key, value in row["sizes"].items()
        if key == "batch_size" or any(other["sizes"].get(key) != value for other in rows)
    ]
    if len({other["seed"] for other in rows}) > 1:
        parts.append(f"seed {row['seed']}")
    source = _SOURCES[row["type"]]
    counts = ("evictions", "rematerializations", "heuristic_evaluations", "accesses")
    return SweepRow(
        # A panel's title is the name of the log up to its first hyphen.
        log=", ".join(parts).replace("-", "_").replace("/", "_"),
        heuristic=row.get("heuristic") or row.get("placement") or source,
        ratio=_budget_ratio(row) or 0.0,
        policy=row.get("policy", ""),
        limit=row.get("limit", math.inf),
        status=row["status"],
        overhead=row.get("overhead", math.nan),
        budget=row.get("budget") or row["peak"],
        peak=row.get("peak") or 0,
        source=source,
        **{name: row.get(name, 0) for name in counts},
    )


def _budget_ratio(row: dict[str, Any]) -> float | None:
    """Return the budget as a fraction of the peak; for checkpoints, their own peak."""
    if row["type"] == "checkpoint":
        return row["peak"] / row["unlimited_peak"] if row["status"] == "ok" else None
    if not row.get("budget"):
        return None
    share: float = row["ratio"] or row["budget"] / row["unlimited_peak"]
    return share


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]", "_", model)


_LABELS = {
    "baseline": "plain, measured",
    "simrd": "{} in {}, simulated",
    "dtr": "{} in {}, online, measured",
    "planned": "planned in {1}, measured",
}


def batch_size_lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return batch sizes with samples per second, by label; unfinished trials are left out.

    >>> batch_size_lines([{"type": "baseline", "status": "ok", "batch_size": 4, "time": 0.5}])
    {'plain, measured': [(4, 8.0)]}
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["status"] != "ok" or row["type"] not in _LABELS:
            continue
        name = _LABELS["baseline"]
        if row["type"] != "baseline":
            budget = row["budget"]
            label = "no budget" if budget is None else format_bytes(budget)
            name = _LABELS[row["type"]].format(row.get("heuristic"), label)
        lines.setdefault(name, []).append((row["batch_size"], row["batch_size"] / row["time"]))
    return {name: sorted(points) for name, points in lines.items()}


def draw_batch_sizes(
    model: str, rows: Sequence[dict[str, Any]], folder: Path, name: str
) -> list[Path]:
    """Write `name.png` and `name.svg`."""
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    for (label, points), marker in zip(
        batch_size_lines(rows).items(), itertools.cycle(MARKERS), strict=False
    ):
        axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=label)
    axis.set_title(f"Training throughput of {model}", fontsize=11)
    axis.set_xlabel("batch size")
    axis.set_ylabel("samples per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    if axis.lines:
        axis.legend(frameon=False, fontsize=9)
    return save_figure(figure, folder, name)
