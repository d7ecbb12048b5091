"""Features of training rows and queries: captured values and projected gradients."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.curvature._cholesky import ROWS_AT_ONCE
from gradkeep.curvature._project import project, project_parts
from gradkeep.errors import AttributionError, BudgetError

if TYPE_CHECKING:
    from torch import Tensor

    from gradkeep.attribution._question import CheckpointView
    from gradkeep.curvature._sketches import Projection
    from gradkeep.query._gradients import GradientOf

    Ids = np.ndarray[Any, np.dtype[np.int64]]


class RowStorage:
    """Rows `[count, dim]` float32: in memory up to `limit` bytes, else in a file without a name.

    The file is deleted with the object, and reads are copies: no page of it stays mapped.

    >>> rows = RowStorage(3, 2, limit=0)
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
    def of(cls, values: torch.Tensor) -> RowStorage:
        """Wrap an existing tensor."""
        storage = cls(0, values.shape[1], limit=1)
        storage.count, storage._held = len(values), values
        return storage

    @property
    def held(self) -> bool:
        """True if the rows are in memory."""
        return self._held is not None

    def put(self, start: int, values: torch.Tensor) -> None:
        """Write rows from `start` on."""
        if self._held is not None:
            self._held[start : start + len(values)] = values
            return
        remaining = _bytes(values.float().contiguous())
        at = 4 * self.dim * start
        while remaining:  # one call writes up to two gigabytes
            written = os.pwrite(self._file, remaining, at)
            remaining, at = remaining[written:], at + written

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`."""
        if self._held is not None:
            return self._held[start:stop]
        rows = torch.empty(stop - start, self.dim)
        remaining = _bytes(rows)
        at = 4 * self.dim * start
        while remaining:
            num_read = os.preadv(self._file, [remaining], at)
            assert num_read, "rows were read that were never written"
            remaining, at = remaining[num_read:], at + num_read
        return rows

    def read(self, ids: Ids) -> torch.Tensor:
        """Return the rows `[len(ids), k]` with these numbers; neighbors are read together."""
        if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1:
            return self.part(int(ids[0]), int(ids[-1]) + 1)
        return torch.cat([self.part(int(at), int(at) + 1) for at in ids] or [self.part(0, 0)])


def _bytes(values: torch.Tensor) -> memoryview:
    flat: Any = values.view(-1).numpy()
    return memoryview(flat).cast("B")


_EMBEDDING = "embedding."
IN_MEMORY = 1 << 28
"""Default limit in bytes of projections in memory."""


def embeddings(at: CheckpointView, layer: str | None, *, method: str) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the training rows `[N, D]` and of the queries `[Q, D]`, float32.

    Without a layer, of the last one that both splits hold.
    """
    name = _embedding(at, layer, method=method)
    train, queries = (
        torch.from_numpy(np.array(block.column(name), np.float32))
        for block in (at.train_block, at.query_block)
    )
    for values, block in ((train, at.train_block), (queries, at.query_block)):
        is_finite = values.isfinite().all(1)
        if not bool(is_finite.all()):
            raise AttributionError(
                f"an embedding of {block.path} is not finite",
                code="attribute.not_finite",
                found=f"id {int(block.ids[int((~is_finite).nonzero()[0])])}",
                fix="Check the input of that row.",
            )
    return train, queries[at.question.positions]


def _embedding(at: CheckpointView, layer: str | None, *, method: str) -> str:
    question = at.question
    for split, block in ((question.train, at.train_block), (question.queries, at.query_block)):
        layers = [n.removeprefix(_EMBEDDING) for n in block.names if n.startswith(_EMBEDDING)]
        if not layers or (layer is not None and layer not in layers):
            example = layer or "path.of.a.layer"
            raise AttributionError(
                f"{method} needs embeddings{f' of layer {layer}' if layer else ''} of {split}",
                code="attribute.missing_embeddings",
                path=block.path,
                found=f"embeddings of {', '.join(layers)}" if layers else "no embeddings",
                fix=f"Run gk.capture(store, model, loader, task=task, split={split!r}, "
                f"checkpoint={at.place.checkpoint!r}, embeddings=[{example!r}]) under another "
                "name=, or delete the capture first.",
            )
    train, queries = at.train_block, at.query_block
    both = [n for n in train.names if n.startswith(_EMBEDDING) and n in queries.names]
    if not both:
        raise AttributionError(
            f"{question.train} and {question.queries} hold embeddings of different layers",
            code="attribute.different_embeddings",
            fix="Capture both with the same embeddings=.",
        )
    return both[-1] if layer is None else f"{_EMBEDDING}{layer}"


def features(
    at: CheckpointView, of: GradientOf, projection: Projection
) -> tuple[RowStorage, Tensor]:
    """Project the training rows `[N, k]`, to disk if they are many, and the queries `[Q, k]`.

    Each checkpoint gets another projection, so that their errors average out.
    """
    question, dim = at.question, projection.dim
    train, queries = at.train(of), at.queries(of)
    side = min(dim, len(train))
    # The matrix and its factor, the queries, and a batch of rows.
    need = 4 * (2 * side * side + dim * len(queries) + 2 * dim * min(len(train), ROWS_AT_ONCE))
    budget = question.memory_budget
    if budget is not None and need > parse_bytes(budget):
        raise BudgetError(
            f"projections to {dim} numbers do not fit in the memory budget",
            code="budget.projections",
            found=str(budget),
            expected=f"at least {format_bytes(need)}",
            fix="Pass a smaller dim= or a larger memory_budget=.",
        )
    limit = IN_MEMORY if budget is None else (parse_bytes(budget) - need) // 2
    number = question.checkpoints.index(at.place)
    x = RowStorage(len(train), dim, limit=limit)
    for start, values in project_parts(train, projection, model=number, memory_budget=budget):
        x.put(start, values)
        question.report(f"row {start + len(values)} of {len(train)} projected")
    g = project(queries, projection, model=number, memory_budget=budget)
    return x, g[question.positions]
