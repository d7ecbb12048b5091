"""Results of a run: tables and the figure of a sweep."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._display import format_size
from gradkeep.remat.simulator._plots import new_figure, save_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradkeep.compat.metastore._config import MetaStoreExperiment
    from gradkeep.compat.metastore.experiment_run import SweptMethod


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer."""

    path: str
    load: float
    compute: float


@dataclass(frozen=True, slots=True, eq=False)
class MethodResult:
    """Scores of one method and their costs."""

    method: str
    scores: np.ndarray[Any, np.dtype[np.float32]]
    """`[Q, N]`"""
    mean: np.ndarray[Any, np.dtype[np.float32]] | None
    """`[N]`: products with the mean query, for the methods that MetaStore applies to it."""
    query_ids: np.ndarray[Any, np.dtype[np.int64]]
    train_ids: np.ndarray[Any, np.dtype[np.int64]]
    collect: Mapping[str, float | None]
    """Seconds per split; None if the gradients were stored before."""
    layers: Mapping[str, LayerTime]
    """By MetaStore's names."""
    query_seconds: float
    """Seconds for all queries, one by one."""
    mean_seconds: float | None
    """Seconds for the mean query."""
    bytes: Mapping[str, int]
    """Bytes on disk per split."""

    @property
    def load(self) -> float:
        """Seconds to read the stored gradients of the training samples."""
        return sum(layer.load for layer in self.layers.values())

    @property
    def compute(self) -> float:
        """Seconds to multiply them."""
        return sum(layer.compute for layer in self.layers.values())


def write_results(experiment: MetaStoreExperiment, result: MethodResult) -> Path:
    """Write everything into `log/<date>/<method>_<data>_<samples>_<queries>` and return the folder."""
    import yaml

    method = result.method
    parts = [method, experiment.data_name, experiment.num_analyzed_samples, experiment.num_query]
    parts += [] if experiment.name is None else [experiment.name]
    folder = experiment.logs / date.today().isoformat() / "_".join(map(str, parts))
    folder.mkdir(parents=True, exist_ok=True)
    total = result.scores.sum(0)
    np.savez(
        folder / "scores.npz",
        scores=result.scores,
        total=total,
        query_ids=result.query_ids,
        train_ids=result.train_ids,
    )
    times = {
        "method": method,
        "collect": {split: seconds or 0.0 for split, seconds in result.collect.items()},
        "layers": {
            layer.path: {"load": layer.load, "compute": layer.compute}
            for layer in result.layers.values()
        },
        "query": result.query_seconds,
        "mean_query": result.mean_seconds,
        "bytes": dict(result.bytes),
    }
    (folder / f"times_{method}.json").write_text(json.dumps(times, indent=2) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(experiment.merged), allow_unicode=True))
    _write_pickles(folder, result, total)
    return folder


def _write_pickles(folder: Path, result: MethodResult, total: np.ndarray[Any, Any]) -> None:
    """Write MetaStore's own files, for scripts that read them: a tensor `[N]` and dictionaries of seconds."""
    import torch

    files: dict[str, Any] = {
        "total_meta_gradient": torch.from_numpy(total if result.mean is None else result.mean),
        "e2e_query_timer": {
            result.method: result.query_seconds
            if result.mean_seconds is None
            else result.mean_seconds
        },
        "calculation_query_timer": {n: layer.compute for n, layer in result.layers.items()},
        "io_query_timer": {name: layer.load for name, layer in result.layers.items()},
        "preprocess_timer": {"backward": sum(s or 0.0 for s in result.collect.values())},
    }
    for name, value in files.items():
        with open(folder / f"{name}_{result.method}.pickle", "wb") as file:
            pickle.dump(value, file)


_COLORS = {"load": "#56b4e9", "compute": "#0072b2", "bytes": "#009e73", "mean": "#d55e00"}


def draw_sweep(rows: Sequence[SweptMethod], folder: Path) -> list[Path]:
    """Write `sweep.png` and `sweep.svg`; nothing if no method ran."""
    done = [row for row in rows if not row.error]
    if not done:
        return []
    return save_figure(_figure(done), folder, "sweep")


def _figure(rows: Sequence[SweptMethod]) -> Any:
    cases = list(dict.fromkeys((row.data, row.model, row.samples, row.queries) for row in rows))
    figure = new_figure(3.6 * len(cases) + 1.2, 6.4)
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        own = [row for row in rows if (row.data, row.model, row.samples, row.queries) == case]
        _panels(axes[0][column], axes[1][column], own)
        data, model, samples, queries = case
        axes[0][column].set_title(f"{model}, {data}\n{samples} samples, {queries} queries")
    axes[0][0].set_ylabel("seconds, one query at a time")
    axes[1][0].set_ylabel("stored bytes of the samples")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panels(above: Any, below: Any, rows: Sequence[SweptMethod]) -> None:
    names = [row.method for row in rows]
    load = [row.load_seconds or 0.0 for row in rows]
    compute = [row.compute_seconds or 0.0 for row in rows]
    above.bar(names, load, color=_COLORS["load"], label="load")
    whole = above.bar(names, compute, bottom=load, color=_COLORS["compute"], label="compute")
    both = [a + b for a, b in zip(load, compute, strict=True)]
    above.bar_label(whole, [f"{value:.3g}" for value in both], fontsize=9)
    measured = [(at, row) for at, row in enumerate(rows) if row.mean_query_seconds is not None]
    above.plot(
        [at for at, _ in measured],
        [row.mean_query_seconds for _, row in measured],
        "D",
        color=_COLORS["mean"],
        label="one product with the mean query",
    )
    above.margins(y=0.12)  # room for the numbers on top
    sizes = [row.train_bytes or 0 for row in rows]
    bars = below.bar(names, sizes, color=_COLORS["bytes"])
    below.bar_label(bars, [format_size(size) for size in sizes], fontsize=9)
    # Whole gradients take hundreds of times the bytes of factors.
    below.set_yscale("log")
    below.set_ylim(bottom=min(sizes) / 10, top=max(sizes) * 4)
