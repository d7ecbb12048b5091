"""How each layer is kept, as factors, dense or with its rank cut, and the arrays that hold it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradkeep.capturing.rules._layers import LayerGradients, dense_gradients
from gradkeep.errors import CaptureError
from gradkeep.factors._dense import Dense, DenseRows
from gradkeep.factors._lookup import Lookup, LookupRows
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.factors._tied import Tied, TiedRows
from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.factors._form import AnyForm, GradientRows, Storage
    from gradkeep.store import Encoding


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Layers, by name, that a later batch showed to need more than the first one did."""

    single: frozenset[str] = frozenset()
    """Captured by passes over single samples."""
    dense: frozenset[str] = frozenset()
    """Kept dense, as their factors change their shape."""
    ragged: frozenset[str] = frozenset()
    """Kept with any number of positions, though the first batch had one of each row."""
    late: frozenset[str] = frozenset()
    """Not used by the first batch; zero in rows that do not use them."""

    def __or__(self, other: Adjustments) -> Adjustments:
        parts = {f.name: getattr(self, f.name) | getattr(other, f.name) for f in _FIELDS}
        return Adjustments(**parts)

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in _FIELDS)

    def to_text(self) -> str:
        """A text that a schema can hold."""
        parts = {f.name: sorted(getattr(self, f.name)) for f in _FIELDS}
        return json.dumps({name: names for name, names in parts.items() if names}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Adjustments:
        """Parse what a schema holds; nothing is adjusted where it holds no text."""
        known = {f.name for f in _FIELDS}
        try:
            given = json.loads(text) if text else {}
            return cls(**{name: frozenset(names) for name, names in given.items() if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CaptureError(
                "the adjustments of an earlier capture cannot be read",
                found=text[:100],
                fix="delete that capture, or use another name=",
            ) from None


_FIELDS = dataclasses.fields(Adjustments)
NO_ADJUSTMENTS = Adjustments()


class BatchMismatchError(CaptureError):
    """A batch that the choices made on the first one do not fit; a capture begins again adjusted."""

    def __init__(
        self,
        what: str,
        adjustments: Adjustments = NO_ADJUSTMENTS,
        candidates: frozenset[str] = frozenset(),
        **parts: Any,
    ) -> None:
        super().__init__(what, **parts)
        self.adjustments = adjustments
        self.candidates = candidates
        """Further layers that no batch has used so far, where one of them ran for the first time."""


def in_form(piece: LayerGradients, form: AnyForm) -> LayerGradients:
    """The same gradients in that form, exactly; unchanged where they have factors or it has no room."""
    if piece.form.kind == form.kind:
        return piece
    if isinstance(form, Dense):
        return LayerGradients(form, DenseRows(piece.form.restore(piece.rows)))
    if not isinstance(piece.rows, DenseRows):
        return piece
    values = piece.rows.values
    if isinstance(form, Outer) and not form.ones:
        return LayerGradients(form, _outer(form, values))
    if isinstance(form, Lookup):
        return LayerGradients(form, _lookup(form, values))
    if isinstance(form, Tied):
        return LayerGradients(form, _tied(form, values))
    return piece


def _outer(form: Outer, values: Tensor) -> OuterRows:
    """A position for each input of the layer, and one that makes up for the bias: none if it is zero."""
    rows, used = len(values), (values != 0).any(1)
    size = form.d_in * form.d_out
    shape = (-1, form.d_in, form.d_out) if form.transposed else (-1, form.d_out, form.d_in)
    weight = values[used, :size].reshape(shape)
    g = weight if form.transposed else weight.mT  # [U, d_in, d_out]
    x = torch.eye(form.d_in, dtype=values.dtype, device=values.device).expand(len(g), -1, -1)
    if form.bias:
        rest = values[used, size:] - g.sum(1)
        g = torch.cat([g, rest.unsqueeze(1)], 1)
        x = torch.cat([x, x.new_zeros(len(g), 1, form.d_in)], 1)
    each = torch.zeros(rows, dtype=torch.int64)
    each[used.cpu()] = g.shape[1]
    return OuterRows(x.reshape(-1, form.d_in), g.reshape(-1, form.d_out), _offsets(each))


def _lookup(form: Lookup, values: Tensor) -> LookupRows:
    """A token for each row of the table that is not zero."""
    table = values[:, : form.rows * form.width].reshape(len(values), form.rows, form.width)
    used = (table != 0).any(2)
    row, ids = used.nonzero(as_tuple=True)
    return LookupRows(ids, table[row, ids], _offsets(used.sum(1).cpu()))


def _tied(form: Tied, values: Tensor) -> TiedRows:
    """The table as tokens; what is left is the bias, as a position without an input."""
    size = form.lookup.rows * form.lookup.width
    outer = torch.zeros_like(values)
    outer[:, size:] = values[:, size:]
    return TiedRows(_lookup(form.lookup, values), _outer(form.outer, outer))


def _offsets(each: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)])


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
class LayerKeeping:
    """How one layer is kept, with its bytes per row as the first batch had them."""

    unit: LayerUnit
    form: AnyForm
    storage: Storage
    arrays: tuple[Array, ...]
    """Those of its own; a prefix that is shared belongs to the first layer that has it."""
    row_bytes: float
    factor_bytes: float
    """What factors in float32 would take."""
    positions: float
    """T, the mean number of positions of a row."""
    tolerance: float = 0.0
    places: Array | None = None
    """The array that says which tokens its positions are, where rows have tokens and it has positions."""

    @property
    def dense_bytes(self) -> int:
        """What the dense gradient in float32 would take."""
        return 4 * self.unit.size


def storage_named(keep: str) -> Storage | None:
    """The storage that a name asks for; None: whichever is smallest."""
    if keep not in ALIASES:
        raise CaptureError(
            f"no way to keep gradients is called {keep!r}",
            expected=", ".join(ALIASES),
            fix="leave keep out to let every layer be kept in the smallest exact way",
        )
    return ALIASES[keep]


def choose_storage(
    pieces: Mapping[LayerUnit, LayerGradients],
    *,
    encoding: Encoding,
    wanted: Mapping[LayerUnit, Storage | None],
    tolerance: float,
    tokens: int | None = None,
) -> list[LayerKeeping]:
    """The smallest way to keep each layer that is allowed, measured on the pieces of one batch.

    Cutting the rank is allowed by a tolerance above 0. A prefix that several layers read is kept
    once. Where samples have so many `tokens`, layers with as many positions keep which ones those
    are: idle ones are left out.
    """
    kept: list[LayerKeeping] = []
    owners: list[tuple[torch.Tensor, LayerKeeping]] = []
    for unit, piece in pieces.items():
        ways: list[Storage] = ["factors", "dense"]
        if piece.form.storage == "dense":
            ways = ["dense"]
        elif tolerance > 0 and _as_outer(unit.name, piece) is not None:
            ways.append("low rank")
        forced = wanted.get(unit)
        if forced is not None and forced in ways:
            ways = [forced]
        elif forced == "low rank" and tolerance <= 0:
            raise CaptureError(
                "cutting the rank needs to know how far it may err",
                fix="pass tolerance=1e-3, the largest relative error of a gradient",
            )
        options = [
            _keeping(unit, piece, way, encoding=encoding, tolerance=tolerance) for way in ways
        ]
        best = min(options, key=lambda option: option.row_bytes)
        if piece.form.prefix_array is not None and piece.source is not None:
            owner = next((o for source, o in owners if _is_same(piece.source, source)), None)
            factors = next((o for o in options if o.storage == "factors"), None)
            if owner is not None and factors is not None:
                # With its prefix kept by another layer the factors cost only the suffix.
                shared = _with_shared_prefix(factors, owner)
                best = shared if shared.row_bytes <= best.row_bytes else best
            elif best.storage == "factors":
                owners.append((piece.source, best))
        kept.append(best)
    if tokens is None:
        return kept
    return [_with_places(one, pieces[one.unit], tokens) for one in kept]


def _with_places(keeping: LayerKeeping, piece: LayerGradients, tokens: int) -> LayerKeeping:
    """The same with an array of places, if its positions are tokens; a shared one is its owner's."""
    if keeping.storage != "factors" or piece.sequence != tokens:
        return keeping
    name = keeping.form.places_array
    if name is None:
        return keeping
    array = Array(name, dtype="int32", kind="data", layer=keeping.unit.name, ragged=True)
    if name != piece.form.places_array:
        return dataclasses.replace(keeping, places=array)
    return dataclasses.replace(
        keeping,
        places=array,
        arrays=(*keeping.arrays, array),
        row_bytes=keeping.row_bytes + array.row_bytes * keeping.positions + 8,
    )


def _keeping(
    unit: LayerUnit,
    piece: LayerGradients,
    storage: Storage,
    *,
    encoding: Encoding,
    tolerance: float,
) -> LayerKeeping:
    form, rows = stored(unit.name, piece, storage, tolerance=tolerance, hollow=True)
    arrays = arrays_of(unit.name, form, rows, encoding)
    count = max(1, len(rows))
    tokens = {name: len(values) / count for name, values in form.tensors(rows).items()}
    row_bytes = sum(
        array.row_bytes * tokens[array.name] + 8 if array.ragged else array.row_bytes
        for array in arrays
    )
    values = piece.rows.nbytes / count / piece.rows.example.element_size()
    return LayerKeeping(
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
    return piece.form.as_outer(piece.rows, prefix=f"{name}.prefix", suffix=f"{name}.suffix")


def stored(
    name: str, piece: LayerGradients, storage: Storage, *, tolerance: float, hollow: bool = False
) -> tuple[AnyForm, GradientRows]:
    """The gradients of a piece in the form they are kept in; `hollow` ones have only their sizes."""
    outer = _as_outer(name, piece) if storage == "low rank" else None
    if outer is not None:
        return cut_rank(*outer, tolerance)
    if storage == "factors" or piece.form.storage == "dense":
        return piece.form, piece.rows
    if hollow:
        values = piece.rows.example.new_empty(len(piece.rows), piece.form.restored_size)
    else:
        values = piece.form.restore(piece.rows)
    dense = dense_gradients(name, piece.form.parameters, values)
    return dense.form, dense.rows


def rows_to_store(
    kept: Sequence[LayerKeeping], pieces: Mapping[LayerUnit, LayerGradients]
) -> tuple[dict[LayerUnit, GradientRows], dict[str, Any]]:
    """The factors as they are kept, by layer, and their arrays by name, for one batch."""
    factors: dict[LayerUnit, GradientRows] = {}
    for keeping in kept:
        piece = pieces[keeping.unit]
        form, rows = stored(keeping.unit.name, piece, keeping.storage, tolerance=keeping.tolerance)
        _check_same(keeping, form)
        factors[keeping.unit] = _with_offsets(keeping, rows)
    used = _drop_idle_positions(kept, factors, pieces)
    arrays: dict[str, Any] = {}
    for keeping in kept:
        rows = factors[keeping.unit]
        own = {array.name: array for array in keeping.arrays}
        for name, values in keeping.form.tensors(rows).items():
            if name in own:
                array, offsets = values.detach().cpu().numpy(), keeping.form.offsets(rows, name)
                arrays[name] = array if offsets is None else Ragged(array, offsets.numpy())
        if keeping.places is not None and keeping.places.name in own:
            arrays[keeping.places.name] = _places(pieces[keeping.unit], used.get(keeping.unit))
    return factors, arrays


def _places(piece: LayerGradients, used: torch.Tensor | None) -> Ragged:
    """Which token every kept position is; -1 where a batch has no such sequence."""
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
    kept: Sequence[LayerKeeping],
    factors: dict[LayerUnit, GradientRows],
    pieces: Mapping[LayerUnit, LayerGradients],
) -> dict[LayerUnit, torch.Tensor]:
    """Leave out positions whose suffix is zero in every layer that shares the prefix.

    With a loss at one token, or padding, that is most of them. Gives which were left in, `[S]`.
    """
    left: dict[LayerUnit, torch.Tensor] = {}
    groups: dict[str, list[LayerKeeping]] = {}
    for keeping in kept:
        prefix = keeping.form.prefix_array
        if prefix is not None and keeping.storage == "factors":
            groups.setdefault(prefix, []).append(keeping)
    for group in groups.values():
        members: dict[LayerUnit, OuterRows] = {}
        for keeping in group:
            rows = factors[keeping.unit]
            assert isinstance(rows, OuterRows)
            members[keeping.unit] = rows
        owner, first = next(iter(members.items()))
        for unit, rows in members.items():
            same = _is_same(pieces[unit].source, pieces[owner].source)
            if unit is not owner and not same and not torch.equal(rows.x, first.x):
                raise BatchMismatchError(
                    f"layers {owner.name} and {unit.name} read the same input in the first batch, "
                    "but not in this one",
                    Adjustments(dense=frozenset({unit.name})),
                    fix="capture them one by one, with layers= and another capture name",
                )
        if first.offsets is None:
            continue
        used = torch.stack([(rows.g != 0).any(1) for rows in members.values()]).any(0)
        for unit, rows in members.items():
            factors[unit] = rows.at_positions(used)
            left[unit] = used
    return left


def _with_shared_prefix(keeping: LayerKeeping, owner: LayerKeeping) -> LayerKeeping:
    shared = owner.form.prefix_array
    assert shared is not None
    own = tuple(array for array in keeping.arrays if array.name != keeping.form.prefix_array)
    saved = sum(a.row_bytes for a in keeping.arrays if a.name == keeping.form.prefix_array)
    ragged = any(array.ragged for array in own)
    per_row = saved * keeping.positions + 8 if ragged else saved
    return dataclasses.replace(
        keeping,
        form=keeping.form.with_prefix(shared),
        arrays=own,
        row_bytes=max(0.0, keeping.row_bytes - per_row),
    )


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if one.is_meta:
        return one is other  # shapes without numbers all lie at the same place
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one is other or (same and one.shape == other.shape and one.dtype == other.dtype)


def _check_same(keeping: LayerKeeping, form: AnyForm) -> None:
    expected = keeping.form
    if form.prefix_array is not None and expected.prefix_array is not None:
        form = form.with_prefix(expected.prefix_array)
    if form != expected:
        raise BatchMismatchError(
            f"layer {keeping.unit.name} has another shape in this batch than in the first one",
            Adjustments(dense=frozenset({keeping.unit.name})),
            found=str(form),
            expected=str(expected),
            fix=f"pass keep={{{keeping.unit.name!r}: 'dense'}}, whose size does not depend on it",
        )


def _with_offsets(keeping: LayerKeeping, rows: GradientRows) -> GradientRows:
    """The rows with or without a number of positions each, as the layer's arrays have them."""
    if isinstance(rows, TiedRows) or not isinstance(rows, OuterRows):
        return rows
    ragged = any(array.ragged for array in keeping.arrays if array.name in keeping.form.arrays)
    if rows.offsets is None:
        with_offsets = OuterRows(rows.x, rows.g, torch.arange(len(rows.x) + 1))
        return with_offsets if ragged else rows
    if ragged:
        return rows
    if bool((rows.offsets.diff() == 1).all()):
        return OuterRows(rows.x, rows.g)
    raise BatchMismatchError(
        f"layer {keeping.unit.name} has several positions for a row of this batch",
        Adjustments(ragged=frozenset({keeping.unit.name})),
        fix="begin with a batch of sequences longer than one; or pass "
        f"keep={{{keeping.unit.name!r}: 'dense'}}",
    )


def arrays_of(
    name: str, form: AnyForm, rows: GradientRows, encoding: Encoding
) -> tuple[Array, ...]:
    """The arrays that hold a layer's factors, shaped as some rows of it are."""
    made = []
    for array, values in form.tensors(rows).items():
        whole = not values.dtype.is_floating_point
        double = values.dtype == torch.float64
        dtype = str(values.dtype).removeprefix("torch.")
        made.append(
            Array(
                array,
                dtype=dtype if whole or double else "float32",
                shape=tuple(values.shape[1:]),
                kind=form.role(array),
                encoding="plain" if whole or double else encoding,
                layer=name,
                ragged=form.offsets(rows, array) is not None,
            )
        )
    return tuple(made)


def cut_rank(form: Outer, rows: OuterRows, tolerance: float) -> tuple[Outer, OuterRows]:
    """The gradients with as few positions as keep the relative error within the tolerance.

    gradient = G^T X = Q_g (R_g R_x^T) Q_x^T; of the T x T core the largest r singular values are
    kept, with their roots on both sides: |error| <= tolerance * |gradient| for every sample, in
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
    left = roots * (q_g @ u).transpose(1, 2)
    right = roots * (vh @ q_x.transpose(1, 2))
    ranks = keep.sum(1).cpu()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ranks.cumsum(0)])
    form = dataclasses.replace(form, ones=form.bias, error=tolerance)
    return form, OuterRows(right[keep], left[keep], offsets)
