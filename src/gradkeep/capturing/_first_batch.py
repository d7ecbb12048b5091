"""Settings of a capture, and its preparation on the first batch: rules, storage, bytes of a row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from gradkeep._arguments import check_fields, count, instance, number, one_of, optional, text
from gradkeep._budgets import format_bytes, parse_bytes
from gradkeep.capturing._batches import batch_size
from gradkeep.capturing._keeping import NO_ADJUSTMENTS, Adjustments, choose_storage, storage_named
from gradkeep.capturing._proofs import PROOF_ROWS, RuleProofs, Uncovered, choose_rules
from gradkeep.capturing._tracer import Tracer, no_gradients
from gradkeep.capturing.rules._rules import DENSE_RULES, HINT, units_of
from gradkeep.errors import BudgetError, CaptureError
from gradkeep.factors._bits import MOST_IN_GROUP, BitWidth
from gradkeep.factors._outer import OuterRows
from gradkeep.query._layers import select_layers
from gradkeep.store import Encoding

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import Storage
    from gradkeep.query._gradients import GradientOf
    from gradkeep.query._layers import LayerChoice


CoordinateKind = Literal["eigen", "random", "sketch"]
"""Whitened coordinates in eigenbases; both sides of every weight by normal matrices (LoGra); or by
sparse random signs."""
QUERIES = "queries"
"""What `keep` is for rows that will be asked about: the coordinates of the store's basis, unrounded."""
OVERHEAD = 80
"""Bytes of a row that are not its coordinates: id, fingerprint, loss, length, scale, and its share of
the header and the checksums of a file of a few hundred rows."""
LEAST = 192
_ROWS, _MOST_ROWS, _POSITIONS = 64, 2048, 4096


@dataclass(frozen=True, slots=True)
class Keep:
    """So many bytes a row, everything included: `keep="4KiB"` is `keep=gk.Keep("4KiB")`.

    Of each layer's gradient, the coordinates in the eigenbasis of its Kronecker-factored Fisher matrix
    are whitened, z = u^T G v / sqrt(lambda + damping * mean lambda), and of all layers together those with
    the largest lambda / (the layer's mean) are taken. A byte says which of up to `group` of them is the
    largest, and its sign; in small models, or with other `bits`, up to `fold` of them are added up with
    random signs, and `bits` kept of each sum. Products of such rows are EK-FAC influence.

    >>> Keep("4KiB").room, Keep("4KiB").group
    (4016, 128)
    """

    bytes: int | str
    bits: BitWidth = 1
    coordinates: CoordinateKind = "eigen"
    group: int | None = None
    """Coordinates that share a byte, at most 128; 0: each is kept with `bits`; None: 128 for one bit."""
    fold: int = 4
    """Coordinates that are added up, with random signs, to one that is kept; groups are not folded."""
    damping: float = 0.1
    """Added to eigenvalues, times the layer's mean one."""
    rows: int | None = None
    """Rows that the basis is found with; None: 64, more of rows with few positions. Of few rows only
    one in two is taken, if they have positions enough."""
    seed: int = 0
    basis: str | None = None
    """The checkpoint whose basis is used; None: that of the captured checkpoint itself."""

    def __post_init__(self) -> None:
        check_fields(self, CaptureError)
        one_of("bits", self.bits, (1, 4, 8, 16, 32), error=CaptureError)
        one_of("coordinates", self.coordinates, ("eigen", "random", "sketch"), error=CaptureError)
        count("fold", self.fold, error=CaptureError, least=1, most=1024)
        if self.group is not None:
            count("group", self.group, error=CaptureError, most=MOST_IN_GROUP)
            if self.group and (self.bits != 1 or not self.whitened):
                raise CaptureError(
                    "only whitened coordinates without bits of their own share a byte",
                    found=f"group={self.group}, bits={self.bits}, coordinates={self.coordinates!r}",
                    fix="pass group=0, or leave bits and coordinates out",
                )
        number("damping", self.damping, error=CaptureError, least=1e-12, most=1e12)
        optional(count, "rows", self.rows, error=CaptureError, least=2)
        count("seed", self.seed, error=CaptureError)
        object.__setattr__(self, "bytes", _bytes(self.bytes))
        if self.group is None:
            grouped = self.bits == 1 and self.whitened
            object.__setattr__(self, "group", MOST_IN_GROUP if grouped else 0)
        if self.row_bytes < LEAST:
            raise CaptureError(
                "too few bytes to keep anything of a row",
                found=f"keep={format_bytes(self.row_bytes)}",
                expected=f"at least {format_bytes(LEAST)}: id, fingerprint, loss and scale take "
                f"{OVERHEAD} B",
                fix="keep='1KiB' or more; keep='losses' keeps no gradients at all",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, everything included."""
        assert isinstance(self.bytes, int)
        return self.bytes

    @property
    def room(self) -> int:
        """Bytes of the coordinates of all layers together."""
        return self.row_bytes - OVERHEAD

    @property
    def sums(self) -> int:
        """How many coordinates, or sums of some, have bits of their own."""
        return 8 * self.room // self.bits

    @property
    def most(self) -> int:
        """The most coordinates that can be made use of."""
        return self.room * self.group if self.group else self.sums * self.fold

    def sample(self, positions: float, there: int | None = None) -> int:
        """How many rows of so many positions a basis is found with: moments are sums over positions.

        Of the rows that are `there` at most one in two, or a pass over them would cost as much as the
        capture; but so many that there are positions enough.

        >>> Keep("4KiB").sample(128), Keep("4KiB").sample(1)
        (64, 2048)
        >>> [Keep("4KiB").sample(512, there) for there in (20, 64, 100, 1000)]
        [20, 32, 50, 64]
        """
        enough = math.ceil(_POSITIONS / max(1.0, positions))
        wanted = min(_MOST_ROWS, max(_ROWS, enough)) if self.rows is None else self.rows
        if there is None:
            return wanted
        return min(wanted, max(there // 2, min(there, max(_ROWS // 2, enough))))

    @property
    def whitened(self) -> bool:
        """Whether coordinates are divided by the roots of eigenvalues."""
        return self.coordinates == "eigen"

    def described(self) -> str:
        """All that its coordinates depend on, as JSON."""
        fields = dataclasses.asdict(self)
        del fields["basis"]
        return json.dumps(fields, sort_keys=True)


def parse_keep(keep: object) -> Keep | None:
    """What asks for a number of bytes; None: anything else, such as the name of a storage."""
    if isinstance(keep, Keep):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return Keep(keep)
    if isinstance(keep, str) and keep[:1].isdigit():
        return Keep(keep)
    return None


def _bytes(given: int | str) -> int:
    try:
        return parse_bytes(given)
    except BudgetError as error:
        raise CaptureError(
            "keep is a number of bytes a row", found=repr(given), expected="such as '4KiB'"
        ) from error


KeepChoice = str | int | Keep | Mapping[str, str] | None
"""A way to keep all layers, a way for each glob of layers, or bytes a row; None: the smallest exact."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What a user may ask of a capture, beside the model and the data."""

    layers: LayerChoice = None
    of: GradientOf | None = None
    uncovered: Uncovered = "dense"
    encoding: Encoding = "plain"
    keep: KeepChoice = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        error = CaptureError
        one_of("uncovered", self.uncovered, get_args(Uncovered), error=error)
        one_of("of", self.of, (None, "loss", "output"), error=error)
        one_of("encoding", self.encoding, (*get_args(Encoding), "float32", "float64"), error=error)
        number("tolerance", self.tolerance, error=error, least=0, most=1)
        keeps = self.keep.values() if isinstance(self.keep, Mapping) else (self.keep,)
        if self.compressed is None:
            for keep in keeps:
                optional(text, "keep", keep, error=error)
        elif self.encoding != "plain" or self.tolerance:
            raise CaptureError(
                "so many bytes a row leave no choice of an encoding or a tolerance",
                found=f"encoding={self.encoding!r}, tolerance={self.tolerance}",
                fix="leave them out; gk.Keep('4KiB', bits=8) keeps fewer coordinates of more bits",
            )
        choice = self.layers
        several = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else ()
        for layer in several or (choice,):
            instance("layers", layer, (str, type, type(None)), error=error)

    @property
    def compressed(self) -> Keep | None:
        """The bytes a row that are asked for; None: all of the gradient, or what a name says."""
        return parse_keep(self.keep)

    @property
    def exact(self) -> CaptureSettings:
        """The same without a number of bytes."""
        return dataclasses.replace(self, keep=None)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCapture:
    """A tracer that is ready to run, and how each of its layers is kept."""

    tracer: Tracer
    kept: tuple[LayerKeeping, ...]
    skipped: tuple[LayerUnit, ...]
    pieces: Mapping[LayerUnit, LayerGradients]
    """Those of the batch that this was found out with."""

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients."""
        return sum(keeping.row_bytes for keeping in self.kept)

    def fits_exactly(self, keep: Keep) -> bool:
        """Tell whether the whole gradients of every row take no more than these bytes."""
        ragged = any(array.ragged for keeping in self.kept for array in keeping.arrays)
        return not ragged and self.row_bytes + OVERHEAD <= keep.row_bytes

    @property
    def dense(self) -> frozenset[LayerUnit]:
        """The layers that are kept dense: their factors are not needed once that is made."""
        return frozenset(k.unit for k in self.kept if k.storage == "dense")

    @property
    def light(self) -> frozenset[nn.Module]:
        """Modules whose inputs are needed only until their dense gradients are made."""
        soon = {unit for unit in self.dense if unit.rule not in DENSE_RULES}
        others = [k.unit for k in self.kept if k.unit not in soon]
        needed = {module for unit in others for module in unit.modules}
        return frozenset({module for unit in soon for module in unit.modules} - needed)


def prepare_capture(
    model: nn.Module,
    task: Task,
    batch: Any,
    settings: CaptureSettings,
    *,
    as_before: Mapping[str, Storage] | None = None,
    placed: bool = True,
    adjustments: Adjustments = NO_ADJUSTMENTS,
    proof_rows: int = PROOF_ROWS,
) -> PreparedCapture:
    """Find out and prove how each chosen layer is captured, and choose how it is kept.

    `as_before` gives the storage of layers that an earlier run of the same capture has chosen;
    `placed` whether layers keep which tokens their positions are; `adjustments` what later batches
    need; `proof_rows` how many rows of those are proved.
    """
    units = select_layers(units_of(model), settings.layers, error=CaptureError, hint=HINT)
    tracer = Tracer(model, task, settings.of)
    chosen = choose_rules(
        tracer, units, batch, uncovered=settings.uncovered, single=adjustments.single
    )
    late = [unit for unit in chosen.unused if unit.name in adjustments.late]
    like, rows = chosen.example, batch_size(batch)
    pieces = chosen.pieces | {unit: no_gradients(unit, rows, like) for unit in late}
    pieces = {
        unit: _with_positions(piece) if unit.name in adjustments.ragged else piece
        for unit, piece in pieces.items()
    }
    proofs = RuleProofs(
        originals={unit.name: unit for unit in units},
        forms={unit: piece.form for unit, piece in pieces.items()},
        uncovered=settings.uncovered,
        rows=proof_rows,
    )
    proofs.add_first(chosen)
    for unit in late:
        proofs.add_late(unit)
    tracer = dataclasses.replace(
        tracer,
        units=tuple(pieces),
        unused=tuple(unit for unit in chosen.unused if unit not in late),
        aside=chosen.aside,
        proofs=proofs,
    )
    wanted = storages_wanted(tracer.units, settings.keep, as_before or {})
    wanted |= {unit: "dense" for unit in pieces if unit.name in adjustments.dense}
    kept = choose_storage(
        pieces,
        encoding=settings.encoding,
        wanted=wanted,
        tolerance=settings.tolerance,
        tokens=chosen.tokens if placed else None,
    )
    return PreparedCapture(tracer, tuple(kept), chosen.skipped, pieces)


def _with_positions(piece: LayerGradients) -> LayerGradients:
    """The same rows, each with a number of positions of its own."""
    rows = piece.rows
    if isinstance(rows, OuterRows) and rows.offsets is None:
        rows = OuterRows(rows.x, rows.g, torch.arange(len(rows.x) + 1))
    return dataclasses.replace(piece, rows=rows)


def storages_wanted(
    units: Sequence[LayerUnit], keep: KeepChoice, as_before: Mapping[str, Storage]
) -> dict[LayerUnit, Storage | None]:
    """The storage that was asked for, or chosen before, for each unit; None: whichever is smallest."""
    if isinstance(keep, int | Keep) or keep in (None, QUERIES) or parse_keep(keep) is not None:
        return {unit: as_before.get(unit.name) for unit in units}
    if isinstance(keep, str):
        return dict.fromkeys(units, storage_named(keep))
    wanted: dict[LayerUnit, Storage | None] = dict.fromkeys(units)
    for pattern, name in keep.items():
        storage = storage_named(name)
        for unit in select_layers(units, pattern, error=CaptureError, hint=HINT):
            wanted[unit] = storage
    return wanted


COORDINATE_ROWS = 1024
"""Most rows in a segment of coordinates."""
_SHARE_OF_SEGMENTS = 4
"""A quarter of a budget goes to the two segments that are being filled and written."""


def row_footprint(prepared: PreparedCapture, batch: Any, rows: int) -> int:
    """Bytes that one sample occupies at the peak: what backward needs, gradients, and a copy.

    Measured on a batch: the tensors that autograd saves, twice (for gradients beside them), and
    the factors in the form they arise and the form they are kept in.
    """
    saved = sum(_saved(prepared, batch))
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    stored = prepared.row_bytes * rows
    return int((2 * saved + 2 * factors + 2 * stored) / max(1, rows)) + 1


def coordinate_footprint(prepared: PreparedCapture, coordinates: int, batch: Any, rows: int) -> int:
    """The same of a capture of so many coordinates a row: factors go as soon as these are made.

    What autograd saves, the gradients at the largest of it on their way, and the coordinates by layer,
    all together and once more while they are rounded.
    """
    saved = _saved(prepared, batch)
    passing = sum(saved) + 3 * max(saved, default=0)
    return passing // max(1, rows) + 3 * 4 * coordinates + 1


def _saved(prepared: PreparedCapture, batch: Any) -> list[int]:
    """Bytes of each tensor but the weights that autograd saves for the backward pass."""
    seen: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in prepared.tracer.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        prepared.tracer.measure(batch)
    return [size for pointer, size in seen.items() if pointer not in weights]


def rows_within(budget: int, footprint: int, *, beside: int = 0) -> int:
    """How many samples at once fit the budget; an error that names the least budget if none does.

    `beside` is what is held whatever the number of samples.
    """
    rows = (budget - budget // _SHARE_OF_SEGMENTS - beside) // footprint
    if rows < 1:
        least = (footprint + beside) * _SHARE_OF_SEGMENTS // (_SHARE_OF_SEGMENTS - 1) + 1
        raise BudgetError(
            "the memory budget is below what one sample needs",
            found=format_bytes(budget),
            expected=f"at least {format_bytes(least)}",
            fix=f"pass memory_budget={least} or more, or fewer layers",
        )
    return int(rows)


def rows_at_once(prepared: PreparedCapture, rows: int) -> int:
    """How many samples to run at once: so few that their factors stay near the cache.

    Larger batches do not run faster, and each of their fresh pages costs a fault. A handful of
    samples is needed to keep the multiplications busy.
    """
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    return max(8, int((64 << 20) / max(1.0, factors / max(1, rows))))


def segment_rows(row_bytes: float, size: int, *, coordinates: bool = False) -> int:
    """A power of two of rows that fit a segment of so many bytes.

    Rows of coordinates take few bytes, but as long to make again as any: they are fewer.
    """
    rows, most = 1, COORDINATE_ROWS if coordinates else 1 << 16
    while 2 * rows * row_bytes <= size and rows < most:
        rows *= 2
    return rows


def segment_bytes(budget: int | None) -> int:
    """Bytes of one segment: small enough to lose little work, and two of them to fit the budget."""
    usual = 32 << 20
    return usual if budget is None else max(1, min(usual, budget // _SHARE_OF_SEGMENTS // 2))
