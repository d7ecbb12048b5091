"""Scores as tables and pictures of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep.errors import MissingExtra

if TYPE_CHECKING:
    from gradkeep.attribution._scores import Scores


def to_pandas(scores: Scores) -> Any:
    """A data frame: a row per query id, a column per training id."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("data frames need pandas", fix='pip install "gradkeep[sql]"') from error
    rows = pandas.Index(scores.query_ids, name="query")
    return pandas.DataFrame(
        scores.values, index=rows, columns=pandas.Index(scores.train_ids, name="train")
    )


def to_arrow(scores: Scores, *, k: int | None) -> Any:
    """A table of query, train and score, each query's best rows first."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra(
            "Arrow tables need pyarrow", fix='pip install "gradkeep[sql]"'
        ) from error
    count = len(scores.train_ids) if k is None else min(k, len(scores.train_ids))
    parts = []
    for query, row in zip(scores.query_ids, scores.values, strict=True):
        order = np.argsort(-row, kind="stable")[:count]
        columns = (np.full(count, query), scores.train_ids[order], np.asarray(row[order]))
        parts.append(pyarrow.record_batch(list(columns), names=["query", "train", "score"]))
    return pyarrow.Table.from_batches(parts)


def plot(scores: Scores, *, query: int, k: int) -> Any:
    """Bars of the k rows that helped and that harmed a query most, the sign by side and colour."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "pictures need matplotlib", fix='pip install "gradkeep[remat]"'
        ) from error
    row = scores.of(query)
    order = np.argsort(-row, kind="stable")
    order = np.concatenate([order[:k], order[max(k, len(order) - k) :]])
    values = row[order]
    figure = Figure(figsize=(6.4, 0.25 * len(order) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh(np.arange(len(order)), values, color=np.where(values > 0, "#2b6cb0", "#c05621"))
    names = [f"{scores.train} {number}" for number in scores.train_ids[order]]
    if scores.train_labels is not None:
        labels = np.asarray(scores.train_labels)[order]
        names = [f"{name} ({label})" for name, label in zip(names, labels, strict=True)]
    axes.set_yticks(np.arange(len(order)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_xlabel(f"{scores.method}: positive helped, negative harmed")
    axes.set_title(f"{scores.queries} {query}")
    return figure
