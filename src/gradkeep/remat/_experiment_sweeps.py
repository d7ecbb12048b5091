"""The picture of a parameter sweep: how much training gets done at each batch size."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import format_bytes
from gradkeep.errors import MissingExtra
from gradkeep.remat._picture import MARKERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LABELS = {
    "baseline": "plain, measured",
    "simrd": "{} in {}, simulated",
    "dtr": "{} in {}, online, measured",
    "planned": "planned in {1}, measured",
}


def sweep_lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Batch sizes with samples per second, by what the memory was; unfinished trials are left out.

    >>> sweep_lines([{"type": "baseline", "status": "ok", "batch_size": 4, "time": 0.5}])
    {'plain, measured': [(4, 8.0)]}
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["status"] != "ok" or row["type"] not in _LABELS:
            continue
        name = _LABELS["baseline"]
        if row["type"] != "baseline":
            budget = row["budget"]
            room = "no budget" if budget is None else format_bytes(budget)
            name = _LABELS[row["type"]].format(row.get("heuristic"), room)
        lines.setdefault(name, []).append((row["batch_size"], row["batch_size"] / row["time"]))
    return {name: sorted(points) for name, points in lines.items()}


def draw_sweep(model: str, rows: Sequence[dict[str, Any]], folder: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.svg`."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "pictures need matplotlib", fix='pip install "gradkeep[remat]"'
        ) from error
    mpl.rcParams["svg.hashsalt"] = "gradkeep"
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for (label, points), marker in zip(
        sweep_lines(rows).items(), itertools.cycle(MARKERS), strict=False
    ):
        axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=label)
    axis.set_title(f"How fast {model} trains at each batch size", fontsize=11)
    axis.set_xlabel("batch size")
    axis.set_ylabel("samples per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    if axis.lines:
        axis.legend(frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=110)
    # A fixed salt and no date: the same rows give the same file.
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
