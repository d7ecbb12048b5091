"""Features of both sides of a question: values that captures keep, and projected gradients."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.curvature._feature_solvers import ROWS_AT_ONCE
from gradkeep.curvature._project import project, project_parts
from gradkeep.errors import AttributionError, BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.curvature._sketches import Projection
    from gradkeep.query._gradients import GradientOf
    from gradkeep.store import Block

    Ids = np.ndarray[Any, np.dtype[np.int64]]


class KeptRows:
    """Rows `[count, dim]` float32: in memory up to `limit` bytes, else in a file without a name.

    The file is gone with the object, and what is read of it is a copy: no page of it stays mapped.

    >>> rows = KeptRows(3, 2, limit=0)
    >>> rows.put(0, torch.arange(6.0).view(3, 2))
    >>> rows.part(1, 3)
    tensor([[2., 3.],
            [4., 5.]])
    """

    def __init__(self, count: int, dim: int, *, limit: int) -> None:
        self.count, self.dim = count, dim
        self._held = torch.empty(count, dim) if 4 * count * dim <= limit else None
        self._file = -1
        if self._held is None:
            with tempfile.TemporaryFile(prefix="gradkeep-rows-") as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)

    @classmethod
    def of(cls, values: torch.Tensor) -> KeptRows:
        """Those of an array that is there."""
        made = cls(0, values.shape[1], limit=1)
        made.count, made._held = len(values), values
        return made

    @property
    def held(self) -> bool:
        """Whether they are in memory."""
        return self._held is not None

    def put(self, start: int, values: torch.Tensor) -> None:
        """Write rows from `start` on."""
        if self._held is not None:
            self._held[start : start + len(values)] = values
            return
        left = _bytes(values.float().contiguous())
        at = 4 * self.dim * start
        while left:  # one call writes up to two gigabytes
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`."""
        if self._held is not None:
            return self._held[start:stop]
        found = torch.empty(stop - start, self.dim)
        left = _bytes(found)
        at = 4 * self.dim * start
        while left:
            taken = os.preadv(self._file, [left], at)
            assert taken, "rows were read that were never written"
            left, at = left[taken:], at + taken
        return found

    def read(self, ids: Ids) -> torch.Tensor:
        """The rows `[len(ids), k]` with these numbers; neighbours are read together."""
        if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1:
            return self.part(int(ids[0]), int(ids[-1]) + 1)
        return torch.cat([self.part(int(at), int(at) + 1) for at in ids] or [self.part(0, 0)])


def _bytes(values: torch.Tensor) -> memoryview:
    flat: Any = values.view(-1).numpy()
    return memoryview(flat).cast("B")


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
    need = 4 * (2 * side * side + dim * len(asked) + 2 * dim * min(len(train), ROWS_AT_ONCE))
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
