"""Two rows of bars: the seconds and the bytes of the four methods, one column per experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradkeep.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradkeep.compat.metastore.experiment_run import SweptMethod

_COLOURS = {"load": "#56b4e9", "compute": "#0072b2", "bytes": "#009e73"}


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
        raise MissingExtra(
            "pictures need matplotlib", fix='pip install "gradkeep[remat]"'
        ) from error
    mpl.rcParams["svg.hashsalt"] = "gradkeep"
    cases = list(dict.fromkeys((row.data, row.model, row.samples, row.queries) for row in rows))
    figure = Figure(figsize=(3.6 * len(cases) + 1.2, 6.4), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        own = [row for row in rows if (row.data, row.model, row.samples, row.queries) == case]
        _panels(axes[0][column], axes[1][column], own)
        data, model, samples, queries = case
        axes[0][column].set_title(f"{model}, {data}\n{samples} samples, {queries} queries")
    axes[0][0].set_ylabel("seconds for all queries")
    axes[1][0].set_ylabel("bytes kept of the samples")
    axes[0][0].legend(frameon=False)
    return figure


def _panels(above: Any, below: Any, rows: Sequence[SweptMethod]) -> None:
    names = [row.method for row in rows]
    load, compute = ([value or 0.0 for value in values] for values in _seconds(rows))
    above.bar(names, load, color=_COLOURS["load"], label="load")
    above.bar(names, compute, bottom=load, color=_COLOURS["compute"], label="compute")
    below.bar(names, [row.train_bytes or 0 for row in rows], color=_COLOURS["bytes"])
    # Whole gradients take hundreds of times the bytes of factors.
    below.set_yscale("log")


def _seconds(rows: Sequence[SweptMethod]) -> tuple[list[float | None], list[float | None]]:
    return [row.load_seconds for row in rows], [row.compute_seconds for row in rows]
