"""Finding the basis of a compressed capture: the store's, or one from some rows of the loader."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep._budgets import format_bytes
from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._footprint import rows_within
from gradkeep.capturing.coordinates._agreement import measure_agreement
from gradkeep.capturing.coordinates._basis import CaptureBasis, load_basis, save_basis
from gradkeep.capturing.coordinates._choice import (
    choose_coordinates,
    leading_layers,
    moment_bytes,
    random_coordinates,
    worth_keeping,
)
from gradkeep.capturing.coordinates._moments import measure_moments
from gradkeep.capturing.coordinates._sample import sample_batches
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._loader import Batches
    from gradkeep.capturing.coordinates._keep import Keep
    from gradkeep.factors._form import AnyForm
    from gradkeep.store import BasisKey, Store


@dataclass(frozen=True, slots=True, eq=False)
class BasisRequest:
    """Which basis is needed."""

    store: Store
    key: BasisKey
    keep: Keep | None
    """None: whichever there is."""
    weights: str
    """The fingerprint of the model's weights."""
    task: str
    trained_as: str
    """The task that training rows have, if a query asks for a part of it."""
    chosen: bool
    """Whether the user chose the layers."""
    budget: int | None = None
    """Bytes of memory that finding it may take."""
    footprint: int = 0
    """Bytes of one sample that runs, if there is a budget."""


def find_basis(
    request: BasisRequest, prepared: PreparedCapture, batches: Batches, device: torch.device
) -> CaptureBasis:
    """The basis that the store has for these captures, or else a new one, which is put there."""
    found = load_basis(request.store, request.key)
    if found is not None:
        _check(request, found, prepared)
        return found
    if request.keep is None or request.keep.basis is not None:
        raise CaptureError(
            "there is no basis to keep coordinates in",
            path=request.store.backend.describe(request.key.folder),
            fix="capture the training rows first, with keep='4KiB' and the same name=",
        )
    positions = max((keeping.positions for keeping in prepared.kept), default=1.0)
    sample = request.keep.sample(positions, batches.num_rows)
    made = make_basis(request, request.keep, prepared, batches, device, sample=sample)
    save_basis(request.store, request.key, made)
    return made


def make_basis(
    request: BasisRequest,
    keep: Keep,
    prepared: PreparedCapture,
    batches: Batches,
    device: torch.device,
    *,
    sample: int,
) -> CaptureBasis:
    """A basis from a sample of rows of the loader; a pass over them, forward and back, and a few more."""
    tracer, every = prepared.tracer, list(prepared.tracer.units)
    if not request.chosen:
        tracer = dataclasses.replace(tracer, units=worth_keeping(every, keep))
    forms = [prepared.pieces[unit].form for unit in tracer.units]
    moments = measure_moments(tracer, _sample(request, batches, sample, forms), device)
    agreement, compared = None, 0
    if keep.whitened:
        layers = leading_layers(moments, keep, every)
        chosen = choose_coordinates(layers, keep)
        again = _sample(request, batches, sample, forms)
        agreement, compared = measure_agreement(
            tracer, again, layers, chosen, keep, device, budget=request.budget
        )
    else:
        chosen = random_coordinates(moments, keep)
    if not chosen.layers:
        raise CaptureError(
            "too few bytes for a coordinate of any layer",
            found=f"{keep.room} bytes of {format_bytes(keep.row_bytes)}",
            fix="keep more bytes, or choose fewer layers with layers=",
        )
    return CaptureBasis(
        layers={unit.name: projection for unit, projection in chosen.layers.items()},
        group=chosen.group,
        settings=keep.described(),
        weights=request.weights,
        task=request.task,
        rows=moments.rows,
        agreement=agreement,
        compared=compared,
    )


def _sample(
    request: BasisRequest, batches: Batches, rows: int, forms: list[AnyForm]
) -> Iterator[Any]:
    """Some rows, no more at once than fit the budget beside the moments."""
    if request.budget is None:
        yield from sample_batches(batches, rows)
        return
    most = rows_within(request.budget, request.footprint, beside=int(moment_bytes(forms)))
    for batch in sample_batches(batches, rows):
        count = batch_size(batch)
        for start in range(0, count, most):
            yield rows_of(batch, start, min(count, start + most))


def _check(request: BasisRequest, found: CaptureBasis, prepared: PreparedCapture) -> None:
    path = request.store.backend.describe(request.key.folder)
    keep = request.keep
    if keep is not None and found.settings != keep.described():
        raise CaptureError(
            f"captures called {request.key.capture!r} are kept in another way at this checkpoint",
            path=path,
            found=_told(found.settings),
            expected=_told(keep.described()),
            fix="pass the same keep=, or another name= for another way",
        )
    if found.weights != request.weights and (keep is None or keep.basis is None):
        raise CaptureError(
            "the basis of this checkpoint was found with other weights",
            path=path,
            fix="name the checkpoint otherwise, or load the weights that it had",
        )
    if found.task not in (request.task, request.trained_as):
        raise CaptureError(
            "the basis was found with another task", path=path, found=found.task, fix="pass name="
        )
    sizes = {
        unit.name: [(b.groups, b.rows, b.cols) for b in piece.form.weight_blocks()]
        for unit, piece in prepared.pieces.items()
    }
    for name, layer in found.layers.items():
        for at, block in enumerate(layer.blocks):
            if block is None:
                continue
            sides = (block.left.shape[0], block.left.shape[1], block.right.shape[1])
            if name not in sizes or len(sizes[name]) <= at or sizes[name][at] != sides:
                raise CaptureError(
                    f"the basis does not fit layer {name} of this model",
                    path=path,
                    found=sizes.get(name, "no such layer, or one that was not chosen"),
                    expected=sides,
                    fix="capture the model that the basis was found with, or pass name=",
                )


def _told(settings: str) -> str:
    return re.sub(r"[{}\"]", "", json.dumps(json.loads(settings), sort_keys=True))
