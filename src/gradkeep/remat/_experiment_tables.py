"""Tables and pictures of an experiment: one of each per model."""

from __future__ import annotations

import csv
import json
import os
import re
from typing import TYPE_CHECKING, Any

from gradkeep._errors import MissingExtra
from gradkeep.remat._experiment_sweeps import draw_sweep
from gradkeep.remat._picture import Look, draw
from gradkeep.remat._sweep import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_COLUMNS = (
    *("model", "zoo", "type", "kind", "batch_size", "seed", "heuristic", "policy", "limit"),
    *("ratio", "budget", "status", "overhead", "time", "least_time", "base_time", "remat_time"),
    *("peak", "unlimited_peak", "constant_bytes", "operators", "evictions", "rematerializations"),
    *("heuristic_evaluations", "accesses", "simulation_seconds", "retries", "sizes", "message"),
    "key",
)


def write_summaries(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """A CSV table per model; times are seconds, sizes bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model, rows in _per_model(results):
        path = folder / f"{_file_name(model)}.csv"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            for row in rows:
                writer.writerow({**row, "sizes": json.dumps(row["sizes"], sort_keys=True)})
        temporary.replace(path)
        paths.append(path)
    return paths


def write_graphs(
    results: Sequence[dict[str, Any]], folder: Path
) -> tuple[list[Path], tuple[str, ...]]:
    """Per model a picture of what each budget costs, and one of its sweeps if it has any.

    What could not be drawn is said.
    """
    paths: list[Path] = []
    for model, rows in _per_model(results):
        drawn = points([row for row in rows if row["kind"] != "param_sweep"])
        swept = any(row["kind"] == "param_sweep" for row in rows)
        look = Look(f"What a smaller memory budget costs {model}")
        try:
            if drawn:
                paths += draw(drawn, folder, _file_name(model), look)
            if swept:
                paths += draw_sweep(model, rows, folder, f"{_file_name(model)}-sweep")
        except MissingExtra as error:
            return paths, (f"no pictures: {error.what}; {error.fix}",)
    return paths, ()


def points(results: Sequence[dict[str, Any]]) -> list[Row]:
    """The simulations in budgets, as a sweep's lines."""
    return [
        _point(row, rows)
        for _, rows in _per_model(results)
        for row in rows
        if row.get("budget") and "overhead" in row
    ]


def _per_model(
    results: Iterable[dict[str, Any]],
) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    models: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        models.setdefault(result["model"], []).append(result)
    return models.items()


def _point(row: dict[str, Any], rows: list[dict[str, Any]]) -> Row:
    """A simulation as a line of a sweep: one panel per size, ratios to its own peak."""
    differing = [
        f"{key.replace('_size', '')} {value:g}"
        for key, value in row["sizes"].items()
        if key == "batch_size" or any(other["sizes"].get(key) != value for other in rows)
    ]
    seeds = {other["seed"] for other in rows}
    panel = ", ".join(
        [row["model"], *differing, *([f"seed {row['seed']}"] if len(seeds) > 1 else [])]
    )
    return Row(
        # The picture takes a name up to its first hyphen for a log's title.
        log=panel.replace("-", "_").replace("/", "_"),
        heuristic=row["heuristic"],
        ratio=row["ratio"] or row["budget"] / row["unlimited_peak"],
        policy=row["policy"],
        limit=row["limit"],
        status=row["status"],
        overhead=row["overhead"],
        budget=row["budget"],
        peak=row["peak"],
        evictions=row["evictions"],
        rematerializations=row["rematerializations"],
        heuristic_evaluations=row["heuristic_evaluations"],
        accesses=row["accesses"],
    )


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]", "_", model)
