"""What a capture takes before it runs: bytes a row, seconds and memory, exact or as coordinates."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._footprint import rows_at_once, segment_bytes
from gradkeep.capturing._pace import predicted_seconds
from gradkeep.capturing._replay import COORDINATE_ROWS
from gradkeep.capturing.coordinates._choice import (
    block_sizes,
    moment_bytes,
    moment_values,
    operations_of,
    pairs_of,
    side_of,
    sizes_kept,
    worth_keeping,
)
from gradkeep.capturing.coordinates._keep import OVERHEAD
from gradkeep.capturing.coordinates._maker import CODES, SCALE
from gradkeep.factors._bits import PACKED, Bits
from gradkeep.factors._cost import FLOPS, WRITE
from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._row_making import RowMaker
    from gradkeep.capturing._shapes import ShapedCapture
    from gradkeep.capturing.coordinates._keep import Keep
    from gradkeep.factors._form import AnyForm

_HEADER = 160
"""Bytes of an array in the header of a segment, beside its name, which stands there twice."""
_ALWAYS = ("id", "example", "loss", "norm", "label")
"""Arrays beside those of gradients."""
_PROOF_ROWS, _PROOF_PASSES = 2, 4.0
"""Rows that a capture of coordinates is proved with, and passes over them: two forward, three back."""
_LARGE = 512
"""Sides of a moment up to which all of its eigenvectors are found."""
_SUBSPACE = 6
_EIGEN = 40.0
"""Operations of a decomposition, divided by the cube of the side, at the speed of large products."""
_COPIES = 6.0
"""Times that a value of an exact row is written, read or hashed on its way to the disk."""


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What capturing takes."""

    kept: tuple[LayerKeeping, ...]
    row_bytes: float
    """On disk, everything included."""
    query_bytes: float
    """The same of a row that is asked about: its coordinates are not rounded."""
    segment_rows: int
    header_bytes: float
    """Of each segment."""
    basis_bytes: float
    row_seconds: float
    fixed_seconds: float
    """Of the proof on the first rows, and of the basis."""
    row_memory: float
    """Bytes of each sample that runs at once."""
    fixed_memory: float
    """Bytes beside those and the model: moments, basis, segments."""
    coordinates: int = 0
    """How many are kept of a row; 0: all of its gradient is."""

    def disk_bytes(self, rows: int, queries: int) -> float:
        """Of so many rows, and of those that are asked about."""
        each = self.segment_rows
        segments = -(-rows // each) + -(-queries // each)
        kept = rows * self.row_bytes + queries * self.query_bytes
        return kept + segments * self.header_bytes + self.basis_bytes


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of what a model does here."""

    pace: float
    """How many times longer its passes take than the speeds say."""

    def a_pass(self, shaped: ShapedCapture) -> float:
        """One sample forward and back."""
        return self.pace * predicted_seconds(shaped.work)

    def products(self, flops: float) -> float:
        """Large matrix products beside the passes."""
        return max(1.0, self.pace) * flops / FLOPS


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What rows took that ran."""

    row_bytes: float
    seconds: float
    """Of one row."""


def seen_rows(maker: RowMaker, batch: Any) -> SeenRows:
    """Make the rows of a batch as a capture does, and look at them."""
    rows = batch_size(batch)
    wall, processor = time.perf_counter(), time.process_time()
    made = maker.make(batch, alone=True)
    seconds = min(time.perf_counter() - wall, time.process_time() - processor)
    arrays = {**made.values, **made.gradients}.items()
    encoded = {array.name: array.row_bytes for keeping in maker.kept for array in keeping.arrays}
    total = sum(_bytes_of(values, encoded.get(name)) for name, values in arrays)
    return SeenRows(total / rows + 16, seconds / rows)


def _bytes_of(values: Any, row_bytes: float | None) -> float:
    """Those of an array; of one that is encoded, as many as its encoding has."""
    offsets = isinstance(values, Ragged)
    found = values.values if offsets else values
    size = float(found.nbytes) if row_bytes is None else len(found) * row_bytes
    return size + 8 * (len(values.offsets) - 1) if offsets else size


def exact_cost(shaped: ShapedCapture, clock: Clock, *, seen: SeenRows | None = None) -> CaptureCost:
    """Of whole gradients, as some rows were seen, or as follows from shapes."""
    prepared, rows = shaped.prepared, max(1, shaped.rows)
    counted = prepared.row_bytes + shaped.values + shaped.token_values + 4.0 * len(prepared.kept)
    a_row = counted if seen is None else seen.row_bytes
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values()) / rows
    segment = segment_bytes(None)
    written = _COPIES * a_row / 4 * WRITE
    norms = sum(_norm_flops(k.form, k.positions) for k in prepared.kept)
    tried = min(rows_at_once(prepared, rows), 32)
    return CaptureCost(
        kept=prepared.kept,
        row_bytes=a_row,
        query_bytes=a_row,
        segment_rows=_power_of_two(segment / max(1.0, prepared.row_bytes), 1 << 16),
        header_bytes=_header([a.name for k in prepared.kept for a in k.arrays]),
        basis_bytes=0.0,
        row_seconds=clock.a_pass(shaped) + written + clock.products(norms)
        if seen is None
        else seen.seconds + written,
        fixed_seconds=_PROOF_PASSES * tried * clock.a_pass(shaped),
        row_memory=2 * shaped.work.saved + 2 * factors + 2 * a_row,
        fixed_memory=2.0 * min(segment, tried * a_row),
    )


def coordinate_cost(
    shaped: ShapedCapture, keep: Keep, clock: Clock, *, rows: int, chosen: bool
) -> CaptureCost:
    """Of so many bytes a row: a proof, a pass over some rows for the basis, one over all.

    `chosen` layers are taken as they are; else those that are worth it.
    """
    exact = {keeping.unit: keeping for keeping in shaped.prepared.kept}
    pieces = shaped.prepared.pieces
    units = list(pieces) if chosen else worth_keeping(list(pieces), keep)
    forms = {unit: pieces[unit].form for unit in units}
    sizes = block_sizes(forms.values())
    side = side_of(sizes, keep, list(pieces))
    used = keep.sample(max(k.positions for k in shaped.prepared.kept), rows)
    pairs = {u: _pairs(exact[u], forms[u], side, used if keep.whitened else None) for u in units}
    there = sum(pairs.values())
    size, group, fold = sizes_kept(there, keep)
    kept = tuple(
        _as_coordinates(
            exact[unit], keep, size * pairs[unit] // max(1, there), group, first=unit is units[0]
        )
        for unit in units
    )
    a_row = sum(keeping.row_bytes for keeping in kept) + shaped.values
    basis = sum(4 * g * (r * min(side, r) + c * min(side, c)) for g, r, c in sizes)
    positions = {unit: exact[unit].positions for unit in units}
    a_pass = clock.a_pass(shaped)
    moved = sum(2 * positions[u] * operations_of(block_sizes([forms[u]]), side) for u in units)
    summed = sum(_moment_flops(forms[u], positions[u]) for u in units)
    found = sum(_eigen_flops(forms[u], side) for u in units) if keep.whitened else 0.0
    restored = max((4.0 * u.size for u in units if forms[u].kind == "tied"), default=0.0)
    proof = _PROOF_ROWS * sum(piece.rows.nbytes for piece in pieces.values()) / shaped.rows
    proof += 3 * 4.0 * max(unit.size for unit in pieces)
    return CaptureCost(
        kept=kept,
        row_bytes=a_row,
        query_bytes=4.0 * size + shaped.values,
        segment_rows=_power_of_two(segment_bytes(None) / a_row, COORDINATE_ROWS),
        header_bytes=_header([array.name for keeping in kept for array in keeping.arrays]),
        basis_bytes=basis + (12.0 * fold * size if keep.whitened else 4.0 * size),
        row_seconds=a_pass + clock.products(moved),
        fixed_seconds=_PROOF_ROWS * (_PROOF_PASSES + 1) * a_pass
        + used * (a_pass + clock.products(summed))
        + clock.products(found),
        row_memory=2 * (shaped.work.saved + shaped.work.largest),
        fixed_memory=max(proof, moment_bytes(forms.values()) + 3 * restored, 2.0 * basis),
        coordinates=size,
    )


def keeps_exact(shaped: ShapedCapture, keep: Keep) -> bool:
    """Whether the whole gradients of every row take no more than the bytes that are asked for."""
    if any(array.ragged for keeping in shaped.prepared.kept for array in keeping.arrays):
        return False
    return shaped.prepared.row_bytes + OVERHEAD <= keep.row_bytes


def _pairs(exact: LayerKeeping, form: AnyForm, side: int, used: int | None) -> int:
    """Pairs of vectors of a layer; moments of `used` rows have no more than their positions."""
    rank = side if used is None else min(side, math.ceil(used * exact.positions))
    return pairs_of(block_sizes([form]), rank)


def _as_coordinates(
    exact: LayerKeeping, keep: Keep, share: int, group: int, *, first: bool
) -> LayerKeeping:
    """A layer with its share of the coordinates, as if all pairs of vectors were worth the same."""
    packed, each = keep.bits in PACKED, group or 1
    size = share // each * each
    form = Bits(
        exact.unit.parameters,
        f"{exact.unit.name}.bits",
        SCALE if packed else "",
        size,
        keep.bits,
        group=group,
    )
    coded = size // group if group else math.ceil(size * keep.bits / 8)
    codes = Array(
        form.codes,
        dtype="uint8" if packed else "float32",
        shape=(coded if packed else size,),
        kind="projection",
        encoding=CODES[keep.bits],
        layer=exact.unit.name,
    )
    return dataclasses.replace(
        exact,
        form=form,
        storage="coordinates",
        arrays=(codes,),
        row_bytes=codes.row_bytes + (4.0 if first and packed else 0.0),
        tolerance=0.0,
    )


def _moment_flops(form: AnyForm, positions: float) -> float:
    """Second moments of both sides, of which the mirrored half is not made."""
    if form.kind == "tied":
        ((_, tokens, width),) = block_sizes([form])[:1]
        return 2.0 * tokens * width * (positions + 0.6 * width)
    return sum(
        1.2 * g * positions * (moment_values(form, r) + float(c) ** 2)
        for g, r, c in block_sizes([form])
        if c > 1
    )


def _eigen_flops(form: AnyForm, side: int) -> float:
    found = 0.0
    for groups, rows, cols in block_sizes([form]):
        for size in (rows, cols):
            if moment_values(form, size) == size:
                continue
            few = size > _LARGE and side <= size // 4
            found += groups * (2.0 * _SUBSPACE * size**2 * side if few else _EIGEN * size**3)
    return found


def _norm_flops(form: AnyForm, positions: float) -> float:
    """The length of a row's gradient from the Gram matrices of its two sides."""
    return sum(2.0 * g * positions**2 * (r + c) for g, r, c in block_sizes([form]) if c > 1)


def _header(names: Sequence[str]) -> float:
    return float(sum(_HEADER + 2 * len(name) for name in (*names, *_ALWAYS)))


def _power_of_two(rows: float, most: int) -> int:
    found = 1
    while 2 * found <= rows and found < most:
        found *= 2
    return found
