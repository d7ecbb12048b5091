"""Settings of a capture, and its preparation on the first batch: rules, storage, bytes per row."""

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
from gradkeep.capturing._proofs import RuleProofs, Uncovered, choose_rules
from gradkeep.capturing._storage import (
    NO_ADJUSTMENTS,
    Adjustments,
    choose_storage,
    no_gradients,
    parse_storage,
)
from gradkeep.capturing._tracer import Tracer
from gradkeep.capturing.rules._rules import DENSE_RULES, HINT, units_of
from gradkeep.errors import BudgetError, CaptureError
from gradkeep.factors._bits import MOST_IN_GROUP, BitWidth, Levels
from gradkeep.factors._outer import Outer, OuterRows
from gradkeep.query._gradients import select_layers
from gradkeep.store import Encoding

if TYPE_CHECKING:
    from torch import nn

    from gradkeep.capturing._resume import EarlierRun
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.factors._form import Storage
    from gradkeep.query._gradients import GradientOf, LayerChoice


CoordinateKind = Literal["eigen", "random", "sketch"]
"""Whitened coordinates in eigenbases; normal random matrices on both sides of every weight (LoGra);
or sparse random signs."""
QUERIES = "queries"
"""`keep` of query rows: the coordinates of the store's basis, not rounded."""
OVERHEAD = 80
"""Bytes of a row beside its coordinates: id, fingerprint, loss, norm, scale, and its share of
headers and checksums in a file of a few hundred rows."""
LEAST = 192


@dataclass(frozen=True, slots=True)
class Keep:
    """Store a fixed number of bytes per row, everything included: `keep="4KiB"` is `keep=gk.Keep("4KiB")`.

    If whole gradients fit these bytes in 32, 16 or 8 bits, or factors of layers with one position per row
    in 16, 6 or 3 levels, they are stored. If not, or if other settings of coordinates than the defaults are passed and
    32 bits do not fit, coordinates are stored:

    Of each layer's gradient G, coordinates in the eigenbasis of its Kronecker-factored Fisher matrix are
    whitened, z = u^T G v / sqrt(lambda + damping * mean lambda). Of all layers together, those with the
    largest lambda / (the layer's mean lambda) are stored. With groups, a byte holds the index of the
    largest of up to `group` coordinates, and its sign. In small models, or with other `bits`, up to `fold`
    coordinates are summed with random signs, and each sum is stored with `bits`. Products of such rows
    are EK-FAC influence.

    Args:
        bytes: Bytes per row, such as `"4KiB"` or 4096.
        bits: Bits per stored coordinate: 1, 4, 8, 16 or 32.
        coordinates: `"eigen"` (whitened, in eigenbases), `"random"` (normal matrices on both sides of
            every weight, as LoGra) or `"sketch"` (sparse random signs).
        group: Coordinates that share a byte, at most 128. 0 stores each with `bits`; None is 128 for
            one bit and 0 otherwise.
        fold: Coordinates that are summed, with random signs, into one; groups are not folded.
        damping: Added to eigenvalues, as a multiple of the layer's mean eigenvalue.
        rows: Rows that the basis is computed from. None for 64, and more for rows with few positions;
            of small data sets at most half, if that has enough positions.
        seed: Seed of random signs and matrices.
        basis: Checkpoint whose basis is used; None for that of the captured checkpoint.

    Raises:
        CaptureError: `bytes` is too small, or options contradict each other.

    Example:
        >>> Keep("4KiB").coordinate_bytes, Keep("4KiB").group
        (4016, 128)
    """

    bytes: int | str
    bits: BitWidth = 1
    coordinates: CoordinateKind = "eigen"
    group: int | None = None
    fold: int = 4
    damping: float = 0.1
    rows: int | None = None
    seed: int = 0
    basis: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, CaptureError)
        one_of("bits", self.bits, (1, 4, 8, 16, 32), error=CaptureError)
        one_of("coordinates", self.coordinates, ("eigen", "random", "sketch"), error=CaptureError)
        count("fold", self.fold, error=CaptureError, least=1, most=1024)
        if self.group is not None:
            count("group", self.group, error=CaptureError, most=MOST_IN_GROUP)
            if self.group and (self.bits != 1 or not self.whitened):
                raise CaptureError(
                    "only whitened coordinates of one bit can share a byte",
                    code="capture.group_needs_bits",
                    fix="Pass group=0, or leave out bits and coordinates.",
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
                f"too few bytes to store a row: keep={format_bytes(self.row_bytes)}",
                code="capture.too_few_bytes_per_row",
                expected=f"at least {format_bytes(LEAST)}; {OVERHEAD} B of them for id, loss and scale",
                fix="Pass keep='1KiB' or more; keep='losses' stores no gradients.",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes per row, everything included."""
        assert isinstance(self.bytes, int)
        return self.bytes

    @property
    def coordinate_bytes(self) -> int:
        """Bytes for the coordinates of all layers."""
        return self.row_bytes - OVERHEAD

    @property
    def sums(self) -> int:
        """Number of coordinates, or sums of some, with their own bits."""
        return 8 * self.coordinate_bytes // self.bits

    @property
    def most(self) -> int:
        """Largest number of coordinates that can be used."""
        return self.coordinate_bytes * self.group if self.group else self.sums * self.fold

    def sample(self, positions: float, available: int | None = None) -> int:
        """Return the number of rows that a basis is computed from; moments are sums over positions.

        Args:
            positions: Mean number of positions (tokens, pixels) of a row.
            available: Number of rows of the data set. At most half of them are used, so that the basis
                costs less than the capture, unless that has too few positions. None if unknown.

        Returns:
            The number of rows.

        Example:
            >>> Keep("4KiB").sample(128), Keep("4KiB").sample(1)
            (64, 2048)
            >>> [Keep("4KiB").sample(512, rows) for rows in (20, 64, 100, 1000)]
            [20, 32, 50, 64]
        """
        enough = math.ceil(4096 / max(1.0, positions))  # rows with 4,096 positions together
        target = min(2048, max(64, enough)) if self.rows is None else self.rows
        if available is None:
            return target
        return min(target, max(available // 2, min(available, max(32, enough))))

    @property
    def whitened(self) -> bool:
        """True if coordinates are divided by the roots of eigenvalues."""
        return self.coordinates == "eigen"

    def describe(self) -> str:
        """Return all settings that coordinates depend on, as JSON."""
        fields = dataclasses.asdict(self)
        del fields["basis"]
        return json.dumps(fields, sort_keys=True)


def parse_keep(keep: object) -> Keep | None:
    """Parse a number of bytes; None for anything else, such as the name of a storage."""
    if isinstance(keep, Keep):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return Keep(keep)
    if isinstance(keep, str) and keep[:1].isdigit():
        return Keep(keep)
    return None


def _bytes(value: int | str) -> int:
    try:
        return parse_bytes(value)
    except BudgetError as error:
        raise CaptureError(
            f"keep must be a number of bytes per row, such as '4KiB', not {value!r}",
            code="capture.keep_not_bytes",
        ) from error


_FEWER_BITS: tuple[tuple[Encoding, Levels, int], ...] = (
    ("bfloat16", 0, 2),
    ("int8-scaled", 0, 4),
    ("int8-scaled", 16, 8),
    ("int8-scaled", 6, 12),
    ("int8-scaled", 3, 20),
)
"""Encodings of whole gradients, levels of the factors of layers with one position per row, and how much smaller
than in float32 both are at most."""

KeepChoice = str | int | Keep | Mapping[str, str] | None
"""Name of a storage for all layers, a name for each glob of layers, or bytes per row; None for the
smallest exact storage."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """Options of a capture beside the model and the data."""

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
                "encoding and tolerance cannot be combined with a number of bytes per row",
                code="capture.keep_with_encoding",
                fix="Leave them out; gk.Keep('4KiB', bits=8) stores fewer coordinates with more bits.",
            )
        choice = self.layers
        several = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else ()
        for layer in several or (choice,):
            instance("layers", layer, (str, type, type(None)), error=error)

    @property
    def compressed(self) -> Keep | None:
        """Requested bytes per row; None for exact gradients."""
        return parse_keep(self.keep)

    @property
    def exact(self) -> CaptureSettings:
        """The same settings without a number of bytes."""
        return dataclasses.replace(self, keep=None)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCapture:
    """A tracer that is ready to run, and the storage of each of its layers."""

    tracer: Tracer
    layers: tuple[LayerStorage, ...]
    skipped: tuple[LayerUnit, ...]
    pieces: Mapping[LayerUnit, LayerGradients]
    """Gradients of the probe batch."""

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients."""
        return sum(layer.row_bytes for layer in self.layers)

    def fits_exactly(self, keep: Keep) -> bool:
        """Return True if whole gradients take no more than these bytes per row."""
        ragged = any(array.ragged for layer in self.layers for array in layer.arrays)
        return not ragged and self.row_bytes + OVERHEAD <= keep.row_bytes

    def within(self, keep: Keep) -> PreparedCapture | None:
        """Return a capture of whole gradients in these bytes per row; None if coordinates are needed.

        If float32 does not fit, 16 bits, 8 bits, and 16, 6 and 3 levels are tried; levels only for
        factors of one position per row. These are few values and cost no more than a pass; coordinates
        are products of both factors, and cost many. Settings of coordinates other than the defaults ask
        for coordinates.
        """
        if self.fits_exactly(keep):
            return self
        if keep != Keep(keep.row_bytes):
            return None
        for encoding, levels, most in _FEWER_BITS:
            if self.row_bytes / most + OVERHEAD > keep.row_bytes:
                continue
            pieces = {unit: _rounded(piece, levels) for unit, piece in self.pieces.items()}
            layers = choose_storage(pieces, encoding=encoding, requested={}, tolerance=0.0)
            rounded = dataclasses.replace(self, layers=tuple(layers))
            if rounded.fits_exactly(keep):
                return rounded
        return None

    @property
    def dense(self) -> frozenset[LayerUnit]:
        """Layers that are stored dense, whose factors are freed once multiplied out."""
        return frozenset(k.unit for k in self.layers if k.storage == "dense")

    @property
    def light(self) -> frozenset[nn.Module]:
        """Modules whose inputs are needed only until their dense gradients are computed."""
        dense = {unit for unit in self.dense if unit.rule not in DENSE_RULES}
        others = [k.unit for k in self.layers if k.unit not in dense]
        needed = {module for unit in others for module in unit.modules}
        return frozenset({module for unit in dense for module in unit.modules} - needed)


def prepare_capture(
    model: nn.Module,
    task: Task,
    batch: Any,
    settings: CaptureSettings,
    *,
    earlier: EarlierRun | None = None,
    adjustments: Adjustments = NO_ADJUSTMENTS,
    proof_rows: int = 16,
) -> PreparedCapture:
    """Choose and prove how each selected layer is captured, and choose its storage.

    A resumed capture stores what the `earlier` run did; `adjustments` is what later batches need; `proof_rows`
    is the number of their rows that are proved.
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
        reached=chosen.reached,
        proofs=proofs,
    )
    as_before = {} if earlier is None else earlier.storages
    requested = requested_storages(tracer.units, settings.keep, as_before)
    requested |= {unit: "dense" for unit in pieces if unit.name in adjustments.dense}
    layers = choose_storage(
        pieces,
        encoding=settings.encoding,
        requested=requested,
        tolerance=settings.tolerance,
        tokens=chosen.tokens if earlier is None or earlier.placed else None,
    )
    return PreparedCapture(tracer, tuple(layers), chosen.skipped, pieces)


def _rounded(piece: LayerGradients, levels: Levels) -> LayerGradients:
    """Return the same rows in a form that rounds its numbers to levels, if it has one position per row."""
    form, rows = piece.form, piece.rows
    if isinstance(form, Outer) and isinstance(rows, OuterRows) and rows.offsets is None:
        return dataclasses.replace(piece, form=dataclasses.replace(form, levels=levels))
    return piece


def _with_positions(piece: LayerGradients) -> LayerGradients:
    """Return the same rows with a number of positions each."""
    rows = piece.rows
    if isinstance(rows, OuterRows) and rows.offsets is None:
        rows = OuterRows(rows.x, rows.g, torch.arange(len(rows.x) + 1))
    return dataclasses.replace(piece, rows=rows)


def requested_storages(
    units: Sequence[LayerUnit], keep: KeepChoice, as_before: Mapping[str, Storage]
) -> dict[LayerUnit, Storage | None]:
    """Return the requested or earlier storage of each unit; None for the smallest."""
    if isinstance(keep, int | Keep) or keep in (None, QUERIES) or parse_keep(keep) is not None:
        return {unit: as_before.get(unit.name) for unit in units}
    if isinstance(keep, str):
        return dict.fromkeys(units, parse_storage(keep))
    storages: dict[LayerUnit, Storage | None] = dict.fromkeys(units)
    for pattern, name in keep.items():
        storage = parse_storage(name)
        for unit in select_layers(units, pattern, error=CaptureError, hint=HINT):
            storages[unit] = storage
    return storages


COORDINATE_ROWS = 1024
"""Largest number of rows in a segment of coordinates."""
_SEGMENT_SHARE = 4
"""A quarter of a budget goes to the two segments that are being filled and written."""


def row_footprint(prepared: PreparedCapture, batch: Any, rows: int) -> int:
    """Return the peak bytes of one sample: saved activations, gradients, and a copy.

    Measured on a batch: the tensors that autograd saves, twice (for the gradients beside them), and the
    factors as they are computed and as they are stored.
    """
    saved = sum(_saved(prepared, batch))
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    stored = prepared.row_bytes * rows
    return int((2 * saved + 2 * factors + 2 * stored) / max(1, rows)) + 1


def coordinate_footprint(prepared: PreparedCapture, batch: Any, rows: int) -> int:
    """Return the peak bytes of one sample of compressed captures, whose factors are freed at once.

    Counts what autograd saves, and gradients of its largest tensor.
    """
    saved = _saved(prepared, batch)
    return (sum(saved) + 3 * max(saved, default=0)) // max(1, rows) + 1


def _saved(prepared: PreparedCapture, batch: Any) -> list[int]:
    """Return the bytes of each tensor except weights that autograd saves for the backward pass."""
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
    """Return how many samples at once fit the budget; raise with the least budget if none does.

    `beside` is the number of bytes that are needed for any number of samples.
    """
    rows = (budget - budget // _SEGMENT_SHARE - beside) // footprint
    if rows < 1:
        least = (footprint + beside) * _SEGMENT_SHARE // (_SEGMENT_SHARE - 1) + 1
        raise BudgetError(
            f"the memory budget of {format_bytes(budget)} is too small for one sample",
            code="budget.below_one_sample",
            expected=f"at least {format_bytes(least)}",
            fix=f"Pass memory_budget={least} or more, or fewer layers.",
        )
    return int(rows)


def rows_at_once(prepared: PreparedCapture, rows: int) -> int:
    """Return how many samples to run at once: few enough that their factors stay near the cache.

    Larger batches do not run faster, and page faults of fresh memory cost time. At least 8, to keep the
    matrix products busy.
    """
    factors = sum(piece.rows.nbytes for piece in prepared.pieces.values())
    return max(8, int((64 << 20) / max(1.0, factors / max(1, rows))))


def segment_rows(row_bytes: float, size: int, *, coordinates: bool = False) -> int:
    """Return the largest power of two of rows that fits a segment of `size` bytes.

    Rows of coordinates are small but slow to recompute, so their segments hold fewer rows.
    """
    rows, most = 1, COORDINATE_ROWS if coordinates else 1 << 16
    while 2 * rows * row_bytes <= size and rows < most:
        rows *= 2
    return rows


def segment_bytes(budget: int | None) -> int:
    """Return the bytes of a segment: small enough to lose little work, and two of them fit the budget."""
    usual = 32 << 20
    return usual if budget is None else max(1, min(usual, budget // _SEGMENT_SHARE // 2))
