"""Compressed captures: the basis of coordinates, its storage, and the rows in that basis."""

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
from gradkeep.capturing._batches import batch_size, rows_of
from gradkeep.capturing._choice import (
    block_sizes,
    choose_coordinates,
    default_layers,
    find_leading_layers,
    measure_agreement,
    measure_moments,
    moment_bytes,
    random_coordinates,
)
from gradkeep.capturing._first_batch import rows_within
from gradkeep.capturing._loader import without_columns
from gradkeep.capturing._readiness import device_of
from gradkeep.capturing._rows import RowMaker, measured_values
from gradkeep.capturing._storage import arrays_of
from gradkeep.capturing._tracer import Reducer
from gradkeep.capturing.rules._layers import LayerGradients
from gradkeep.capturing.rules._rules import DENSE_RULES
from gradkeep.errors import CaptureError, NotSealedError
from gradkeep.factors._bits import (
    PACKED,
    BitRows,
    Bits,
    bit_scales,
    describe_bits,
    largest_in_groups,
    packed_bits,
)
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._weights import BlockProjection, LayerProjection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from gradkeep.capturing._first_batch import CaptureSettings, Keep, PreparedCapture
    from gradkeep.capturing._loader import Batches
    from gradkeep.capturing._rows import Values
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing._tracer import Traced
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._bits import BitWidth
    from gradkeep.factors._form import GradientRows
    from gradkeep.store import BasisKey, Encoding, Store

_FORMAT = 1
_PARTS = {
    "left": "row_vectors",
    "right": "col_vectors",
    "weights": "weights",
    "chosen": "chosen",
}
"""Array names in the store, and the fields of `BlockProjection`."""
_FACTS = ("settings", "weights", "task", "rows", "group", "agreement", "compared")
"""Fields of `CaptureBasis` that are stored beside its arrays."""
_BLOCKS = "blocks of "


def sample_batches(batches: Batches, rows: int, most: int) -> Iterator[Any]:
    """Yield about `rows` rows, a few of each of some evenly spaced batches, at most `most` at a time.

    Only the first 64 times as many rows are considered: a data set may be too long to read. Neighboring
    rows are taken together: they are padded to one length.
    """
    size = batch_size(batches.first)
    # A loader of unknown length: take the first rows, there may be no others.
    total = rows if batches.num_rows is None else min(batches.num_rows, rows * 64)
    available = max(1, math.ceil(total / size))
    each = min(size, max(4, math.ceil(rows / available)))
    count = min(available, math.ceil(rows / each))
    chosen = {int((2 * number + 1) * available / (2 * count)) for number in range(count)}
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
    """Projections of all captured layers, and how they were computed."""

    layers: Mapping[str, LayerProjection]
    settings: str
    """`Keep.describe()` of the settings."""
    weights: str
    """Fingerprint of the weights."""
    task: str
    rows: int
    """Number of rows that it was computed from."""
    group: int = 0
    """Coordinates that share a byte; 0 if none do."""
    agreement: float | None = None
    """Mean rank correlation of compressed and full scores; None if not measured."""
    compared: int = 0
    """Number of rows in that comparison."""
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", self._digest())

    @property
    def whitened(self) -> bool:
        """Return True if coordinates are divided by the roots of eigenvalues."""
        return bool(json.loads(self.settings)["coordinates"] == "eigen")

    @property
    def size(self) -> int:
        """Number of coordinates of all layers."""
        return sum(layer.size for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all projections."""
        return sum(layer.nbytes for layer in self.layers.values())

    def summary(self, bits: int) -> str:
        """Describe what is stored of a row, and how far its ranks agree with full gradients."""
        white = "whitened" if self.whitened else "random"
        text = f"{self.size} {white} coordinates, {describe_bits(bits, self.group if bits == 1 else 0)}"
        if self.agreement is None:
            return f"{text}, not compared with whole gradients"
        return (
            f"{text}, whose ranks agree {self.agreement:.2f} with those of the same layers' whole "
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
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name, layer in self.layers.items():
            for at, block in enumerate(layer.blocks):
                for part, field_name in _PARTS.items() if block is not None else ():
                    values = getattr(block, field_name)
                    if values is not None:
                        arrays[f"{name}.{at}.{part}"] = values.cpu().numpy()
        return arrays


def save_basis(store: Store, key: BasisKey, basis: CaptureBasis) -> None:
    """Write a basis to the store, replacing one that an interrupted run left there."""
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
            **{name: getattr(basis, name) for name in _FACTS},
            **{f"{_BLOCKS}{name}": len(layer.blocks) for name, layer in basis.layers.items()},
        },
    )
    if store.has(key):
        store.delete(key)
    with store.write(key, schema) as writer:
        writer.append(np.zeros(1, np.int64), {name: array[None] for name, array in values.items()})


def load_basis(store: Store, key: BasisKey) -> CaptureBasis | None:
    """Read a basis; None if it does not exist or was not finished."""
    if not store.has(key):
        return None
    try:
        block = store.read(key)
    except NotSealedError:
        return None
    facts: Any = block.schema.fingerprints
    if facts.get("format") != _FORMAT:
        raise CaptureError(
            f"the basis has an unknown format, {facts.get('format')}",
            code="capture.basis_format",
            path=block.path,
            fix="Open it with a later version of gradkeep.",
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
    known = {name: facts[name] for name in _FACTS if name in facts}
    return CaptureBasis(layers, fingerprint=str(facts.get("basis")), **known)


def find_basis(
    store: Store,
    key: BasisKey,
    settings: CaptureSettings,
    prepared: PreparedCapture,
    batches: Batches,
    weights: str,
    *,
    budget: int | None = None,
    footprint: int = 0,
) -> CaptureBasis:
    """Load the basis of these captures from the store, or compute and save a new one.

    A new one takes a forward and backward pass over a sample of rows, and a few more. Without a number of
    bytes any stored basis is accepted. `weights` is their fingerprint; `footprint` is the bytes of each
    sample that runs, for a `budget` in bytes.
    """
    path, task = store.backend.describe(key.folder), prepared.tracer.task
    keep, device = settings.compressed, device_of(prepared.tracer.model)
    basis = load_basis(store, key)
    if basis is not None:
        is_own = keep is None or keep.basis is None
        checks = {
            "keep": keep is None or basis.settings == keep.describe(),
            "weights": basis.weights == weights or not is_own,
            "task": basis.task in (task.describe(), task.trained_as()),
            "layers": _has_layers(basis, prepared),
        }
        other = next((name for name, is_same in checks.items() if not is_same), None)
        if other is not None:
            raise CaptureError(
                f"the basis of captures called {key.capture!r} has other {other} at this checkpoint",
                code="capture.other_keep" if other == "keep" else f"capture.basis_{other}",
                path=path,
                found=re.sub(r"[{}\"]", "", f"{basis.settings}, {basis.task}"),
                fix="Pass the same model, task and keep=, or another name=.",
            )
        return basis
    if keep is None or keep.basis is not None:
        raise CaptureError(
            "there is no basis for coordinates",
            code="capture.no_basis",
            path=path,
            fix="Capture the training rows first, with keep='4KiB' and the same name=.",
        )
    positions = max((layer.positions for layer in prepared.layers), default=1.0)
    rows = keep.sample(positions, batches.num_rows)
    tracer, every = prepared.tracer, list(prepared.tracer.units)
    if settings.layers is None:
        tracer = dataclasses.replace(tracer, units=default_layers(every, keep))
    held = int(moment_bytes(prepared.pieces[unit].form for unit in tracer.units))
    most = rows if budget is None else rows_within(budget, footprint, beside=held)
    moments = measure_moments(tracer, sample_batches(batches, rows, most), device)
    agreement, compared = None, 0
    if keep.whitened:
        layers = find_leading_layers(moments, keep, every)
        chosen = choose_coordinates(layers, keep)
        sample = sample_batches(batches, rows, most)
        agreement, compared = measure_agreement(tracer, sample, layers, chosen, keep, budget)
    else:
        chosen = random_coordinates(moments.forms, keep)
    if not chosen.layers:
        raise CaptureError(
            f"{keep.row_bytes} bytes are too few for a coordinate",
            code="capture.too_few_bytes",
            fix="Keep more bytes per row with keep=.",
        )
    basis = CaptureBasis(
        layers={unit.name: projection for unit, projection in chosen.layers.items()},
        group=chosen.group,
        settings=keep.describe(),
        weights=weights,
        task=task.describe(),
        rows=moments.rows,
        agreement=agreement,
        compared=compared,
    )
    save_basis(store, key, basis)
    return basis


def _has_layers(basis: CaptureBasis, prepared: PreparedCapture) -> bool:
    """Return True if the model has all layers of the basis, in these shapes."""
    sizes = {unit.name: block_sizes([p.form]) for unit, p in prepared.pieces.items()}
    return all(
        sizes.get(name, [])[at : at + 1]
        == [(*block.row_vectors.shape[:2], block.col_vectors.shape[1])]
        for name, layer in basis.layers.items()
        for at, block in enumerate(layer.blocks)
        if block is not None
    )


SCALE = "gradient.scale"
CODES: dict[BitWidth, Encoding] = {
    1: "plain",
    4: "plain",
    8: "int8-scaled",
    16: "float16-scaled",
    32: "plain",
}
"""Encoding of coordinates by their number of bits."""


@dataclass(slots=True, eq=False, kw_only=True)
class CoordinateMaker(RowMaker):
    """Compute rows of coordinates in a basis, some bits each."""

    basis: CaptureBasis
    bits: BitWidth

    def project(self, unit: LayerUnit, dense: Tensor) -> Tensor:
        """Project a unit's dense gradients `[K, P]`, for an audit."""
        form = Dense(unit.parameters, "", dense.shape[1])
        return _values(self._coordinates(unit, LayerGradients(form, DenseRows(dense))))

    def _coordinates(
        self, unit: LayerUnit, piece: LayerGradients, measured: Measured | None = None
    ) -> LayerGradients:
        """Compute the coordinates `[B, k]` of a unit's gradients."""
        assert self.tracer.proofs is not None
        # Blocks of the form that the projection was built for.
        blocks = self.tracer.proofs.forms[unit].weight_blocks()
        projection = self.basis.layers[unit.name]
        values = projection.applied(piece.form, piece.rows.widened(), blocks).float()
        return LayerGradients(Dense(piece.form.parameters, "", values.shape[1]), DenseRows(values))

    def _reducer(self, *, alone: bool) -> Reducer:
        return Reducer(self.tracer.units, self._coordinates)

    def _light(self) -> frozenset[nn.Module]:
        units = [unit for unit in self.tracer.units if unit.rule not in DENSE_RULES]
        return frozenset(module for unit in units for module in unit.modules)

    def _values(self, measured: Measured) -> Values:
        values = measured_values(measured)
        values.pop("token_loss", None)  # four bytes per token are often more than all coordinates
        return values

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        group = self.basis.group if self.bits == 1 else 0
        with torch.no_grad():
            parts = {unit.name: _values(traced.pieces[unit]) for unit in self.tracer.units}
            rows: dict[str, GradientRows] = dict(self._rounded(parts, group))
            lengths = [torch.linalg.vector_norm(part, dim=1) for part in parts.values()]
            norms = torch.linalg.vector_norm(torch.stack(lengths, 1), dim=1)
        values["norm"] = norms.cpu().numpy()
        gradients: dict[str, Any] = {}
        for layer in self.layers:
            for name, tensor in layer.form.tensors(rows[layer.unit.name]).items():
                gradients[name] = tensor.cpu().numpy()
        return gradients, rows

    def _rounded(self, parts: Mapping[str, Tensor], group: int) -> dict[str, BitRows]:
        """Round the coordinates `[B, k]` of all layers, with one scale per row."""
        if group:
            groups = {name: largest_in_groups(part, group) for name, part in parts.items()}
            scale = torch.cat([largest for _, largest in groups.values()], 1).mean(1)
            return {name: BitRows(codes, scale) for name, (codes, _) in groups.items()}
        scales = bit_scales(torch.cat(list(parts.values()), 1), self.bits)
        if scales is None:
            return {name: BitRows(part) for name, part in parts.items()}
        return {
            name: BitRows(packed_bits(part, scales, self.bits), scales)
            for name, part in parts.items()
        }

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Return facts that identify the gradients and their basis."""
        facts = RowMaker.fingerprints(self, values)
        return facts | {"basis": self.basis.fingerprint, "kept": self.basis.summary(self.bits)}

    def notes(self) -> list[str]:
        """Warn if ranks hardly agree with those of full gradients."""
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
        """Describe what is stored, and which layers are not."""
        facts = [f"kept {self.basis.summary(self.bits)}"]
        if self.skipped:
            some = ", ".join(self.skipped[:4]) + (" ..." if len(self.skipped) > 4 else "")
            facts.append(
                f"{len(self.skipped)} layers have no coordinate among the kept ones ({some}); "
                "layers= chooses layers, and more bytes keep more of them"
            )
        return facts


def coordinate_storage(
    exact: LayerStorage,
    size: int,
    bits: BitWidth,
    group: int,
    *,
    is_first: bool,
    fingerprint: str = "",
    whitened: bool = False,
) -> LayerStorage:
    """Describe the storage of a layer as `size` coordinates; the first layer holds the scale of all.

    `fingerprint` is that of the basis.
    """
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
    common: Mapping[str, Any],
) -> CoordinateMaker:
    """Build the maker of rows in a basis; without `keep` coordinates are not rounded.

    `common` holds the fields that every maker has.
    """
    bits: BitWidth = 32 if keep is None else keep.bits
    tracer = prepared.tracer
    exact = {layer.unit: layer for layer in prepared.layers}
    units = [unit for unit in tracer.units if unit.name in basis.layers]
    layers = tuple(
        coordinate_storage(
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
        layers=layers,
        **common,
        skipped=tuple(unit.name for unit in tracer.units if unit not in units),
    )


def _values(piece: LayerGradients) -> Tensor:
    assert isinstance(piece.rows, DenseRows)
    return piece.rows.values
