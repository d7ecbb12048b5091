"""How each layer is kept: as factors, dense or with its rank cut, whichever takes fewer bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gradkeep.capturing import _low_rank
from gradkeep.capturing._arrays import arrays_of, as_stored, tensors_of
from gradkeep.errors import CaptureError
from gradkeep.query import _operators
from gradkeep.query._factors import DenseRows, LookupRows, OuterRows, TiedRows
from gradkeep.query._forms import Conv, Dense, Outer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gradkeep.capturing._piece import Piece
    from gradkeep.capturing._units import Unit
    from gradkeep.query._factors import Factors
    from gradkeep.query._forms import Form
    from gradkeep.store import Array, Encoding

Storage = Literal["factors", "dense", "low rank"]
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
    form: Form
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
        if isinstance(piece.form, Dense):
            ways = ["dense"]
        elif tolerance > 0 and _low_rank.applies(piece):
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
        if isinstance(piece.form, Outer) and piece.source is not None:
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
    tokens = {name: len(values) / count for name, values in tensors_of(form, rows).items()}
    row_bytes = sum(
        array.row_bytes * tokens[array.name] + 8 if array.ragged else array.row_bytes
        for array in arrays
    )
    values = _operators.nbytes(piece.rows) / count / _itemsize(piece.rows)
    return Keeping(
        unit=unit,
        form=form,
        storage=storage,
        arrays=arrays,
        row_bytes=row_bytes,
        factor_bytes=4 * values,
        positions=_positions(piece),
        tolerance=tolerance if storage == "low rank" else 0.0,
    )


def stored(name: str, piece: Piece, storage: Storage, *, tolerance: float) -> tuple[Form, Factors]:
    """The gradients of a piece in the form they are kept in."""
    if storage == "low rank":
        return _low_rank.cut(name, piece, tolerance)
    if storage == "factors" or isinstance(piece.form, Dense):
        return piece.form, piece.rows
    values = _operators.restore(piece.form, piece.rows)
    form = Dense(piece.form.parameters, f"{name}.gradient", values.shape[1])
    return form, DenseRows(values)


def rows_to_store(
    kept: Sequence[Keeping], pieces: Mapping[Unit, Piece]
) -> tuple[dict[Unit, Factors], dict[str, Any]]:
    """The factors as they are kept, by layer, and their arrays by name, for one batch."""
    factors: dict[Unit, Factors] = {}
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
        for name, values in tensors_of(keeping.form, rows).items():
            if name in own:
                arrays[name] = as_stored(own[name], values, keeping.form, rows)
    return factors, arrays


def _drop_idle_positions(
    kept: Sequence[Keeping], factors: dict[Unit, Factors], pieces: Mapping[Unit, Piece]
) -> None:
    """Leave out positions whose suffix is zero in every layer that shares the prefix.

    With a loss at one token, or padding, that is most of them.
    """
    groups: dict[str, list[Keeping]] = {}
    for keeping in kept:
        if isinstance(keeping.form, Outer) and keeping.storage == "factors":
            groups.setdefault(keeping.form.prefix, []).append(keeping)
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
            factors[keeping.unit] = _only(rows, used)


def _reads(
    pieces: Mapping[Unit, Piece], one: Keeping, other: Keeping, rows: OuterRows, first: OuterRows
) -> bool:
    return _is_same(pieces[one.unit].source, pieces[other.unit].source) or torch.equal(
        rows.x, first.x
    )


def _only(rows: OuterRows, used: torch.Tensor) -> OuterRows:
    assert rows.offsets is not None
    if bool(used.all()):
        return rows
    before = torch.cat([torch.zeros(1, dtype=torch.int64), used.cpu().long().cumsum(0)])
    return OuterRows(rows.x[used], rows.g[used], before[rows.offsets])


def _with_shared_prefix(keeping: Keeping, owner: Keeping) -> Keeping:
    assert isinstance(keeping.form, Outer)
    assert isinstance(owner.form, Outer)
    own = tuple(array for array in keeping.arrays if array.name != keeping.form.prefix)
    saved = sum(a.row_bytes for a in keeping.arrays if a.name == keeping.form.prefix)
    ragged = any(array.ragged for array in own)
    per_row = saved * keeping.positions + 8 if ragged else saved
    return dataclasses.replace(
        keeping,
        form=dataclasses.replace(keeping.form, prefix=owner.form.prefix),
        arrays=own,
        row_bytes=max(0.0, keeping.row_bytes - per_row),
    )


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one is other or (same and one.shape == other.shape and one.dtype == other.dtype)


def _check_same(keeping: Keeping, form: Form) -> None:
    expected = keeping.form
    if isinstance(expected, Outer) and isinstance(form, Outer):
        form = dataclasses.replace(form, prefix=expected.prefix)
    if form != expected:
        raise CaptureError(
            f"layer {keeping.unit.name} has another shape in this batch than in the first one",
            found=str(form),
            expected=str(expected),
            fix=f"pass plan={{{keeping.unit.name!r}: 'dense'}}, whose size does not depend on it",
        )


def _positions(piece: Piece) -> float:
    rows = piece.rows
    if isinstance(rows, TiedRows):
        rows = rows.outer
    if isinstance(rows, OuterRows | LookupRows) and rows.offsets is not None:
        return len(rows.g) / max(1, len(rows))
    return float(piece.form.positions) if isinstance(piece.form, Conv) else 1.0


def _itemsize(rows: Factors) -> int:
    values = rows.outer.g if isinstance(rows, TiedRows) else None
    if values is None:
        names = ("g", "narrow", "values")
        values = next(getattr(rows, name) for name in names if hasattr(rows, name))
    return int(values.element_size())
