"""Features of both sides of a question: values that captures keep, and projected gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.attribution._kept_rows import KeptRows
from gradkeep.attribution._solve import BLOCK
from gradkeep.attribution.projections._project import project, project_parts
from gradkeep.errors import AttributionError, BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.attribution.projections._projection import Projection
    from gradkeep.query._gradients import GradientOf
    from gradkeep.store import Block

_EMBEDDING = "embedding."
IN_MEMORY = 1 << 28
"""Bytes of projections that are held in memory, unless a budget says otherwise."""


def column(block: Block, name: str, *, method: str) -> Tensor:
    """A kept value `[N]` of all rows of a capture."""
    if name not in block.names:
        raise AttributionError(
            f"{method} needs the {name} of every row, which this capture does not keep",
            path=block.path,
            found=", ".join(n for n in block.names if "." not in n),
            fix="capture with a task that measures it, such as gk.Classification",
        )
    return torch.from_numpy(np.array(block.column(name)))


def embeddings(at: CheckpointView, layer: str | None, *, method: str) -> tuple[Tensor, Tensor]:
    """Embeddings of the training rows `[N, D]` and of the queries `[Q, D]`, float32.

    Without a layer, of the last one that both splits keep embeddings of.
    """
    name = _embedding(at, layer, method=method)
    train, asked = (
        torch.from_numpy(np.array(block.column(name), np.float32))
        for block in (at.train_block, at.query_block)
    )
    for values, block in ((train, at.train_block), (asked, at.query_block)):
        good = values.isfinite().all(1)
        if not bool(good.all()):
            raise AttributionError(
                f"an embedding of {block.path} is no number",
                found=f"id {int(block.ids[int((~good).nonzero()[0])])}",
                fix="look at the input of that row",
            )
    return train, asked[at.question.positions]


def _embedding(at: CheckpointView, layer: str | None, *, method: str) -> str:
    question = at.question
    for split, block in ((question.train, at.train_block), (question.queries, at.query_block)):
        kept = [n.removeprefix(_EMBEDDING) for n in block.names if n.startswith(_EMBEDDING)]
        if not kept or (layer is not None and layer not in kept):
            wanted = layer or "path.of.a.layer"
            raise AttributionError(
                f"{method} needs embeddings{f' of layer {layer}' if layer else ''} of {split}",
                path=block.path,
                found=f"embeddings of {', '.join(kept)}" if kept else "no embeddings",
                fix=f"gk.capture(store, model, loader, task=task, split={split!r}, "
                f"checkpoint={at.place.checkpoint!r}, embeddings=[{wanted!r}]) under another "
                "name=, or delete the capture first",
            )
    train, asked = at.train_block, at.query_block
    both = [n for n in train.names if n.startswith(_EMBEDDING) and n in asked.names]
    if not both:
        raise AttributionError(
            f"{question.train} and {question.queries} keep embeddings of different layers",
            fix="capture both with the same embeddings=",
        )
    return both[-1] if layer is None else f"{_EMBEDDING}{layer}"


def features(at: CheckpointView, of: GradientOf, projection: Projection) -> tuple[KeptRows, Tensor]:
    """Projections of the training rows `[N, k]`, on disk if they are many, and of the queries `[Q, k]`.

    Other checkpoints get other projections, so that their errors average out.
    """
    question, dim = at.question, projection.dim
    train, asked = at.train(of), at.queries(of)
    side = min(dim, len(train))
    # The matrix and its factor, the queries, and some rows that pass.
    need = 4 * (2 * side * side + dim * len(asked) + 2 * dim * min(len(train), BLOCK))
    budget = question.memory_budget
    if budget is not None and need > parse_bytes(budget):
        raise BudgetError(
            f"projections to {dim} numbers do not fit in the memory budget",
            found=str(budget),
            expected=f"at least {format_bytes(need)}",
            fix="pass a smaller dim=, or a larger memory_budget=",
        )
    limit = IN_MEMORY if budget is None else (parse_bytes(budget) - need) // 2
    number = question.checkpoints.index(at.place)
    x = KeptRows(len(train), dim, limit=limit)
    for start, values in project_parts(train, projection, model=number, memory_budget=budget):
        x.put(start, values)
        question.report(f"row {start + len(values)} of {len(train)} projected")
    g = project(asked, projection, model=number, memory_budget=budget)
    return x, g[question.positions]
