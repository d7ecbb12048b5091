"""A question that is asked once: nothing is kept, the training rows pass by the queries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._arguments import checked
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep._display import progress as short_repr
from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._registry import method_named
from gradkeep.attribution._scores import Scores
from gradkeep.attribution.scorers._kfac import APPROXIMATE
from gradkeep.capturing._audit import check_repeatable, restore_buffers
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._capture import capture
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._loader import task_batches
from gradkeep.capturing._moments import measure_moments
from gradkeep.capturing._readiness import in_mode, ready
from gradkeep.capturing._tracer import Reducer, empty_gradients
from gradkeep.capturing.rules._layers import LayerGradients
from gradkeep.curvature._fisher import Damping, LayerFisher, fisher_basis
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.factors._arithmetic import RESTORED
from gradkeep.factors._outer import OuterRows
from gradkeep.store import Memory
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.query._layers import LayerChoice
    from gradkeep.store import Durability

_DIRECTIONS = 4 << 30


@checked(AttributionError)
def attribute_once(
    model: nn.Module,
    train: Iterable[Any],
    queries: Iterable[Any],
    *,
    task: Task,
    method: str = "kfac",
    damping: float | None = None,
    layers: LayerChoice = None,
    mode: Mode | None = None,
    memory_budget: float | str | None = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Score every training row of a loader for some queries, without keeping anything on disk.

    `kfac` and `dot` hold nothing of the training rows: the queries' gradients are restored, and for
    `kfac` solved with the Fisher matrix of the training rows; then all training rows pass by them.
    Exact products, nothing is projected or rounded. Cost: one pass over the training rows, for `kfac`
    two, and Q x P numbers in memory; for `dot` less of linear layers with one position a row, whose
    factors are multiplied. Every other method of `gk.methods()`, with its options, is asked
    of captures that are made in memory and forgotten: the scores are those of `gk.attribute`. Either
    way `memory_budget`, 4 GiB by default, bounds what is held.

    >>> import gradkeep as gk
    >>> model = torch.nn.Linear(4, 3)
    >>> rows = [(torch.randn(6, 4), torch.arange(6) % 3)]
    >>> gk.attribute_once(model, rows, [(torch.randn(2, 4), torch.tensor([0, 1]))],
    ...     task=gk.Classification()).shape
    (2, 6)
    """
    limit = _DIRECTIONS if memory_budget is None else parse_bytes(memory_budget)
    chosen = method_named(method)
    if method not in ("dot", "kfac"):
        store = open_store(_BoundedMemory(limit))
        for split, loader in (("train", train), ("test", queries)):
            how: Any = {"layers": layers, "mode": mode, "progress": progress}
            capture(store, model, loader, task=task, split=split, **how)
        if damping is not None:
            options["damping"] = damping
        scores = attribute(
            store, method=method, memory_budget=memory_budget, progress=progress, **options
        )
        return dataclasses.replace(scores, store=None)
    if options:
        raise AttributionError(
            f"{method} has no option {', '.join(map(repr, options))} here",
            expected="damping, layers, mode, memory_budget, progress",
        )
    rows, asked = (task_batches(one, model, task, mode) for one in (train, queries))
    added = Damping(0.1 if damping is None else damping)
    with (
        ready(model),
        in_mode(model, mode),
        restore_buffers(model),
        short_repr("attribute once", "rows") as report,
    ):
        device = next(model.parameters()).device
        first = rows_of(rows.first, 0, min(4, batch_size(rows.first)))
        settings = CaptureSettings(layers, of="loss")
        tracer = prepare_capture(model, task, to_device(first, device), settings).tracer
        check_repeatable(model, task, rows.first, mode)
        directions, factors, query_ids = _held(tracer, asked, device, limit, dense=method == "kfac")
        if method == "kfac":
            found = measure_moments(tracer, (batch for _, batch in rows), device)
            for unit in tracer.units:
                fisher = LayerFisher(
                    tuple(fisher_basis(one, unit.name) for one in found.moments.pop(unit))
                )
                directions[unit] = fisher.solved(directions[unit], added)
        products: list[Tensor] = []

        def multiply(unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
            """Add a layer's products `[Q, B]` with the queries to those of the batch."""
            kept = piece.rows.widened()
            if unit in factors:
                one = piece.form.dot(factors[unit], kept, compute="factored", scratch=RESTORED)
            else:
                along = directions[unit].to(kept.example)
                one = piece.form.along(kept, along, scratch=RESTORED)
            products[-1] += one.float()
            return empty_gradients(piece)

        reducer = Reducer([*directions, *factors], multiply)
        ids = []
        total = rows.num_rows
        for own, batch in rows:
            products.append(torch.zeros(len(query_ids), len(own), device=device))
            tracer.run(batch, device=device, reducer=reducer)
            ids.append(own)
            if progress:
                report(sum(map(len, ids)), total or sum(map(len, ids)))
    values = torch.cat(products, 1).cpu().numpy()
    if not np.isfinite(values).all():
        raise AttributionError(
            "some scores are not finite",
            fix="look for exploded losses, or take an earlier checkpoint",
        )
    return Scores(
        values=values,
        query_ids=query_ids,
        train_ids=np.concatenate(ids),
        method=method,
        layers=tuple(unit.name for unit in tracer.units),
        scale=chosen.summary,
        exact=method == "dot",
        approximate=None if method == "dot" else APPROXIMATE,
    )


class _BoundedMemory(Memory):
    """A store in memory that holds no more than so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self._held = limit, 0

    def put_if_absent(
        self, key: str, parts: Sequence[bytes | memoryview], *, durability: Durability
    ) -> bool:
        self._held += sum(memoryview(part).nbytes for part in parts)
        if self._held > self._limit:
            raise BudgetError(
                "the captures do not fit into memory",
                found=f"more than {format_bytes(self._limit)}",
                fix="gk.capture into a folder and gk.attribute(folder), which read as they go; or pass "
                "layers=, or a larger memory_budget=",
            )
        return super().put_if_absent(key, parts, durability=durability)


def _held(
    tracer: Tracer, asked: Any, device: torch.device, limit: int, *, dense: bool
) -> tuple[
    dict[LayerUnit, Tensor], dict[LayerUnit, OuterRows], np.ndarray[Any, np.dtype[np.int64]]
]:
    """The queries' gradients `[Q, P]` layer by layer, or both factors where that is less; their ids."""
    restored: dict[LayerUnit, list[Tensor]] = {}
    factors: dict[LayerUnit, list[OuterRows]] = {}
    ids: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for own, batch in asked:
        traced = tracer.run(batch, device=device)
        if not ids:
            for unit in tracer.units:
                form, kept = traced.pieces[unit].form, traced.pieces[unit].rows
                # Products of both sides take far fewer operations than those of gradients.
                one_position = isinstance(kept, OuterRows) and kept.spans.uniform == 1
                single = not dense and form.kind == "outer" and one_position
                (factors if single else restored)[unit] = []
        ids.append(own)
        size = sum(4 * unit.size for unit in restored) + sum(
            traced.pieces[unit].rows.nbytes // len(own) for unit in factors
        )
        count = sum(map(len, ids))
        if 2 * count * size > limit:
            raise BudgetError(
                "the gradients of all queries do not fit into memory",
                found=f"{count} queries or more of {format_bytes(size)}",
                expected=f"at most {limit // (2 * size)} queries in {format_bytes(limit)}",
                fix="ask about fewer queries or layers at a time; or gk.capture(..., keep='4KiB') and "
                "gk.attribute, which take any number",
            )
        with torch.no_grad():
            for unit, parts in restored.items():
                piece = traced.pieces[unit]
                parts.append(piece.form.restore(piece.rows.widened()).float())
        for unit, rows in factors.items():
            some = traced.pieces[unit].rows
            assert isinstance(some, OuterRows)  # what a layer's form is does not change
            rows.append(some.widened())
    return (
        {unit: torch.cat(found) for unit, found in restored.items()},
        {unit: OuterRows.stacked(found) for unit, found in factors.items()},
        np.concatenate(ids),
    )
