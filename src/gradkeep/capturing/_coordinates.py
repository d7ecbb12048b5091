"""Compressed captures: the basis of coordinates, its place in the store, and the maker of rows."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

import gradkeep.store as gs
from gradkeep._budgets import format_bytes
from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._choice import (
    block_sizes,
    choose_coordinates,
    leading_layers,
    measure_agreement,
    moment_bytes,
    random_coordinates,
    worth_keeping,
)
from gradkeep.capturing._first_batch import rows_within
from gradkeep.capturing._keeping import arrays_of
from gradkeep.capturing._loader import without_columns
from gradkeep.capturing._moments import measure_moments
from gradkeep.capturing._rows import RowMaker, measured_values, run_tracer, traced_fingerprints
from gradkeep.capturing._tracer import Reducer
from gradkeep.capturing.rules._layers import LayerGradients
from gradkeep.capturing.rules._rules import DENSE_RULES
from gradkeep.errors import CaptureError, NotSealedError
from gradkeep.factors._bits import PACKED, BitRows, Bits, bit_scales, bits_told, packed_bits
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._weights import BlockProjection, LayerProjection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._first_batch import Keep, PreparedCapture
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._loader import Batches
    from gradkeep.capturing._rows import Values
    from gradkeep.capturing._tracer import Traced, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._bits import BitWidth
    from gradkeep.factors._form import GradientRows
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import BasisKey, Encoding, Store

_FORMAT = 1
_PARTS = ("left", "right", "weights", "chosen")
_BLOCKS = "blocks of "


def sample_batches(batches: Batches, rows: int, most: int) -> Iterator[Any]:
    """About `rows` rows, a few of each of some evenly spaced batches, at most `most` at a time.

    Rows are taken from the first 64 times as many: a data set may be too long to go through. Rows
    that lie together are taken together: they have been padded to one length.
    """
    size = batch_size(batches.first)
    # Of a loader that does not know its rows, the first: beyond them there may be none.
    total = rows if batches.num_rows is None else min(batches.num_rows, rows * 64)
    there = max(1, math.ceil(total / size))
    each = min(size, max(4, math.ceil(rows / there)))
    wanted = min(there, math.ceil(rows / each))
    chosen = {int((2 * number + 1) * there / (2 * wanted)) for number in range(wanted)}
    for number, (_, batch) in enumerate(batches):
        if number in chosen:
            have = batch_size(batch)
            first = (number * 7) % max(1, have - each + 1)
            last = min(have, first + each)
            for start in range(first, last, most):
                yield rows_of(without_columns(batch), start, min(last, start + most))
        if number == max(chosen):
            return


@dataclass(frozen=True, slots=True, eq=False)
class CaptureBasis:
    """The maps of all kept layers, with what they were found from."""

    layers: Mapping[str, LayerProjection]
    settings: str
    """`Keep.described()` of what it was made for."""
    weights: str
    """The fingerprint of the weights that it was found at."""
    task: str
    rows: int
    """With how many rows."""
    group: int = 0
    """Coordinates that share a byte; 0: none do."""
    agreement: float | None = None
    """The mean rank correlation of kept and full scores on some of them; None: not measured."""
    compared: int = 0
    """How many rows those were."""
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", self._digest())

    @property
    def whitened(self) -> bool:
        """Whether its coordinates are divided by the roots of eigenvalues."""
        return bool(json.loads(self.settings)["coordinates"] == "eigen")

    @property
    def size(self) -> int:
        """Coordinates of all layers together."""
        return sum(layer.size for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all maps."""
        return sum(layer.nbytes for layer in self.layers.values())

    def told(self, bits: int) -> str:
        """What is kept of a row, and how far it can be trusted."""
        white = "whitened" if self.whitened else "random"
        kept = f"{self.size} {white} coordinates, {bits_told(bits, self.group if bits == 1 else 0)}"
        if self.agreement is None:
            return f"{kept}, not compared with whole gradients"
        return (
            f"{kept}, whose ranks agree {self.agreement:.2f} with those of the same layers' whole "
            f"gradients on {self.compared} rows"
        )

    def _digest(self) -> str:
        digest = xxhash.xxh3_128(
            f"{_FORMAT}\0{self.settings}\0{self.weights}\0{self.task}\0{self.group}".encode()
        )
        for name, values in self._arrays().items():
            digest.update(name.encode("utf-8", "surrogatepass"))
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, layer in self.layers.items():
            for at, block in enumerate(layer.blocks):
                for part in _PARTS if block is not None else ():
                    values = getattr(block, part)
                    if values is not None:
                        found[f"{name}.{at}.{part}"] = values.cpu().numpy()
        return found


def save_basis(store: Store, key: BasisKey, basis: CaptureBasis) -> None:
    """Put a basis into the store; what an interrupted run left of another one is replaced."""
    values = basis._arrays()
    schema = gs.Schema(
        arrays=tuple(
            gs.Array(name, dtype=str(array.dtype), shape=array.shape, kind="data")
            for name, array in values.items()
        ),
        num_rows=1,
        fingerprints={
            "format": _FORMAT,
            "basis": basis.fingerprint,
            "settings": basis.settings,
            "weights": basis.weights,
            "task": basis.task,
            "rows": basis.rows,
            "group": basis.group,
            "agreement": basis.agreement,
            "compared": basis.compared,
            **{f"{_BLOCKS}{name}": len(layer.blocks) for name, layer in basis.layers.items()},
        },
    )
    if store.has(key):
        store.delete(key)
    with store.write(key, schema) as writer:
        writer.append(np.zeros(1, np.int64), {name: array[None] for name, array in values.items()})


def load_basis(store: Store, key: BasisKey) -> CaptureBasis | None:
    """The basis of that name; None if there is none, or none that was finished."""
    if not store.has(key):
        return None
    try:
        block = store.read(key)
    except NotSealedError:
        return None
    facts: Any = block.schema.fingerprints
    if facts.get("format") != _FORMAT:
        raise CaptureError(
            f"this version does not know format {facts.get('format')} of a basis",
            path=block.path,
            fix="open it with a later gradkeep",
        )
    row = block.read_rows(np.zeros(1, np.int64), list(block.names))
    arrays = {name: torch.from_numpy(np.array(row[name])[0]) for name in block.names}

    def projection(name: str) -> BlockProjection | None:
        parts = [arrays.get(f"{name}.{part}") for part in _PARTS]
        return None if parts[0] is None else BlockProjection(*parts)  # type: ignore[arg-type]

    layers = {}
    for fact, count in facts.items():
        if fact.startswith(_BLOCKS):
            name = fact.removeprefix(_BLOCKS)
            blocks = tuple(projection(f"{name}.{at}") for at in range(int(count or 0)))
            layers[name] = LayerProjection(blocks)
    return CaptureBasis(
        layers=layers,
        settings=str(facts.get("settings")),
        weights=str(facts.get("weights")),
        task=str(facts.get("task")),
        rows=int(facts.get("rows") or 0),
        group=int(facts.get("group") or 0),
        agreement=facts.get("agreement"),
        compared=int(facts.get("compared") or 0),
        fingerprint=str(facts.get("basis")),
    )


def find_basis(
    store: Store,
    key: BasisKey,
    keep: Keep | None,
    prepared: PreparedCapture,
    batches: Batches,
    device: torch.device,
    *,
    weights: str,
    all_layers: bool,
    budget: int | None = None,
    footprint: int = 0,
) -> CaptureBasis:
    """The basis that the store has for these captures, or else a new one, which is put there.

    A new one takes a pass over a sample of rows of the loader, forward and back, and a few more.
    Without a `keep` any basis will do. `all_layers` says that the user chose the layers. Within a
    `budget` of bytes, each sample that runs takes `footprint` bytes.
    """
    path, task = store.backend.describe(key.folder), prepared.tracer.task
    basis = load_basis(store, key)
    if basis is not None:
        if keep is not None and basis.settings != keep.described():
            raise CaptureError(
                f"captures called {key.capture!r} are kept in another way at this checkpoint",
                path=path,
                found=re.sub(r"[{}\"]", "", basis.settings),
                expected=re.sub(r"[{}\"]", "", keep.described()),
                fix="pass the same keep=, or another name= for another way",
            )
        if basis.weights != weights and (keep is None or keep.basis is None):
            raise CaptureError(
                "the basis of this checkpoint was found with other weights",
                path=path,
                fix="name the checkpoint otherwise, or load the weights that it had",
            )
        if basis.task not in (task.describe(), task.trained_as()):
            raise CaptureError(
                f"the basis was found with another task, {basis.task}", path=path, fix="pass name="
            )
        _check_layers(basis, prepared, path)
        return basis
    if keep is None or keep.basis is not None:
        raise CaptureError(
            "there is no basis to keep coordinates in",
            path=path,
            fix="capture the training rows first, with keep='4KiB' and the same name=",
        )
    positions = max((keeping.positions for keeping in prepared.kept), default=1.0)
    rows = keep.sample(positions, batches.num_rows)
    tracer, every = prepared.tracer, list(prepared.tracer.units)
    if not all_layers:
        tracer = dataclasses.replace(tracer, units=worth_keeping(every, keep))
    held = int(moment_bytes(prepared.pieces[unit].form for unit in tracer.units))
    most = rows if budget is None else rows_within(budget, footprint, beside=held)
    moments = measure_moments(tracer, sample_batches(batches, rows, most), device)
    agreement, compared = None, 0
    if keep.whitened:
        layers = leading_layers(moments, keep, every)
        chosen = choose_coordinates(layers, keep)
        sample = sample_batches(batches, rows, most)
        agreement, compared = measure_agreement(
            tracer, sample, layers, chosen, keep, device, budget=budget
        )
    else:
        chosen = random_coordinates(moments.forms, keep)
    if not chosen.layers:
        raise CaptureError(
            f"{format_bytes(keep.row_bytes)} are too few for a coordinate of any layer",
            fix="keep more bytes, or choose fewer layers with layers=",
        )
    basis = CaptureBasis(
        layers={unit.name: projection for unit, projection in chosen.layers.items()},
        group=chosen.group,
        settings=keep.described(),
        weights=weights,
        task=task.describe(),
        rows=moments.rows,
        agreement=agreement,
        compared=compared,
    )
    save_basis(store, key, basis)
    return basis


def _check_layers(basis: CaptureBasis, prepared: PreparedCapture, path: str) -> None:
    sizes = {unit.name: block_sizes([p.form]) for unit, p in prepared.pieces.items()}
    for name, layer in basis.layers.items():
        own = sizes.get(name, [])
        for at, block in enumerate(layer.blocks):
            sides = block and (*block.left.shape[:2], block.right.shape[1])
            if sides is not None and own[at : at + 1] != [sides]:
                raise CaptureError(
                    f"the basis does not fit layer {name} of this model",
                    path=path,
                    fix="capture the model that the basis was found with, or pass name=",
                )


SCALE = "gradient.scale"
CODES: dict[BitWidth, Encoding] = {
    1: "plain",
    4: "plain",
    8: "int8-scaled",
    16: "float16-scaled",
    32: "plain",
}
"""How coordinates of so many bits are encoded."""


@dataclass(slots=True, eq=False, kw_only=True)
class CoordinateMaker(RowMaker):
    """Makes rows of coordinates in a basis, some bits each."""

    tracer: Tracer
    """Of the units that the basis has coordinates of."""
    basis: CaptureBasis
    bits: BitWidth
    recompute: MemoryBudget | None
    left_out: tuple[str, ...]

    @property
    def joined(self) -> int:
        """One batch: rows take long to make again."""
        return 1

    def project(self, unit: LayerUnit, dense: Tensor) -> Tensor:
        """Coordinates of a unit's dense gradients, as an audit compares them."""
        form = Dense(unit.parameters, "", dense.shape[1])
        return _values(self._coordinates(unit, LayerGradients(form, DenseRows(dense))))

    def _coordinates(
        self, unit: LayerUnit, piece: LayerGradients, measured: Measured | None = None
    ) -> LayerGradients:
        """The coordinates `[B, k]` of a unit's gradients."""
        assert self.tracer.proofs is not None
        # Blocks of the form that the projection was found with.
        blocks = self.tracer.proofs.forms[unit].weight_blocks()
        projection = self.basis.layers[unit.name]
        values = projection.applied(piece.form, piece.rows.widened(), blocks).float()
        return LayerGradients(Dense(piece.form.parameters, "", values.shape[1]), DenseRows(values))

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        units = self.tracer.units
        light = frozenset(m for u in units if u.rule not in DENSE_RULES for m in u.modules)
        recompute = None if alone else self.recompute
        reducer = Reducer(units, self._coordinates)
        return run_tracer(self.tracer, batch, reducer, self.device, recompute, light)

    def _values(self, measured: Measured) -> Values:
        values = measured_values(measured)
        values.pop("token_loss", None)  # four bytes a token: often more than all coordinates
        return values

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        group = self.basis.group if self.bits == 1 else 0
        with torch.no_grad():
            parts = {unit: _values(traced.pieces[unit]) for unit in self.tracer.units}
            whole = torch.cat(list(parts.values()), 1)
            scales = bit_scales(whole, self.bits, group)
            rows: dict[str, GradientRows] = {
                unit.name: BitRows(part)
                if scales is None
                else BitRows(packed_bits(part, scales, self.bits, group), scales)
                for unit, part in parts.items()
            }
        values["norm"] = torch.linalg.vector_norm(whole, dim=1).cpu().numpy()
        gradients: dict[str, Any] = {}
        for keeping in self.kept:
            for name, tensor in keeping.form.tensors(rows[keeping.unit.name]).items():
                gradients[name] = tensor.cpu().numpy()
        return gradients, rows

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Whose gradients these are, and in which basis."""
        facts = traced_fingerprints(self.tracer, values, self.left_out)
        return facts | {"basis": self.basis.fingerprint, "kept": self.basis.told(self.bits)}

    def notes(self) -> list[str]:
        """That ranks hardly agree with those of whole gradients, where that was seen."""
        agreement = self.basis.agreement
        if agreement is None or agreement >= 0.3:
            return []
        return [
            (
                f"ranks from what is kept agree only {agreement:.2f} with those of whole gradients on "
                f"{self.basis.compared} rows: keep more bytes, or find the basis with more rows "
                "(gk.Keep(..., rows=))"
            )
        ]

    def facts(self) -> list[str]:
        """What is kept, and which layers are not."""
        facts = [f"kept {self.basis.told(self.bits)}"]
        if self.left_out:
            some = ", ".join(self.left_out[:4]) + (" ..." if len(self.left_out) > 4 else "")
            facts.append(
                f"{len(self.left_out)} layers have no coordinate among the kept ones ({some}); "
                "layers= chooses layers, and more bytes keep more of them"
            )
        return facts


def coordinate_keeping(
    exact: LayerKeeping,
    size: int,
    bits: BitWidth,
    group: int,
    *,
    is_first: bool,
    fingerprint: str = "",
    whitened: bool = False,
) -> LayerKeeping:
    """A layer kept as so many coordinates, in the basis of a fingerprint; the first has the scale of all."""
    unit, packed = exact.unit, bits in PACKED
    name, scale, group = f"{unit.name}.bits", SCALE if packed else "", group if packed else 0
    form = Bits(unit.parameters, name, scale, size, bits, fingerprint, whitened, group)
    rows = BitRows(torch.zeros(1, size))
    if packed:
        rows = BitRows(packed_bits(rows.codes, torch.ones(1), bits, group), torch.ones(1))
    arrays = arrays_of(unit.name, form, rows, CODES[bits])
    own = tuple(array for array in arrays if array.name != SCALE or is_first)
    return dataclasses.replace(
        exact,
        form=form,
        storage="coordinates",
        arrays=own,
        row_bytes=sum(array.row_bytes for array in own),
        tolerance=0.0,
        places=None,
    )


def coordinate_maker(
    prepared: PreparedCapture,
    basis: CaptureBasis,
    keep: Keep | None,
    watched: dict[str, nn.Module],
    *,
    recompute: MemoryBudget | None,
    device: torch.device,
) -> CoordinateMaker:
    """What makes rows in a basis, unrounded without a number of bytes; other units are not watched."""
    bits: BitWidth = 32 if keep is None else keep.bits
    tracer = prepared.tracer
    exact = {keeping.unit: keeping for keeping in prepared.kept}
    units = [unit for unit in tracer.units if unit.name in basis.layers]
    kept = tuple(
        coordinate_keeping(
            exact[unit],
            basis.layers[unit.name].size,
            bits,
            basis.group,
            is_first=unit is units[0],
            fingerprint=basis.fingerprint,
            whitened=basis.whitened,
        )
        for unit in units
    )
    return CoordinateMaker(
        tracer=dataclasses.replace(tracer, units=units),
        basis=basis,
        bits=bits,
        watched=watched,
        recompute=recompute,
        device=device,
        kept=kept,
        left_out=tuple(unit.name for unit in tracer.units if unit.name not in basis.layers),
    )


def _values(piece: LayerGradients) -> Tensor:
    assert isinstance(piece.rows, DenseRows)
    return piece.rows.values
