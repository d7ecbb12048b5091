"""How each layer is kept: as factors, dense or with its rank cut, whichever takes fewer bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradkeep.capturing._arrays import arrays_of, as_stored
from gradkeep.capturing._low_rank import cut_rank
from gradkeep.errors import CaptureError
from gradkeep.factors import Dense, DenseRows, OuterRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._units import Unit
    from gradkeep.factors import AnyForm, Outer, Rows, Storage
    from gradkeep.store import Array, Encoding

ALIASES: dict[str, Storage | None] = {
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
class Keeping:
    """How one layer is kept, with its bytes per row as the first batch had them."""

    unit: Unit
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

    @property
    def dense_bytes(self) -> int:
        """What the dense gradient in float32 would take."""
        return 4 * self.unit.size


def storage_of(plan: str) -> Storage | None:
    """The storage that a plan's name asks for; None: whichever is smallest."""
    if plan not in ALIASES:
        raise CaptureError(
            f"no plan {plan!r}",
            expected=", ".join(ALIASES),
            fix="leave plan out to let every layer be kept in the smallest way",
        )
    return ALIASES[plan]


def choose(
    pieces: Mapping[Unit, Piece],
    *,
    encoding: Encoding,
    wanted: Mapping[Unit, Storage | None],
    tolerance: float,
) -> list[Keeping]:
    """The smallest way to keep each layer that is allowed, measured on the pieces of one batch.

    Cutting the rank is allowed by a tolerance above 0. A prefix that several layers read is kept
    once.
    """
    kept: list[Keeping] = []
    owners: list[tuple[torch.Tensor, Keeping]] = []
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
                found="tolerance=0",
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
                best = min(
                    _with_shared_prefix(factors, owner), best, key=lambda option: option.row_bytes
                )
            elif best.storage == "factors":
                owners.append((piece.source, best))
        kept.append(best)
    return kept


def _keeping(
    unit: Unit, piece: Piece, storage: Storage, *, encoding: Encoding, tolerance: float
) -> Keeping:
    form, rows = stored(unit.name, piece, storage, tolerance=tolerance)
    arrays = arrays_of(unit.name, form, rows, encoding)
    count = max(1, len(rows))
    tokens = {name: len(values) / count for name, values in form.tensors(rows).items()}
    row_bytes = sum(
        array.row_bytes * tokens[array.name] + 8 if array.ragged else array.row_bytes
        for array in arrays
    )
    values = piece.rows.nbytes / count / piece.rows.example.element_size()
    return Keeping(
        unit=unit,
        form=form,
        storage=storage,
        arrays=arrays,
        row_bytes=row_bytes,
        factor_bytes=4 * values,
        positions=piece.rows.positions / count,
        tolerance=tolerance if storage == "low rank" else 0.0,
    )


def _as_outer(name: str, piece: Piece) -> tuple[Outer, OuterRows] | None:
    return piece.form.as_outer(piece.rows, prefix=f"{name}.prefix", suffix=f"{name}.suffix")


def stored(name: str, piece: Piece, storage: Storage, *, tolerance: float) -> tuple[AnyForm, Rows]:
    """The gradients of a piece in the form they are kept in."""
    outer = _as_outer(name, piece) if storage == "low rank" else None
    if outer is not None:
        return cut_rank(*outer, tolerance)
    if storage == "factors" or piece.form.storage == "dense":
        return piece.form, piece.rows
    values = piece.form.restore(piece.rows)
    form = Dense(piece.form.parameters, f"{name}.gradient", values.shape[1])
    return form, DenseRows(values)


def rows_to_store(
    kept: Sequence[Keeping], pieces: Mapping[Unit, Piece]
) -> tuple[dict[Unit, Rows], dict[str, Any]]:
    """The factors as they are kept, by layer, and their arrays by name, for one batch."""
    factors: dict[Unit, Rows] = {}
    for keeping in kept:
        piece = pieces[keeping.unit]
        form, rows = stored(keeping.unit.name, piece, keeping.storage, tolerance=keeping.tolerance)
        _check_same(keeping, form)
        factors[keeping.unit] = rows
    _drop_idle_positions(kept, factors, pieces)
    arrays: dict[str, Any] = {}
    for keeping in kept:
        rows = factors[keeping.unit]
        own = {array.name: array for array in keeping.arrays}
        for name, values in keeping.form.tensors(rows).items():
            if name in own:
                arrays[name] = as_stored(own[name], values, keeping.form, rows)
    return factors, arrays


def _drop_idle_positions(
    kept: Sequence[Keeping], factors: dict[Unit, Rows], pieces: Mapping[Unit, Piece]
) -> None:
    """Leave out positions whose suffix is zero in every layer that shares the prefix.

    With a loss at one token, or padding, that is most of them.
    """
    groups: dict[str, list[Keeping]] = {}
    for keeping in kept:
        prefix = keeping.form.prefix_array
        if prefix is not None and keeping.storage == "factors":
            groups.setdefault(prefix, []).append(keeping)
    for group in groups.values():
        first = factors[group[0].unit]
        assert isinstance(first, OuterRows)
        if first.offsets is None:
            continue
        used = torch.zeros(len(first.g), dtype=torch.bool, device=first.g.device)
        for keeping in group:
            rows = factors[keeping.unit]
            assert isinstance(rows, OuterRows)
            if keeping is not group[0] and not _reads(pieces, keeping, group[0], rows, first):
                raise CaptureError(
                    f"layers {group[0].unit.name} and {keeping.unit.name} read the same input in "
                    f"the first batch, but not in this one",
                    fix="capture them one by one, with layers= and another capture name",
                )
            used |= (rows.g != 0).any(1)
        for keeping in group:
            rows = factors[keeping.unit]
            assert isinstance(rows, OuterRows)
            factors[keeping.unit] = rows.at_positions(used)


def _reads(
    pieces: Mapping[Unit, Piece], one: Keeping, other: Keeping, rows: OuterRows, first: OuterRows
) -> bool:
    return _is_same(pieces[one.unit].source, pieces[other.unit].source) or torch.equal(
        rows.x, first.x
    )


def _with_shared_prefix(keeping: Keeping, owner: Keeping) -> Keeping:
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
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one is other or (same and one.shape == other.shape and one.dtype == other.dtype)


def _check_same(keeping: Keeping, form: AnyForm) -> None:
    expected = keeping.form
    if form.prefix_array is not None and expected.prefix_array is not None:
        form = form.with_prefix(expected.prefix_array)
    if form != expected:
        raise CaptureError(
            f"layer {keeping.unit.name} has another shape in this batch than in the first one",
            found=str(form),
            expected=str(expected),
            fix=f"pass plan={{{keeping.unit.name!r}: 'dense'}}, whose size does not depend on it",
        )
