"""Rows of a capture: gradients and other values, computed from batches and passed to a writer."""

from __future__ import annotations

import abc
import contextlib
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._loader import WithColumns, column_array, plain, without_columns
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._storage import rows_to_store
from gradkeep.capturing._tracer import Reducer, Traced, check_measured, restore_gradients
from gradkeep.capturing.tasks._tasks import measure_losses
from gradkeep.curvature._moments import SideMoments, StoredMoments, matrix_moments
from gradkeep.errors import CaptureError
from gradkeep.factors._form import has_factors
from gradkeep.factors._outer import OuterRows
from gradkeep.store import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._resume import RowAudit
    from gradkeep.capturing._storage import LayerStorage
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.rules._layers import LayerGradients
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._form import AnyForm, GradientRows
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Writer

    Sums = list[Any]
    """Sums of both sides of a layer, and their divisors."""
    IdArray = np.ndarray[Any, np.dtype[np.int64]]

Values = dict[str, Any]
_TINY = 1e-18
"""Norm of a gradient whose square underflows in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class RowArrays:
    """Some rows as they are stored."""

    values: Values
    """Values beside gradients, by array."""
    gradients: dict[str, Any]
    """Gradients, by array."""
    layers: Mapping[str, GradientRows]
    """Gradients by layer, in their forms."""


@dataclass(slots=True, eq=False, kw_only=True)
class RowMaker(abc.ABC):
    """Compute the rows of a capture from batches."""

    joined: ClassVar[int] = 1
    """Rows that are passed to a writer at once."""
    tracer: Tracer
    watched: dict[str, nn.Module]
    """Modules whose outputs are stored as embeddings."""
    device: torch.device
    skipped: tuple[str, ...] = ()
    """Layers that are not stored."""
    recompute: MemoryBudget | None = None
    layers: tuple[LayerStorage, ...] = ()
    audit: RowAudit | None = None
    moments: FirstMoments | None = None
    """Sums moments of the first rows of layers that are stored dense."""

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients, or about those of its values."""
        return sum(layer.row_bytes for layer in self.layers) if self.layers else 512.0

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> RowArrays:
        """Compute the rows of a batch.

        `alone` ignores the memory plan of a run of equal batches. Some rows are audited if `ids` are given.
        """
        started, own = time.perf_counter(), without_columns(batch)
        with _first_outputs(self.watched) as outputs:
            traced = self._pass(own, alone=alone)
        if self.audit is not None and ids is not None:
            losses = traced.measured.losses.detach()
            self.audit.check_batch(ids, own, losses, traced, time.perf_counter() - started)
        values = self._values(traced.measured) | _embeddings(outputs, batch_size(own))
        gradients, layers = self._gradients(traced, values)
        if isinstance(batch, WithColumns):
            values |= {name: column_array(name, one) for name, one in batch.columns.items()}
        return RowArrays(values, gradients, layers)

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        options: dict[str, Any] = {}
        if self.recompute is not None and not alone:  # inside of a step of that budget
            options = {"light": self._light(), "within": self.recompute.step}
        reducer = self._reducer(alone=alone)
        return self.tracer.run(batch, reducer=reducer, device=self.device, **options)

    def _reducer(self, *, alone: bool) -> Reducer | None:
        return None

    def _light(self) -> frozenset[nn.Module]:
        """Return modules whose inputs are needed only until their gradients are reduced."""
        return frozenset()

    def _values(self, measured: Measured) -> Values:
        return measured_values(measured)

    @abc.abstractmethod
    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        """Return gradients by array and by layer; their norms are added to `values`."""

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Return facts that are compared when a capture is resumed."""
        of, unused = self.tracer.of, ", ".join(unit.name for unit in self.tracer.unused)
        outputs = of == "output" or (of is None and "slope" in values)
        skipped = ", ".join(self.skipped)
        return {"of": "output" if outputs else "loss", "unused": unused, "skipped": skipped}

    def notes(self) -> list[str]:
        """Return warnings for the user."""
        return []

    def facts(self) -> list[str]:
        """Return further lines of the report."""
        return []


@dataclass(slots=True, eq=False, kw_only=True)
class GradientMaker(RowMaker):
    """Compute rows with gradients."""

    joined: ClassVar[int] = 512  # of small models; appending has a cost per array
    prepared: PreparedCapture

    @classmethod
    def of(cls, prepared: PreparedCapture, **options: Any) -> GradientMaker:
        """Build the maker of a prepared capture."""
        skipped = tuple(unit.name for unit in prepared.skipped)
        tracer, layers = prepared.tracer, prepared.layers
        return cls(prepared=prepared, tracer=tracer, layers=layers, skipped=skipped, **options)

    def _reducer(self, *, alone: bool) -> Reducer | None:
        if self.moments is not None and not alone and self.moments.needs_rows:
            return self.moments.reducer()
        return Reducer(self.prepared.dense, restore_gradients) if self.prepared.dense else None

    def _light(self) -> frozenset[nn.Module]:
        return self.prepared.light

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        with torch.no_grad():
            factors, gradients = rows_to_store(self.layers, traced.pieces)
            values |= norm_values(self.layers, factors)
        if self.moments is not None:
            self.moments.add_batch(len(values["norm"]))  # failed passes do not count
        return gradients, {unit.name: rows for unit, rows in factors.items()}

    def notes(self) -> list[str]:
        """Return which layers are not stored, and why."""
        notes = [
            ([u.name for u in self.tracer.unused], "the task does not use these layers"),
            (self.skipped, "skipped, as no rule covers them"),
        ]
        return [f"{why}: {', '.join(names)}" for names, why in notes if names]


@dataclass(slots=True, eq=False, kw_only=True)
class LossMaker(RowMaker):
    """Compute rows of losses, outputs, labels, predictions and probabilities, in one forward pass."""

    joined: ClassVar[int] = 4096  # appending takes a large part of the time of such a row

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        own = to_device(batch, self.device)
        measured = measure_losses(self.tracer.task, self.tracer.model, own)
        check_measured("losses", measured.losses, batch_size(batch))
        return Traced(measured, {})

    def _values(self, measured: Measured) -> Values:
        values, logits = measured_values(measured), measured.logits
        # For more classes they would be most of a row's bytes.
        if logits is not None and logits.shape[1] <= 256:
            values["probabilities"] = plain(logits.detach().float().softmax(1))
        return values

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        return {}, {}

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Return that there are no gradients."""
        return {"of": "nothing"}


FIRST_ROWS = 128
"""Rows whose moments are stored. Measured on a CNN of 3 x 32 x 32: ranks of EK-FAC by moments of
32, 64 and 128 rows agree .988, .993 and .996 with those by all rows."""
_MOST_BYTES, _MOST_TOGETHER = 64 << 20, 256 << 20
_MOST_ROWS = 4096
"""A layer whose moments take more bytes than this many of its rows is skipped."""


@dataclass(slots=True, eq=False)
class FirstMoments:
    """Sum moments of the first rows' factors in layers that are stored dense.

    Kronecker methods need these moments, and a dense gradient does not contain them.
    """

    prepared: PreparedCapture
    layers: frozenset[LayerUnit]
    """Layers whose moments are stored."""
    rows: int = field(default=0, init=False)
    """Rows added so far."""
    _remaining: int = field(default=0, init=False)
    _batch: dict[LayerUnit, Sums] = field(default_factory=dict, init=False)
    _sums: dict[LayerUnit, Sums] = field(default_factory=dict, init=False)
    _forms: dict[LayerUnit, AnyForm] = field(default_factory=dict, init=False)
    _missing: set[LayerUnit] = field(default_factory=set, init=False)
    """Layers of which a batch had no factors."""

    @classmethod
    def plan(cls, prepared: PreparedCapture, budget: int | None) -> FirstMoments | None:
        """Select the layers that are stored dense but have factors; None if there are none.

        Sums in float64 of all layers and of a batch take at most a sixteenth of a `budget` in bytes; layers
        that do not fit are skipped.
        """
        free_bytes = _MOST_TOGETHER if budget is None else min(_MOST_TOGETHER, budget // 64)
        layers = []
        for layer in prepared.layers:
            form = prepared.pieces[layer.unit].form
            if layer.storage != "dense" or not _has_factors(form):
                continue
            block = form.weight_blocks()[0]
            size = 4 * block.groups * (block.rows**2 + block.cols**2)
            if size <= min(free_bytes, _MOST_BYTES, _MOST_ROWS * layer.dense_bytes):
                layers.append(layer.unit)
                free_bytes -= size
        return cls(prepared, frozenset(layers)) if layers else None

    @property
    def needs_rows(self) -> bool:
        """True while further rows are needed."""
        return self._remaining > 0

    def begin(self) -> None:
        """Start over: the next rows are the first ones."""
        self.rows, self._remaining, self._batch, self._sums = 0, FIRST_ROWS, {}, {}
        self._missing = set()

    def reducer(self) -> Reducer:
        """Build a reducer that restores dense gradients and sums their factors.

        The sums of a failed batch are dropped.
        """
        self._batch = {}

        def add(unit: LayerUnit, piece: LayerGradients, measured: Measured) -> LayerGradients:
            if unit in self.layers:
                self._forms[unit], self._batch[unit] = piece.form, self.batch_sums(piece, measured)
                self._missing |= set() if _has_factors(piece.form) else {unit}
            return restore_gradients(unit, piece)

        return Reducer(self.prepared.dense, add)

    def batch_sums(self, piece: LayerGradients, measured: Measured) -> Sums:
        """Sum the factors of the rows of a batch that are needed."""
        form: Any = piece.form
        if not _has_factors(form):
            return [0, 0, 0, 0]
        rows: Any = piece.rows.take(0, min(self._remaining, len(piece.rows))).widened()
        slopes = self.prepared.tracer.loss_slopes(measured)
        if isinstance(rows, OuterRows) and rows.offsets is not None:
            rows = rows.at_positions((rows.g != 0).any(1))  # as they would be stored
        with rows.example.device:
            moments = matrix_moments(form.weight_blocks()[0], form)
        moments.add(rows, None if slopes is None else slopes[: len(rows)])
        row_side, col_side = moments.sides()
        counts = moments.rows, moments.positions
        if form.kind == "conv" and form.transposed:
            counts = counts[1], counts[0]  # the patches are those of the suffix
        return [row_side * counts[0], col_side * counts[1], *counts]

    def add_batch(self, rows: int) -> None:
        """Add the sums of a batch with this many rows, if there are any."""
        if not self._batch:
            return
        for unit, part in self._batch.items():
            before = self._sums.get(unit, [0, 0, 0, 0])
            self._sums[unit] = [one + other for one, other in zip(before, part, strict=True)]
        count = min(rows, self._remaining)
        self.rows, self._remaining, self._batch = self.rows + count, self._remaining - count, {}

    def means(self, weights: str, ids: Any) -> StoredMoments | None:
        """Return the moments of every layer whose rows are all known and finite.

        `ids` are those of the rows so far, in order.
        """
        layers = {}
        for unit in self.prepared.tracer.units:
            if unit not in self._sums or unit in self._missing:
                continue
            row_side, col_side, *counts = self._sums[unit]
            row_side = (row_side / max(1, counts[0])).float().cpu()
            col_side = (col_side / max(1, counts[1])).float().cpu()
            if bool(row_side.isfinite().all() and col_side.isfinite().all()):
                layers[unit.name] = SideMoments(self._forms[unit], row_side, col_side)
        return StoredMoments(layers, self.rows, weights, ids[: self.rows]) if layers else None


def _has_factors(form: AnyForm) -> bool:
    return has_factors(form) and form.kind in ("outer", "conv")


@dataclass(slots=True, eq=False)
class RowFeed:
    """Compute the rows that a writer needs, in parts if they do not fit in memory, and append them."""

    writer: Writer
    maker: RowMaker
    at_once: int
    """Samples that run at once; halved when memory runs out."""
    alarms: RowAlarms
    least: int = 1
    """Rows that are joined before they are appended."""
    reused: int = 0
    """Rows of batches that were already stored."""
    _parts: list[tuple[Any, Values]] = field(default_factory=list)

    def add(self, ids: IdArray, digests: np.ndarray[Any, Any], batch: Any) -> None:
        """Add a batch; while moments need rows, stored rows are computed again."""
        start, count = 0, len(ids)
        if not self._parts and not self.writer.needs(count):
            self.reused += count
        while start < count:
            remaining = count - start
            # Parts of equal size: a short last one would waste time.
            stop = start + math.ceil(remaining / math.ceil(remaining / self.at_once))
            needed = self.least > 1 or self.writer.needs(stop - start)
            moments = self.maker.moments
            if needed or (moments is not None and moments.needs_rows):
                part = batch if stop - start == count else rows_of(batch, start, stop)
                try:
                    arrays = self.maker.make(part, ids=ids[start:stop])
                except (RuntimeError, MemoryError) as error:
                    self.at_once = _half_of(stop - start, error)
                    continue
                if needed:
                    self.alarms.check_batch(ids[start:stop], arrays.values, self.maker.layers)
                    values = arrays.values | {"example": digests[start:stop]} | arrays.gradients
                    self._parts.append((ids[start:stop], values))
            if not needed:
                self.writer.skip(ids[start:stop])
            elif sum(len(own) for own, _ in self._parts) >= self.least:
                self.flush()
            start = stop

    def flush(self) -> None:
        """Append the buffered rows."""
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            self.writer.append(*parts[0])
        elif parts:
            ids, values = zip(*parts, strict=True)
            joined = {name: _concatenated([part[name] for part in values]) for name in values[0]}
            self.writer.append(np.concatenate(ids), joined)


def _concatenated(parts: list[Any]) -> Any:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Ragged(np.concatenate([part.values for part in parts]), offsets)


def _half_of(rows: int, error: BaseException) -> int:
    """Return half the samples if memory ran out; else raise the error again."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not memory and not any(word in str(error).lower() for word in words):
        raise error
    if rows <= 1:
        raise CaptureError(
            "there is not enough memory for one sample",
            code="capture.out_of_memory",
            fix="Capture fewer layers with layers=, or keep fewer bytes with keep=.",
        ) from error
    note = f"out of memory with {rows} samples at once: continuing with {rows // 2}"
    warnings.warn(note, CaptureWarning, stacklevel=4)
    return rows // 2


def measured_values(measured: Measured) -> Values:
    """Return losses, outputs, slopes, labels, predictions and token losses by array name."""
    names = ("loss", "output", "slope", "label", "predicted")
    tensors = measured.losses, measured.outputs, measured.slopes, measured.labels
    pairs = zip(names, (*tensors, measured.predictions), strict=True)
    values: Values = {name: plain(tensor) for name, tensor in pairs if tensor is not None}
    if measured.tokens is not None:
        rows = [row[~np.isnan(row)] for row in plain(measured.tokens)]
        values["token_loss"] = Ragged.of(rows)
    return values


def norm_values(
    layers: Sequence[LayerStorage], factors: Mapping[LayerUnit, GradientRows]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the norm of each sample's gradient `[B]`, and by layer `[B, L]`."""
    squared = [layer.form.squared_norms(factors[layer.unit]).clamp(min=0) for layer in layers]
    lengths = torch.stack(squared, 1).sqrt().cpu()
    whole = lengths.double().square().sum(1).sqrt().float()
    return {"norms": lengths.float().numpy(), "norm": whole.numpy()}


def arrays_for(values: Mapping[str, Any]) -> tuple[Array, ...]:
    """Build the arrays for these values; NaN and infinity are rejected in losses and norms."""
    arrays = []
    for name, value in values.items():
        ragged = isinstance(value, Ragged)
        array = value.values if isinstance(value, Ragged) else value
        is_text = ragged and array.dtype == np.uint8
        kind: Any = "embedding" if name.startswith("embedding.") else "scalar"
        arrays.append(
            Array(
                name,
                dtype=str(array.dtype),
                shape=array.shape[1:],
                kind="text" if is_text else kind,
                encoding="float16" if name == "probabilities" else "plain",
                ragged=ragged,
                nan="refuse" if name in ("loss", "norm", "norms") else "keep",
            )
        )
    return tuple(arrays)


def find_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules with these paths."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise CaptureError(
                f"the model has no layer {name!r} for embeddings=",
                code="capture.unknown_embedding",
                found=f"{', '.join(list(known)[1:9])} ...",
                fix="Pass the path of a module, such as 'fc1'.",
            )
    return {name: known[name] for name in names}


@contextlib.contextmanager
def _first_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the first output of each module while the block runs."""
    outputs: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in modules.items()}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
        if tensors:
            outputs.setdefault(names[module], tensors[0].detach())

    with contextlib.ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(hook).remove)
        yield outputs


def _embeddings(outputs: dict[str, torch.Tensor], rows: int) -> Values:
    """Return one vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    values = {}
    for name, output in outputs.items():
        if output.dim() < 2 or len(output) != rows:
            raise CaptureError(
                f"the output of layer {name} is not one vector for each of {rows} samples",
                code="capture.embedding_shape",
                found=f"shape {tuple(output.shape)}",
                expected="[B, D], [B, T, D] or [B, D, H, W]",
                fix="Choose another layer with embeddings=.",
            )
        if output.dim() > 2:
            output = output.mean(1) if output.dim() == 3 else output.flatten(2).mean(2)
        values[f"embedding.{name}"] = output.float().cpu().numpy()
    return values


@dataclass(slots=True)
class RowAlarms:
    """Count suspicious gradients."""

    rows: int = 0
    zero: int = 0
    tiny: int = 0
    example: int | None = None
    """First row with a zero gradient."""

    def check_batch(self, ids: IdArray, values: Values, layers: Sequence[LayerStorage]) -> None:
        """Raise for NaN and infinity, which would spoil every score; count zero and tiny gradients."""
        _check_finite("loss", ids, np.isfinite(values["loss"]))
        if not layers:
            return
        if "norms" in values:
            for layer, finite in zip(layers, np.isfinite(values["norms"]).T, strict=True):
                _check_finite(f"gradient in layer {layer.unit.name}", ids, finite)
        total = values["norm"]
        _check_finite("gradient", ids, np.isfinite(total))
        zero = total == 0
        self.rows += len(total)
        self.zero += int(zero.sum())
        self.tiny += int(((total > 0) & (total < _TINY)).sum())
        if self.example is None and zero.any():
            self.example = int(ids[zero.argmax()])

    def check_all_zero(self) -> None:
        """Raise before anything is sealed if all gradients are zero or too small."""
        if self.tiny and self.zero + self.tiny == self.rows:
            raise CaptureError(
                f"all gradients are shorter than {_TINY:g}, so their products are zero",
                code="capture.tiny_gradients",
                fix="Multiply the loss of the task by a constant, such as 1e20.",
            )
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero",
                code="capture.zero_gradients",
                fix="Check the labels; dead units or a detached loss cause this.",
            )

    def notes(self) -> list[str]:
        """Return warnings for the user."""
        zero = f"{self.zero} of {self.rows} samples have a gradient of exactly zero, such as {self.example}"
        tiny = f"{self.tiny} samples have gradients below {_TINY:g}: they may underflow"
        return [note for note, count in ((zero, self.zero), (tiny, self.tiny)) if count]


def _check_finite(name: str, ids: IdArray, finite: np.ndarray[Any, Any]) -> None:
    if not finite.all():
        raise CaptureError(
            f"the {name} of sample {ids[int((~finite).argmax())]} is not finite",
            code="capture.not_finite",
            fix="Check that sample, or capture an earlier checkpoint: training diverged.",
        )
