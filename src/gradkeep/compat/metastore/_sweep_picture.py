"""Two rows of bars: the seconds and the bytes of the four methods, one column per experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep._display import format_size
from gradkeep._surroundings import install_hint
from gradkeep.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradkeep.compat.metastore.experiment_run import SweptMethod

_COLOURS = {"load": "#56b4e9", "compute": "#0072b2", "bytes": "#009e73", "mean": "#d55e00"}


def draw_sweep(rows: Sequence[SweptMethod], folder: Path) -> list[Path]:
    """Write `sweep.png` and `sweep.svg`; nothing where no method could be run."""
    done = [row for row in rows if not row.error]
    if not done:
        return []
    figure = _figure(done)
    paths = [folder / "sweep.png", folder / "sweep.svg"]
    figure.savefig(paths[0], dpi=110)
    # No date: the same rows give the same file.
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _figure(rows: Sequence[SweptMethod]) -> Any:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures need matplotlib", fix=install_hint("remat")) from error
    mpl.rcParams["svg.hashsalt"] = "gradkeep"
    cases = list(dict.fromkeys((row.data, row.model, row.samples, row.queries) for row in rows))
    figure = Figure(figsize=(3.6 * len(cases) + 1.2, 6.4), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        own = [row for row in rows if (row.data, row.model, row.samples, row.queries) == case]
        _panels(axes[0][column], axes[1][column], own)
        data, model, samples, queries = case
        axes[0][column].set_title(f"{model}, {data}\n{samples} samples, {queries} queries")
    axes[0][0].set_ylabel("seconds, every query by itself")
    axes[1][0].set_ylabel("bytes kept of the samples")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panels(above: Any, below: Any, rows: Sequence[SweptMethod]) -> None:
    names = [row.method for row in rows]
    load = [row.load_seconds or 0.0 for row in rows]
    compute = [row.compute_seconds or 0.0 for row in rows]
    above.bar(names, load, color=_COLOURS["load"], label="load")
    whole = above.bar(names, compute, bottom=load, color=_COLOURS["compute"], label="compute")
    both = [a + b for a, b in zip(load, compute, strict=True)]
    above.bar_label(whole, [f"{value:.3g}" for value in both], fontsize=9)
    asked = [(at, row) for at, row in enumerate(rows) if row.mean_query_seconds is not None]
    above.plot(
        [at for at, _ in asked],
        [row.mean_query_seconds for _, row in asked],
        "D",
        color=_COLOURS["mean"],
        label="one product with the mean query",
    )
    above.margins(y=0.12)  # room for the numbers on top
    sizes = [row.train_bytes or 0 for row in rows]
    bars = below.bar(names, sizes, color=_COLOURS["bytes"])
    below.bar_label(bars, [format_size(size) for size in sizes], fontsize=9)
    # Whole gradients take hundreds of times the bytes of factors.
    below.set_yscale("log")
    below.set_ylim(bottom=min(sizes) / 10, top=max(sizes) * 4)
