"""Storage of each layer, as factors, dense or with its rank cut, and the arrays that hold it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing.rules._layers import LayerGradients, dense_gradients
from gradkeep.errors import CaptureError
from gradkeep.factors._bits import Bits
from gradkeep.factors._convolution import Convolution, ConvolutionRows
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._form import FactoredForm, form_to_fields
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows, places_array
from gradkeep.store import Array, Layer, Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm, GradientRows, Storage
    from gradkeep.store import Encoding
    from gradkeep.store.blocks._schema import ArrayKind


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Names of layers for which a later batch needs more than the first one did."""

    single: frozenset[str] = frozenset()
    """Captured by passes over single samples."""
    dense: frozenset[str] = frozenset()
    """Stored dense, because the shape of their factors changes."""
    ragged: frozenset[str] = frozenset()
    """Stored with any number of positions, though the first batch had one per row."""
    late: frozenset[str] = frozenset()
    """Not used by the first batch; zero in rows that do not use them."""

    def __or__(self, other: Adjustments) -> Adjustments:
        parts = {f.name: getattr(self, f.name) | getattr(other, f.name) for f in _FIELDS}
        return Adjustments(**parts)

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in _FIELDS)

    def to_text(self) -> str:
        """Serialize for a schema."""
        parts = {f.name: sorted(getattr(self, f.name)) for f in _FIELDS}
        return json.dumps({name: names for name, names in parts.items() if names}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Adjustments:
        """Parse the text of a schema; empty text means no adjustments."""
        known = {f.name for f in _FIELDS}
        try:
            fields = json.loads(text or "{}").items()
            return cls(**{name: frozenset(names) for name, names in fields if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CaptureError(
                f"the adjustments of an earlier capture cannot be read: {text[:100]}",
                code="capture.bad_adjustments",
                fix="Delete that capture, or use another name=.",
            ) from None


_FIELDS = dataclasses.fields(Adjustments)
NO_ADJUSTMENTS = Adjustments()


class BatchMismatchError(CaptureError):
    """A batch does not fit the choices made on the first one; the capture restarts, adjusted."""

    code = "capture.batch_mismatch"

    def __init__(
        self,
        message: str,
        adjustments: Adjustments = NO_ADJUSTMENTS,
        candidates: frozenset[str] = frozenset(),
        **parts: Any,
    ) -> None:
        super().__init__(message, **parts)
        self.adjustments = adjustments
        self.candidates = candidates
        """Further layers that no batch has used yet, if one of them ran for the first time."""


def no_gradients(
    unit: LayerUnit, rows: int, like: Tensor, form: AnyForm | None = None
) -> LayerGradients:
    """Return gradients of zero in a form: no positions, or the memory of a single value."""

    def no_positions(part: Outer | Lookup) -> Any:
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        if isinstance(part, Outer):
            return OuterRows(like.new_empty(0, part.d_in), like.new_empty(0, part.d_out), offsets)
        ids = torch.empty(0, dtype=torch.int64, device=like.device)
        return LookupRows(ids, like.new_empty(0, part.width), offsets)

    if isinstance(form, Tied):
        both = no_positions(form.lookup), no_positions(form.outer)
        return LayerGradients(form, TiedRows(*both))
    if isinstance(form, Lookup) or (isinstance(form, Outer) and not form.ones):
        return LayerGradients(form, no_positions(form))
    values = like.new_zeros(()).expand(rows, unit.size)
    return dense_gradients(unit.name, unit.parameters, values)


def convert_form(piece: LayerGradients, form: AnyForm) -> LayerGradients:
    """Multiply out gradients of a layer that is dense in other batches."""
    if piece.form.kind == form.kind or not isinstance(form, Dense):
        return piece
    return LayerGradients(form, DenseRows(piece.form.restore(piece.rows)))


ALIASES: dict[str, Storage | None] = {
    "exact": None,
    "auto": None,
    "factors": "factors",
    "ted": "factors",
    "half": "factors",
    "recon": "factors",
    "dense": "dense",
    "naive": "dense",
    "low rank": "low rank",
    "svd": "low rank",
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerStorage:
    """Storage of one layer, with its bytes per row in the first batch."""

    unit: LayerUnit
    form: AnyForm
    storage: Storage
    arrays: tuple[Array, ...]
    """Arrays of this layer; a shared prefix belongs to the first layer that has it."""
    row_bytes: float
    factor_bytes: float
    """Bytes of the factors in float32."""
    positions: float
    """T, the mean number of positions of a row."""
    tolerance: float = 0.0
    places: Array | None = None
    """Array of the tokens that its positions are, if rows have tokens."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense gradient in float32."""
        return 4 * self.unit.size

    def schema_layer(self) -> Layer:
        """Return the layer for a schema."""
        unit = self.unit
        return Layer(unit.name, unit.type, unit.size, form_to_fields(self.form))


def parse_storage(keep: str) -> Storage | None:
    """Return the storage with this name; None for the smallest."""
    if keep not in ALIASES:
        raise CaptureError(
            f"keep is not the name of a storage: {keep!r}",
            code="capture.unknown_keep",
            expected=", ".join(ALIASES),
            fix="Leave keep out for the smallest exact form.",
        )
    return ALIASES[keep]


def choose_storage(
    pieces: Mapping[LayerUnit, LayerGradients],
    *,
    encoding: Encoding,
    requested: Mapping[LayerUnit, Storage | None],
    tolerance: float,
    tokens: int | None = None,
) -> list[LayerStorage]:
    """Choose the smallest allowed storage of each layer, measured on the gradients of one batch.

    A tolerance above 0 allows cutting the rank. A prefix that several layers read is stored once. With
    `tokens` per sample, layers with as many positions store which tokens these are, and leave out idle
    ones.
    """
    layers: list[LayerStorage] = []
    owners: list[tuple[torch.Tensor, LayerStorage]] = []
    for unit, piece in pieces.items():
        storages: list[Storage] = ["factors", "dense"]
        if isinstance(piece.form, Dense):
            storages = ["dense"]
        elif tolerance > 0 and _as_outer(unit.name, piece) is not None:
            storages.append("low rank")
        forced = requested.get(unit)
        if forced is not None and forced in storages:
            storages = [forced]
        elif forced == "low rank" and tolerance <= 0:
            raise CaptureError(
                "keep='low rank' needs a tolerance",
                code="capture.tolerance_missing",
                fix="Pass tolerance=1e-3, the largest relative error of a gradient.",
            )
        options = [
            _build_storage(unit, piece, storage, encoding=encoding, tolerance=tolerance)
            for storage in storages
        ]
        best = min(options, key=lambda option: option.row_bytes)
        if isinstance(piece.form, Outer) and piece.source is not None:
            owner = next((o for source, o in owners if _is_same(piece.source, source)), None)
            factors = next((o for o in options if o.storage == "factors"), None)
            if owner is not None and factors is not None:
                # Another layer stores the prefix: only the suffix costs bytes.
                shared = _with_shared_prefix(factors, owner)
                best = shared if shared.row_bytes <= best.row_bytes else best
            elif best.storage == "factors":
                owners.append((piece.source, best))
        layers.append(best)
    if tokens is None:
        return layers
    return [_with_places(layer, pieces[layer.unit], tokens) for layer in layers]


def _with_places(layer: LayerStorage, piece: LayerGradients, tokens: int) -> LayerStorage:
    """Add an array of token places if positions are tokens; a shared array belongs to its owner."""
    if layer.storage != "factors" or piece.sequence != tokens:
        return layer
    name = places_array(layer.form)
    if name is None:
        return layer
    array = Array(name, dtype="int32", kind="data", layer=layer.unit.name, ragged=True)
    if name != places_array(piece.form):
        return dataclasses.replace(layer, places=array)
    return dataclasses.replace(
        layer,
        places=array,
        arrays=(*layer.arrays, array),
        row_bytes=layer.row_bytes + array.row_bytes * layer.positions + 8,
    )


def _build_storage(
    unit: LayerUnit,
    piece: LayerGradients,
    storage: Storage,
    *,
    encoding: Encoding,
    tolerance: float,
) -> LayerStorage:
    form, rows = to_storage(unit.name, piece, storage, tolerance=tolerance, hollow=True)
    arrays = arrays_of(unit.name, form, rows, encoding)
    count = max(1, len(rows))
    tokens = {name: len(values) / count for name, values in form.tensors(rows).items()}
    row_bytes = sum(
        array.row_bytes * tokens[array.name] + 8 if array.ragged else array.row_bytes
        for array in arrays
    )
    values = piece.rows.nbytes / count / piece.rows.example.element_size()
    return LayerStorage(
        unit=unit,
        form=form,
        storage=storage,
        arrays=arrays,
        row_bytes=row_bytes,
        factor_bytes=4 * values,
        positions=piece.rows.positions / count,
        tolerance=tolerance if storage == "low rank" else 0.0,
    )


def _as_outer(name: str, piece: LayerGradients) -> tuple[Outer, OuterRows] | None:
    """Return the gradients as those of a linear layer with several positions per row, if possible."""
    form, rows = piece.form, piece.rows
    if isinstance(form, Convolution) and isinstance(rows, ConvolutionRows):
        return form.as_outer(rows, prefix=f"{name}.prefix", suffix=f"{name}.suffix")
    if isinstance(form, Outer) and isinstance(rows, OuterRows) and rows.offsets is not None:
        return form, rows
    return None


def storage_of(form: AnyForm) -> Storage:
    """Return how a layer is stored."""
    if isinstance(form, Dense):
        return "dense"
    if isinstance(form, Bits):
        return "coordinates"
    return "low rank" if isinstance(form, Outer) and form.error > 0 else "factors"


def to_storage(
    name: str, piece: LayerGradients, storage: Storage, *, tolerance: float, hollow: bool = False
) -> tuple[AnyForm, GradientRows]:
    """Convert gradients to the form of their storage; `hollow` rows have sizes but no values."""
    outer = _as_outer(name, piece) if storage == "low rank" else None
    if outer is not None:
        return cut_rank(*outer, tolerance)
    if storage == "factors" or isinstance(piece.form, Dense):
        return piece.form, piece.rows
    if hollow:
        values = piece.rows.example.new_empty(len(piece.rows), piece.form.restored_size)
    else:
        values = piece.form.restore(piece.rows)
    dense = dense_gradients(name, piece.form.parameters, values)
    return dense.form, dense.rows


def rows_to_store(
    layers: Sequence[LayerStorage], pieces: Mapping[LayerUnit, LayerGradients]
) -> tuple[dict[LayerUnit, GradientRows], dict[str, Any]]:
    """Return the stored factors of a batch by layer, and their arrays by name."""
    factors: dict[LayerUnit, GradientRows] = {}
    for layer in layers:
        piece = pieces[layer.unit]
        form, rows = to_storage(layer.unit.name, piece, layer.storage, tolerance=layer.tolerance)
        _check_same(layer, form)
        factors[layer.unit] = _with_offsets(layer, rows)
    used = _drop_idle_positions(layers, factors, pieces)
    arrays: dict[str, Any] = {}
    for layer in layers:
        rows = factors[layer.unit]
        own = {array.name: array for array in layer.arrays}
        for name, values in layer.form.tensors(rows).items():
            if name in own:
                array, offsets = values.detach().cpu().numpy(), layer.form.offsets(rows, name)
                arrays[name] = array if offsets is None else Ragged(array, offsets.numpy())
        if layer.places is not None and layer.places.name in own:
            arrays[layer.places.name] = _places(pieces[layer.unit], used.get(layer.unit))
    return factors, arrays


def _places(piece: LayerGradients, used: torch.Tensor | None) -> Ragged:
    """Return the token of every stored position; -1 for batches without such a sequence."""
    count = len(piece.rows)
    total = int(piece.rows.positions)
    places = torch.full((total,), -1, dtype=torch.int32)
    if piece.sequence is not None:
        places = torch.arange(piece.sequence, dtype=torch.int32).repeat(count)
    each = torch.full((count,), total // max(1, count))
    if used is not None:
        taken = used.cpu()
        each = taken.view(count, -1).sum(1) if total else each
        places = places[taken]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)])
    return Ragged(places.numpy(), offsets.numpy())


def _drop_idle_positions(
    layers: Sequence[LayerStorage],
    factors: dict[LayerUnit, GradientRows],
    pieces: Mapping[LayerUnit, LayerGradients],
) -> dict[LayerUnit, torch.Tensor]:
    """Drop positions whose suffix is zero in every layer that shares the prefix.

    With padding, or a loss at one token, these are most positions. Returns a mask `[S]` of the remaining
    positions by layer.
    """
    used_positions: dict[LayerUnit, torch.Tensor] = {}
    groups: dict[str, dict[LayerUnit, Any]] = {}
    for layer in layers:
        if isinstance(layer.form, Outer) and layer.storage == "factors":
            groups.setdefault(layer.form.prefix, {})[layer.unit] = factors[layer.unit]
    for members in groups.values():
        owner, first = next(iter(members.items()))
        for unit, rows in members.items():
            same = _is_same(pieces[unit].source, pieces[owner].source)
            if unit is not owner and not same and not torch.equal(rows.x, first.x):
                raise BatchMismatchError(
                    f"layers {owner.name} and {unit.name} no longer read the same input",
                    Adjustments(dense=frozenset({unit.name})),
                    code="capture.prefix_not_shared",
                    fix="Capture them one by one, with layers= and another name=.",
                )
        if first.offsets is None:
            continue
        used = torch.stack([(rows.g != 0).any(1) for rows in members.values()]).any(0)
        for unit, rows in members.items():
            factors[unit] = rows.at_positions(used)
            used_positions[unit] = used
    return used_positions


def _with_shared_prefix(layer: LayerStorage, owner: LayerStorage) -> LayerStorage:
    assert isinstance(layer.form, Outer)
    assert isinstance(owner.form, Outer)
    prefix = layer.form.prefix
    own = tuple(array for array in layer.arrays if array.name != prefix)
    saved = sum(array.row_bytes for array in layer.arrays if array.name == prefix)
    ragged = any(array.ragged for array in own)
    per_row = saved * layer.positions + 8 if ragged else saved
    return dataclasses.replace(
        layer,
        form=dataclasses.replace(layer.form, prefix=owner.form.prefix),
        arrays=own,
        row_bytes=max(0.0, layer.row_bytes - per_row),
    )


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    places = [  # by storages: fake tensors have no addresses
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        for t in (one, other)
    ]
    return one is other or places[0] == places[1]


def _check_same(layer: LayerStorage, form: AnyForm) -> None:
    expected = layer.form
    if isinstance(form, Outer) and isinstance(expected, Outer):
        form = dataclasses.replace(form, prefix=expected.prefix, levels=expected.levels)
    if form != expected:
        raise BatchMismatchError(
            f"layer {layer.unit.name} has another shape in this batch than in the first one",
            Adjustments(dense=frozenset({layer.unit.name})),
            code="capture.shape_changed",
            found=form,
            expected=expected,
            fix=f"Pass keep={{{layer.unit.name!r}: 'dense'}}, whose size is fixed.",
        )


def _with_offsets(layer: LayerStorage, rows: GradientRows) -> GradientRows:
    """Add or remove the number of positions per row, as the layer's arrays require."""
    ragged = any(array.ragged for array in layer.arrays if array.name in layer.form.arrays)
    if not isinstance(rows, OuterRows) or ragged == (rows.offsets is not None):
        return rows
    if rows.offsets is None:
        return OuterRows(rows.x, rows.g, torch.arange(len(rows.x) + 1))
    if bool((rows.offsets.diff() == 1).all()):
        return OuterRows(rows.x, rows.g)
    raise BatchMismatchError(
        f"layer {layer.unit.name} has several positions per row in this batch",
        Adjustments(ragged=frozenset({layer.unit.name})),
        code="capture.several_positions",
        fix=f"Begin with longer sequences, or pass keep={{{layer.unit.name!r}: 'dense'}}.",
    )


def arrays_of(
    name: str, form: AnyForm, rows: GradientRows, encoding: Encoding
) -> tuple[Array, ...]:
    """Build the arrays that hold a layer's factors, with the shapes of these rows."""
    arrays = []
    for array, values in form.tensors(rows).items():
        whole = not values.dtype.is_floating_point
        double = values.dtype == torch.float64
        dtype = str(values.dtype).removeprefix("torch.")
        arrays.append(
            Array(
                array,
                dtype=dtype if whole or double else "float32",
                shape=tuple(values.shape[1:]),
                kind=_role(form, array),
                encoding="plain" if whole or double else encoding,
                layer=name,
                ragged=form.offsets(rows, array) is not None,
            )
        )
    return tuple(arrays)


def _role(form: AnyForm, array: str) -> ArrayKind:
    """Return what an array of a form holds."""
    if isinstance(form, Bits) or (isinstance(form, Dense) and form.sketch):
        return "projection"
    if isinstance(form, FactoredForm):
        return "suffix" if array.endswith("suffix") else "prefix"
    return "gradient"


def cut_rank(form: Outer, rows: OuterRows, tolerance: float) -> tuple[Outer, OuterRows]:
    """Return the gradients with as few positions as the relative error allows.

    gradient = G^T X = Q_g (R_g R_x^T) Q_x^T. The largest r singular values of the T x T core are kept,
    with their roots on both sides: |error| <= tolerance * |gradient| for every sample, in
    r (d_in + d_out) values. Cost: two QR and one T x T SVD per sample.
    """
    count = len(rows)
    x, g = rows.x.reshape(count, -1, rows.x.shape[1]), rows.g.reshape(count, -1, rows.g.shape[1])
    if form.bias and not form.ones:
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
    q_x, r_x = torch.linalg.qr(x.transpose(1, 2))
    q_g, r_g = torch.linalg.qr(g.transpose(1, 2))
    u, s, vh = torch.linalg.svd(r_g @ r_x.transpose(1, 2), full_matrices=False)
    tail = s.square().flip(1).cumsum(1).flip(1)
    keep = tail > tolerance**2 * tail[:, :1]
    roots = s.sqrt().unsqueeze(2)
    suffixes = roots * (q_g @ u).transpose(1, 2)
    prefixes = roots * (vh @ q_x.transpose(1, 2))
    ranks = keep.sum(1).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ranks.cumsum(0)])
    form = dataclasses.replace(form, ones=form.bias, error=tolerance)
    return form, OuterRows(prefixes[keep], suffixes[keep], offsets)
