"""The picture of a parameter sweep: how much training gets done at each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep._bytes import format_bytes
from gradkeep._errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def sweep_lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Batch sizes with samples per second, by what the memory was; unfinished trials are left out.

    >>> sweep_lines([{"type": "baseline", "status": "ok", "batch_size": 4, "time": 0.5}])
    {'plain, measured': [(4, 8.0)]}
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["status"] != "ok":
            continue
        name = "plain, measured"
        if row["type"] != "baseline":
            budget = row["budget"]
            room = "no budget" if budget is None else format_bytes(budget)
            name = f"{row['heuristic']} in {room}, simulated"
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
    for label, points in sweep_lines(rows).items():
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
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
