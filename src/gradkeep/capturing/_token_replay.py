"""Replay chosen rows to score their tokens, if only whole rows are stored."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradkeep.capturing._batches import batch_size, digests, rows_of, to_device
from gradkeep.capturing._coordinates import load_basis
from gradkeep.capturing._first_batch import CaptureSettings, prepare_capture
from gradkeep.capturing._loader import task_batches, without_columns
from gradkeep.capturing._readiness import device_of, has_active_dropout, in_mode, ready, uncompiled
from gradkeep.capturing._resume import RowFingerprints, fingerprint_weights
from gradkeep.capturing._tracer import fill
from gradkeep.capturing.rules._layers import by_sample, linear_gradients, norm_terms
from gradkeep.capturing.rules._rules import calls_by_module, calls_of, watched_modules
from gradkeep.capturing.tasks._tasks import Task
from gradkeep.errors import CaptureError
from gradkeep.factors import basis_of
from gradkeep.factors._form import FactoredForm, dot_directions, widened
from gradkeep.factors._lookup import Lookup, LookupRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from gradkeep.capturing._loader import Batches, Columns, Ids
    from gradkeep.capturing._tracer import LayerCall, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm
    from gradkeep.query import Gradients
    from gradkeep.store import Store


def token_products(
    unit: LayerUnit, calls: Sequence[LayerCall], directions: Tensor, *, rows: int, tokens: int
) -> Tensor | None:
    """Compute products `[K, B, T]` with directions `[K, P]`, summed over calls; None without token positions.

    Every call must output one vector for each token, `[B, T, d]`: a linear layer, an embedding, both uses of
    a tied weight, or a norm over the last dimension.
    """
    parts = [_call_products(unit, call, directions, rows, tokens) for call in calls]
    products = [part for part in parts if part is not None]
    return functools.reduce(torch.add, products) if parts and len(products) == len(parts) else None


def _call_products(
    unit: LayerUnit, call: LayerCall, directions: Tensor, rows: int, tokens: int
) -> Tensor | None:
    suffix = by_sample(call.suffix(), rows, unit.axis)
    if suffix.dim() != 3 or suffix.shape[:2] != (rows, tokens):
        return None
    if unit.rule == "norm":
        terms = norm_terms(unit, call, rows)
        return None if terms is None else torch.einsum("kp,btp->kbt", directions.to(terms), terms)
    if unit.rule in ("embedding", "tied") and isinstance(call.module, nn.Embedding):
        return _embedding_products(unit, call, suffix, directions)
    if unit.rule in ("linear", "tied"):
        piece = linear_gradients(unit, [call], rows)
        factors = piece.rows.widened()
        assert isinstance(piece.form, FactoredForm)
        parts = piece.form.along_positions(factors, directions.to(factors.example))
        return None if parts is None else parts[0].values.view(-1, rows, tokens)
    return None


def _embedding_products(
    unit: LayerUnit, call: LayerCall, suffix: Tensor, directions: Tensor
) -> Tensor | None:
    """Compute products of tokens as they were read, without adding up equal ones."""
    table = call.module
    assert isinstance(table, nn.Embedding)
    rows, tokens, width = suffix.shape
    ids = by_sample(call.input, rows, unit.axis)
    if ids.shape != (rows, tokens):
        return None
    g = widened(suffix)
    if table.padding_idx is not None:
        g = g.masked_fill((ids == table.padding_idx).unsqueeze(2), 0)
    size = table.num_embeddings * width
    form = Lookup(unit.parameters[:1], "", "", table.num_embeddings, width)
    offsets = torch.arange(rows + 1) * tokens
    factors = LookupRows(ids.reshape(-1), g.reshape(-1, width), offsets)
    parts = form.along_positions(factors, directions[:, :size].to(g))
    return None if parts is None else parts[0].values.view(-1, rows, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedTokens:
    """Contribution of each token of N rows to their products with K directions."""

    values: Tensor
    """`[K, N, T]` float32, zero after the end of shorter rows"""
    rest: Tensor
    """`[K, N]` float32: layers without positions"""
    lengths: Tensor
    """`[N]` int64: number of tokens up to the last nonzero one"""
    layers: tuple[str, ...]
    rest_layers: tuple[str, ...]


def replay_tokens(
    store: Store,
    train: Gradients,
    directions: Mapping[str, Tensor],
    model: nn.Module,
    loader: Iterable[Any],
    *,
    task: Task,
    train_ids: np.ndarray[Any, np.dtype[np.int64]],
    ids: Ids | None = None,
    columns: Columns | None = None,
) -> ReplayedTokens:
    """Compute products of the tokens of chosen rows with queries, by running those rows again.

    `directions` holds for each layer of the capture K dense directions `[K, P]` or, for layers stored as
    coordinates, those of the queries `[K, size]`, which are mapped back through the basis. The loader
    delivers the captured rows, in any batches, with `ids` and `columns` as they were captured; other weights
    or contents raise. Cost: one forward and backward pass over the chosen rows, 2 K T P operations for each,
    and all K directions in memory.
    """
    _check_task(train, task)
    if not len(train_ids):
        raise CaptureError("train_ids is empty", code="capture.no_train_ids")
    facts: Any = train.block.schema.fingerprints
    model, mode = uncompiled(model), facts.get("mode")
    with ready(model), in_mode(model, mode):
        if fingerprint_weights(model) != train.weights:
            raise CaptureError(
                f"the model does not have the weights that {train.key.split} was captured with",
                code="capture.other_weights",
                fix=f"Load checkpoint {train.key.checkpoint} into the model first.",
            )
        if has_active_dropout(model):
            raise CaptureError(
                f"{train.key.split} was captured at random, so its rows cannot be reproduced",
                code="capture.random_rows",
                fix="Capture with mode='eval'.",
            )
        batches = task_batches(loader, model, task, mode, ids=ids, columns=columns)
        first, device = next(_captured_batches(train, batches))[1], device_of(model)
        probe = to_device(rows_of(first, 0, min(2, batch_size(first))), device)
        prepared = prepare_capture(model, task, probe, CaptureSettings(of=facts.get("of")))
        units = [unit for unit in prepared.tracer.units if unit.name in train.forms]
        missing = sorted(set(train.forms) - {unit.name for unit in units})
        if missing:
            names = ", ".join(missing[:4])
            raise CaptureError(
                f"the model lacks layers of {train.key.split}: {names}",
                code="capture.missing_layers",
            )
        forms = {unit: prepared.pieces[unit].form for unit in units}
        replay = _TokenReplay(
            dataclasses.replace(prepared.tracer, units=units),
            _dense_directions(store, train, directions, forms, device),
            of_losses=train.of == "loss",
        )
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        for numbers, batch in _chosen_rows(_captured_batches(train, batches), train_ids):
            values, rest = replay.products(to_device(batch, device))
            for at, number in enumerate(numbers):
                parts[number] = (values[:, at].float().cpu(), rest[:, at].float().cpu())
    rows = [parts[int(number)] for number in train_ids]
    longest = max(values.shape[1] for values, _ in rows)
    padded = [torch.nn.functional.pad(v, (0, longest - v.shape[1])) for v, _ in rows]
    values = torch.stack(padded, 1)
    return ReplayedTokens(
        values=values,
        rest=torch.stack([rest for _, rest in rows], 1),
        lengths=((values != 0).any(0) * torch.arange(1, longest + 1)).amax(1),
        layers=tuple(replay.layers),
        rest_layers=tuple(replay.rest_layers),
    )


@dataclass(slots=True, eq=False)
class _TokenReplay:
    """Multiply the tokens of replayed rows with directions."""

    tracer: Tracer
    directions: Mapping[LayerUnit, Tensor]
    of_losses: bool
    layers: dict[str, None] = field(default_factory=dict)
    """Layers with token positions."""
    rest_layers: dict[str, None] = field(default_factory=dict)

    def products(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return products `[K, B, T]` of tokens, and `[K, B]` of layers without positions."""
        rows, tracer = batch_size(batch), self.tracer
        measured, target, calls = tracer.forward(watched_modules(list(tracer.units)), batch)
        if measured.tokens is None:
            raise CaptureError(
                f"the task has no tokens: {tracer.task.describe()}",
                code="capture.no_tokens",
                fix="Use gk.LanguageModeling, or a task whose measure returns tokens [B, T].",
            )
        fill(calls, target)
        by_module, tokens = calls_by_module(calls), measured.tokens.shape[1]
        count = len(next(iter(self.directions.values())))
        values = target.new_zeros(count, rows, tokens, dtype=torch.float64)
        rest = target.new_zeros(count, rows, dtype=torch.float64)
        without: list[LayerUnit] = []
        with torch.no_grad():
            for unit in tracer.units:
                own, along = calls_of(unit, by_module), self.directions[unit]
                parts = token_products(unit, own, along, rows=rows, tokens=tokens)
                if parts is None:
                    without.append(unit)
                else:
                    values += parts
                    self.layers[unit.name] = None
        pieces = {}
        if without:
            pieces = dataclasses.replace(tracer, units=without).run(batch).pieces
        with torch.no_grad():
            for unit, piece in pieces.items():
                factors = piece.rows.widened()
                along = self.directions[unit].to(factors.example)
                rest += dot_directions(piece.form, factors, along, scratch=64 << 20)
                self.rest_layers[unit.name] = None
        slopes = tracer.loss_slopes(measured) if self.of_losses else None
        if slopes is not None:
            values, rest = values * slopes.unsqueeze(1), rest * slopes
        return values, rest


def _dense_directions(
    store: Store,
    train: Gradients,
    directions: Mapping[str, Tensor],
    forms: Mapping[LayerUnit, AnyForm],
    device: torch.device,
) -> dict[LayerUnit, Tensor]:
    """Return dense directions `[K, P]` of each layer."""
    fingerprints = {basis_of(form) for form in train.forms.values()} - {None}
    bases = [load_basis(store, key) for key in store.bases()] if fingerprints else []
    basis = next((one for one in bases if one and one.fingerprint in fingerprints), None)
    if fingerprints and basis is None:
        raise CaptureError(
            "the basis of these coordinates is not in the store",
            code="capture.basis_missing",
            path=store.location,
            fix="Use the store that the rows were captured in.",
        )
    dense = {}
    for unit, form in forms.items():
        dense[unit] = directions[unit.name].to(device)
        if basis_of(train.forms[unit.name]) is not None and basis is not None:
            dense[unit] = basis.layers[unit.name].pulled_back(form, dense[unit])
    return dense


def _captured_batches(train: Gradients, batches: Batches) -> Iterator[tuple[Any, Any]]:
    """Yield ids and batches of a loader, after checking that the contents are those of the capture."""
    known = None
    if "example" in train.block.names:
        known = RowFingerprints.of(train.ids, train.block.column("example"))
    for own, batch in batches:
        changed = own[:0] if known is None else known.changed(own, digests(batch))
        if len(changed):
            raise CaptureError(
                f"the data of sample {changed[0]} has changed since {train.key.split} was captured",
                code="capture.rows_changed",
                fix="Pass the loader of the capture, with its loader_ids= and columns=.",
            )
        yield own, without_columns(batch)


def _chosen_rows(
    delivered: Iterator[tuple[Any, Any]], ids: np.ndarray[Any, Any]
) -> Iterator[tuple[list[int], Any]]:
    """Yield the rows with these ids, consecutive ones together."""
    missing = {int(number) for number in ids}
    for own, batch in delivered:
        at = [row for row, number in enumerate(own.tolist()) if number in missing]
        missing -= {int(own[row]) for row in at}
        begin = 0
        for end in range(1, len(at) + 1):
            if end == len(at) or at[end] != at[end - 1] + 1:
                start, stop = at[begin], at[end - 1] + 1
                yield own[start:stop].tolist(), rows_of(batch, start, stop)
                begin = end
        if not missing:
            return
    raise CaptureError(
        f"the loader does not deliver all requested rows: no sample {sorted(missing)[:5]}",
        code="capture.rows_missing",
        fix="Pass the loader that the rows were captured from.",
    )


def _check_task(train: Gradients, task: object) -> None:
    """Raise unless the task is that of the capture."""
    if not isinstance(task, Task):
        raise CaptureError(
            f"task must be a gk.Task, not {type(task).__name__}", code="capture.not_a_task"
        )
    captured = train.block.schema.fingerprints.get("task")
    if captured != task.describe():
        raise CaptureError(
            f"{train.key.split} was captured with another task",
            code="capture.other_task",
            found=task.describe(),
            expected=str(captured),
        )
