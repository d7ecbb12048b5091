"""`gk.attribute_once`: score a loader's rows without a store on disk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradkeep._arguments import checked
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep._display import progress as progress_bar
from gradkeep.attribution._attribute import attribute
from gradkeep.attribution._registry import find_method
from gradkeep.attribution._scores import Scores
from gradkeep.attribution.scorers._kfac import APPROXIMATE
from gradkeep.capturing._batches import batch_size as samples_in
from gradkeep.capturing._batches import rows_of, to_device
from gradkeep.capturing._capture import capture
from gradkeep.capturing._choice import measure_moments
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._loader import as_loader, task_batches
from gradkeep.capturing._readiness import in_mode, moved_to, ready, restore_buffers
from gradkeep.capturing._resume import check_repeatable
from gradkeep.capturing._tracer import Reducer, empty_gradients
from gradkeep.capturing.rules._layers import LayerGradients
from gradkeep.curvature._fisher import Damping, LayerFisher, fisher_basis
from gradkeep.errors import AttributionError, BudgetError
from gradkeep.factors._arithmetic import RESTORED
from gradkeep.factors._form import dot, dot_directions
from gradkeep.factors._outer import OuterRows
from gradkeep.store import Memory
from gradkeep.store import open as open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.query._gradients import LayerChoice
    from gradkeep.store import Durability


@checked(AttributionError)
def attribute_once(
    model: nn.Module,
    train: Iterable[Any] | Dataset[Any],
    queries: Iterable[Any] | Dataset[Any],
    *,
    task: Task,
    method: str | None = None,
    damping: float | None = None,
    layers: LayerChoice = None,
    mode: Mode | None = "eval",
    memory_budget: float | str | None = None,
    progress: bool = False,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> Scores:
    """Score every training row of a loader for some queries, without writing anything to disk.

    `kfac` and `dot` do not store the training rows: the queries' gradients are held, for `kfac` multiplied
    with the inverse Fisher matrix of the training rows, and then all training rows are streamed past them.
    Products are exact, without projection or rounding. Cost: one pass over the training rows, two for
    `kfac`, and Q x P numbers in memory; `dot` needs less for linear layers with one position per row, whose
    factors are multiplied. Every other method captures both splits in memory and gives the scores of
    `gk.attribute`.

    Args:
        model: The model.
        train: Loader of the training batches, or a map-style data set.
        queries: Loader of the query batches, or a map-style data set.
        task: Loss of the model, such as `gk.Classification()`.
        method: Name of a method; `gk.methods()` lists them. The default is that of `gk.attribute`.
        damping: Damping of the curvature, relative to its mean eigenvalue; the method's default if None.
        layers: Use only these layers.
        mode: `"eval"` or `"train"`; None leaves the model's mode.
        memory_budget: Most memory for gradients, 4 GiB by default.
        progress: Show progress.
        batch_size: Samples per batch of a data set; 64 by default.
        device: Device to run on; the model is moved there and back.
        **options: Options of the method.

    Returns:
        Scores `[queries, train]`; positive helps.

    Raises:
        BudgetError: The queries' gradients, or the captures, exceed `memory_budget`.
        AttributionError: An option is unknown, or scores are not finite.

    Example:
        >>> import gradkeep as gk
        >>> model = torch.nn.Linear(4, 3)
        >>> rows = [(torch.randn(6, 4), torch.arange(6) % 3)]
        >>> gk.attribute_once(model, rows, [(torch.randn(2, 4), torch.tensor([0, 1]))],
        ...     task=gk.Classification()).shape
        (2, 6)
    """
    if method is not None:
        find_method(method)
    limit = 4 << 30 if memory_budget is None else parse_bytes(memory_budget)
    loaders = as_loader(train, batch_size), as_loader(queries, batch_size)
    if method not in ("dot", "kfac"):
        store = open_store(_BoundedMemory(limit))
        for split, loader in zip(("train", "test"), loaders, strict=True):
            how: Any = {"layers": layers, "mode": mode, "progress": progress, "device": device}
            capture(store, model, loader, task=task, split=split, **how)
        if damping is not None:
            options["damping"] = damping
        scores = attribute(
            store, method=method, memory_budget=memory_budget, progress=progress, **options
        )
        return dataclasses.replace(scores, store=None)
    if options:
        raise AttributionError(
            f"{method} has no option {', '.join(map(repr, options))} in attribute_once",
            code="attribute.unknown_option",
            expected="damping, layers, mode, memory_budget, progress",
        )
    rows, query_rows = (task_batches(loader, model, task, mode) for loader in loaders)
    added = Damping(0.1 if damping is None else damping)
    with (
        moved_to(model, device),
        ready(model),
        in_mode(model, mode),
        restore_buffers(model),
        progress_bar("attribute once", "rows") as report,
    ):
        device = next(model.parameters()).device
        first = rows_of(rows.first, 0, min(4, samples_in(rows.first)))
        settings = CaptureSettings(layers, of="loss")
        tracer = prepare_capture(model, task, to_device(first, device), settings).tracer
        check_repeatable(model, task, rows.first, mode)
        directions, factors, query_ids = _hold_queries(
            tracer, query_rows, device, limit, dense=method == "kfac"
        )
        if method == "kfac":
            measured_rows = measure_moments(tracer, (batch for _, batch in rows), device)
            for unit in tracer.units:
                fisher = LayerFisher(
                    tuple(
                        fisher_basis(moments, unit.name)
                        for moments in measured_rows.moments.pop(unit)
                    )
                )
                directions[unit] = fisher.solved(directions[unit], added)
        products: list[Tensor] = []

        def multiply(unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
            """Add a layer's products `[Q, B]` with the queries to those of the batch."""
            wide = piece.rows.widened()
            if unit in factors:
                product = dot(piece.form, factors[unit], wide, compute="factored", scratch=RESTORED)
            else:
                own = directions[unit].to(wide.example)
                product = dot_directions(piece.form, wide, own, scratch=RESTORED)
            products[-1] += product.float()
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
            f"{method} produced non-finite scores",
            code="attribute.not_finite",
            fix="Look for exploded losses, or use an earlier checkpoint.",
        )
    return Scores(
        values=values,
        query_ids=query_ids,
        train_ids=np.concatenate(ids),
        method=method,
        layers=tuple(unit.name for unit in tracer.units),
        scale=find_method(method).summary,
        exact=method == "dot",
        approximate=None if method == "dot" else APPROXIMATE,
    )


class _BoundedMemory(Memory):
    """Store in memory with a limit in bytes."""

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
                code="budget.captures",
                found=f"more than {format_bytes(self._limit)}",
                fix="Use gk.capture into a folder and gk.attribute(folder), which stream from disk; or "
                "pass layers= or a larger memory_budget=.",
            )
        return super().put_if_absent(key, parts, durability=durability)


def _hold_queries(
    tracer: Tracer, query_rows: Any, device: torch.device, limit: int, *, dense: bool
) -> tuple[
    dict[LayerUnit, Tensor], dict[LayerUnit, OuterRows], np.ndarray[Any, np.dtype[np.int64]]
]:
    """Compute the queries' gradients `[Q, P]` per layer, or their factors if smaller, and their ids."""
    restored: dict[LayerUnit, list[Tensor]] = {}
    factors: dict[LayerUnit, list[OuterRows]] = {}
    ids: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for own, batch in query_rows:
        traced = tracer.run(batch, device=device)
        if not ids:
            for unit in tracer.units:
                form, rows = traced.pieces[unit].form, traced.pieces[unit].rows
                # Products of factors take far fewer operations than products of gradients.
                one_position = isinstance(rows, OuterRows) and rows.spans.uniform == 1
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
                code="budget.queries",
                found=f"{count} queries or more of {format_bytes(size)}",
                expected=f"at most {limit // (2 * size)} queries in {format_bytes(limit)}",
                fix="Pass fewer queries or layers at a time; or use gk.capture(..., keep='4KiB') and "
                "gk.attribute, which accept any number.",
            )
        with torch.no_grad():
            for unit, parts in restored.items():
                piece = traced.pieces[unit]
                parts.append(piece.form.restore(piece.rows.widened()).float())
        for unit, factor_rows in factors.items():
            new_rows = traced.pieces[unit].rows
            assert isinstance(new_rows, OuterRows)  # a layer's form does not change
            factor_rows.append(new_rows.widened())
    return (
        {unit: torch.cat(parts) for unit, parts in restored.items()},
        {unit: OuterRows.stacked(parts) for unit, parts in factors.items()},
        np.concatenate(ids),
    )
