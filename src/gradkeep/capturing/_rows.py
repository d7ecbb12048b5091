"""Rows of a capture: gradients and the values beside them, made from batches and given to a writer."""

from __future__ import annotations

import abc
import contextlib
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._keeping import rows_to_store
from gradkeep.capturing._loader import WithColumns, column_array, plain, without_columns
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._tracer import Reducer, Traced, check_measured, restore_gradients
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError
from gradkeep.factors._form import form_to_fields
from gradkeep.store import Array, Layer, Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from gradkeep.capturing._audit import RowAudit
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._moments import FirstMoments
    from gradkeep.capturing._tracer import Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.factors._form import GradientRows
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Writer

    IdArray = np.ndarray[Any, np.dtype[np.int64]]

Values = dict[str, Any]
_TINY = 1e-18
"""Length of a gradient whose square is next to the smallest number of float32."""
_MOST_JOINED = 4096
"""Rows that are handed to a writer at once, if they take less than a mebibyte."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeRows:
    """Some rows as they are stored."""

    values: Values
    """Values beside gradients, by array."""
    gradients: dict[str, Any]
    """Gradients, by array."""
    layers: Mapping[str, GradientRows]
    """The same by layer, in their forms."""


@dataclass(slots=True, eq=False, kw_only=True)
class RowMaker(abc.ABC):
    """Makes the rows of a capture out of batches."""

    watched: dict[str, nn.Module]
    """Modules whose outputs are stored as embeddings."""
    device: torch.device
    kept: tuple[LayerKeeping, ...] = ()
    audit: RowAudit | None = None
    moments: FirstMoments | None = None
    """Adds up moments of the first rows, where layers are stored dense."""

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients, or about those of its values."""
        return sum(keeping.row_bytes for keeping in self.kept) if self.kept else 512.0

    @property
    def joined(self) -> int:
        """Rows that are handed to a writer at once: each append has its price."""
        return int(min(_MOST_JOINED, max(1.0, (1 << 20) / max(1.0, self.row_bytes))))

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """Make the rows of a batch; `alone` without the plan that a run of equal batches has.

        Some rows are audited where their `ids` are given.
        """
        started, own = time.perf_counter(), without_columns(batch)
        with _first_outputs(self.watched) as outputs:
            traced = self._pass(own, alone=alone)
        if self.audit is not None and ids is not None:
            losses = traced.measured.losses.detach()
            self.audit.look(ids, own, losses, traced, time.perf_counter() - started)
        values = self._values(traced.measured) | _embeddings(outputs, batch_size(own))
        gradients, layers = self._gradients(traced, values)
        if isinstance(batch, WithColumns):
            values |= {name: column_array(name, one) for name, one in batch.columns.items()}
        return MadeRows(values, gradients, layers)

    def layers(self) -> tuple[Layer, ...]:
        """The layers as a schema has them."""
        return tuple(
            Layer(one.unit.name, one.unit.type, one.unit.size, form_to_fields(one.form))
            for one in self.kept
        )

    @abc.abstractmethod
    def _pass(self, batch: Any, *, alone: bool) -> Traced: ...

    def _values(self, measured: Measured) -> Values:
        return measured_values(measured)

    @abc.abstractmethod
    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        """Gradients by array and by layer; their lengths are added to the values."""

    @abc.abstractmethod
    def fingerprints(self, values: Values) -> dict[str, str]:
        """Facts that are compared when a capture is resumed."""

    def notes(self) -> list[str]:
        """Warnings for the user."""
        return []

    def facts(self) -> list[str]:
        """Lines of the report, beside the notes."""
        return []


def run_tracer(
    tracer: Tracer,
    batch: Any,
    reducer: Reducer | None,
    device: torch.device,
    recompute: MemoryBudget | None,
    light: frozenset[nn.Module],
) -> Traced:
    """Run a batch; where activations are recomputed, inside of a step of that budget."""
    if recompute is None:
        return tracer.run(batch, reducer=reducer, device=device)
    return tracer.run(batch, reducer=reducer, light=light, device=device, within=recompute.step)


def traced_fingerprints(tracer: Tracer, values: Values, skipped: Sequence[str]) -> dict[str, str]:
    """Whose gradients are stored, and which layers have none."""
    outputs = tracer.of == "output" or (tracer.of is None and "slope" in values)
    return {
        "of": "output" if outputs else "loss",
        "unused": ", ".join(unit.name for unit in tracer.unused),
        "skipped": ", ".join(skipped),
    }


@dataclass(slots=True, eq=False, kw_only=True)
class GradientMaker(RowMaker):
    """Makes rows with gradients."""

    prepared: PreparedCapture
    recompute: MemoryBudget | None = None

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        prepared = self.prepared
        reducer = Reducer(prepared.dense, restore_gradients) if prepared.dense else None
        if self.moments is not None and not alone and self.moments.open:
            reducer = self.moments.reducer()
        recompute = None if alone else self.recompute
        return run_tracer(prepared.tracer, batch, reducer, self.device, recompute, prepared.light)

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        with torch.no_grad():
            factors, gradients = rows_to_store(self.kept, traced.pieces)
            values |= norm_values(self.kept, factors)
        if self.moments is not None:
            self.moments.add_batch(len(values["norm"]))  # a pass that failed does not count
        return gradients, {unit.name: rows for unit, rows in factors.items()}

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Whose gradients these are, and which layers have none."""
        skipped = [unit.name for unit in self.prepared.skipped]
        return traced_fingerprints(self.prepared.tracer, values, skipped)

    def notes(self) -> list[str]:
        """Which layers are not stored, and why."""
        unused = ", ".join(unit.name for unit in self.prepared.tracer.unused)
        skipped = ", ".join(unit.name for unit in self.prepared.skipped)
        notes = [
            (unused, "the task does not use these layers, so they were not kept"),
            (skipped, "skipped, as no rule covers them"),
        ]
        return [f"{why}: {names}" for names, why in notes if names]


@dataclass(slots=True, eq=False, kw_only=True)
class LossMaker(RowMaker):
    """Makes rows of losses, outputs, labels, predictions and probabilities: one forward pass."""

    model: nn.Module
    task: Task

    @property
    def joined(self) -> int:
        """As many as there may be: handing over would be a good part of a row's price."""
        return _MOST_JOINED

    def _pass(self, batch: Any, *, alone: bool) -> Traced:
        measured = losses_alone(self.task, self.model, to_device(batch, self.device))
        check_measured("losses", measured.losses, batch_size(batch))
        return Traced(measured, {})

    def _values(self, measured: Measured) -> Values:
        values, logits = measured_values(measured), measured.logits
        # Probabilities of more classes would be most of a row's bytes.
        if logits is not None and logits.shape[1] <= 256:
            values["probabilities"] = plain(logits.detach().float().softmax(1))
        return values

    def _gradients(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        return {}, {}

    def fingerprints(self, values: Values) -> dict[str, str]:
        """That there are no gradients."""
        return {"of": "nothing"}


@dataclass(slots=True, eq=False)
class RowFeed:
    """Makes the rows of batches that a writer needs, in parts if they do not fit, and hands them over."""

    writer: Writer
    maker: RowMaker
    at_once: int
    """Samples that run at once; halved when memory runs out."""
    alarms: RowAlarms
    least: int = 1
    """Rows that are joined before they are handed over."""
    reused: int = 0
    """Rows of batches that were there already."""
    _parts: list[tuple[Any, Values]] = field(default_factory=list)

    def add(self, ids: IdArray, digests: np.ndarray[Any, Any], batch: Any) -> None:
        """Take a batch; while moments need rows, those that are there already run once more."""
        start, count = 0, len(ids)
        if not self._parts and not self.writer.needs(count):
            self.reused += count
        while start < count:
            left = count - start
            # Parts of one size: a short last one would keep the processor waiting.
            stop = start + math.ceil(left / math.ceil(left / self.at_once))
            needed = self.least > 1 or self.writer.needs(stop - start)
            moments = self.maker.moments
            if needed or (moments is not None and moments.open):
                part = batch if stop - start == count else rows_of(batch, start, stop)
                try:
                    made = self.maker.make(part, ids=ids[start:stop])
                except (RuntimeError, MemoryError) as error:
                    self.at_once = _half_of(stop - start, error)
                    continue
                if needed:
                    self.alarms.look(ids[start:stop], made.values, self.maker.kept)
                    values = made.values | {"example": digests[start:stop]} | made.gradients
                    self._parts.append((ids[start:stop], values))
            if not needed:
                self.writer.skip(ids[start:stop])
            elif sum(len(own) for own, _ in self._parts) >= self.least:
                self.flush()
            start = stop

    def flush(self) -> None:
        """Hand over the rows that wait."""
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
    """Half the samples, if memory ran out; else the error goes on."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not memory and not any(word in str(error).lower() for word in words):
        raise error
    if rows <= 1:
        raise CaptureError(
            "there is not enough memory for a single sample",
            fix="capture fewer layers at a time (layers=, with another name=)",
        ) from error
    note = f"out of memory with {rows} samples at once: going on with {rows // 2}"
    warnings.warn(note, CaptureWarning, stacklevel=4)
    return rows // 2


def measured_values(measured: Measured) -> Values:
    """Losses, outputs, slopes, labels, predictions and token losses, by the names of their arrays."""
    tensors = {
        "loss": measured.losses,
        "output": measured.outputs,
        "slope": measured.slopes,
        "label": measured.labels,
        "predicted": measured.predictions,
    }
    values = {name: plain(tensor) for name, tensor in tensors.items() if tensor is not None}
    if measured.tokens is None:
        return values
    tokens = plain(measured.tokens)
    return values | {"token_loss": Ragged.of([row[~np.isnan(row)] for row in tokens])}


def norm_values(
    kept: Sequence[LayerKeeping], factors: Mapping[LayerUnit, GradientRows]
) -> dict[str, np.ndarray[Any, Any]]:
    """The length of each sample's gradient `[B]`, and of those of its layers `[B, L]`."""
    squared = [keeping.form.squared_norms(factors[keeping.unit]).clamp(min=0) for keeping in kept]
    lengths = torch.stack(squared, 1).sqrt().cpu()
    whole = lengths.double().square().sum(1).sqrt().float()
    return {"norms": lengths.float().numpy(), "norm": whole.numpy()}


def arrays_for(values: Mapping[str, Any]) -> tuple[Array, ...]:
    """The arrays that hold such values; NaN and infinity are refused in losses and lengths."""
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


def modules_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these paths."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise CaptureError(
                f"no layer {name!r} to take embeddings from",
                found=f"{', '.join(list(known)[1:9])} ...",
                fix="give the path of a module, such as 'fc1'",
            )
    return {name: known[name] for name in names}


@contextlib.contextmanager
def _first_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The first output of each module while the block runs."""
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
    """One vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    values = {}
    for name, output in outputs.items():
        if output.dim() < 2 or len(output) != rows:
            raise CaptureError(
                f"layer {name} puts out no vector per sample",
                found=f"shape {tuple(output.shape)} for {rows} samples",
                expected="[B, D], [B, T, D] or [B, D, H, W]",
            )
        if output.dim() == 3:
            output = output.mean(1)
        elif output.dim() > 3:
            output = output.flatten(2).mean(2)
        values[f"embedding.{name}"] = output.float().cpu().numpy()
    return values


@dataclass(slots=True)
class RowAlarms:
    """Counts of suspicious gradients."""

    rows: int = 0
    zero: int = 0
    tiny: int = 0
    example: int | None = None
    """The first row without a gradient."""

    def look(self, ids: IdArray, values: Values, kept: Sequence[LayerKeeping]) -> None:
        """Stop at NaN and infinity, which would spoil every answer; count vanished gradients."""
        _check_finite("loss", ids, np.isfinite(values["loss"]))
        if not kept:
            return
        if "norms" in values:
            for keeping, finite in zip(kept, np.isfinite(values["norms"]).T, strict=True):
                _check_finite(f"gradient in layer {keeping.unit.name}", ids, finite)
        total = values["norm"]
        _check_finite("gradient", ids, np.isfinite(total))
        zero = total == 0
        self.rows += len(total)
        self.zero += int(zero.sum())
        self.tiny += int(((total > 0) & (total < _TINY)).sum())
        if self.example is None and zero.any():
            self.example = int(ids[zero.argmax()])

    def check_all_zero(self) -> None:
        """Raise before anything is sealed if there was not a single gradient."""
        if self.tiny and self.zero + self.tiny == self.rows:
            raise CaptureError(
                f"all gradients are shorter than {_TINY:g}: products of them are zero in float32",
                fix="multiply the loss of the task by a constant, such as 1e20",
            )
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero: there is nothing to answer questions with",
                fix="check the task and the labels; dead units or a detached loss do this",
            )

    def notes(self) -> list[str]:
        """Warnings for the user."""
        notes = []
        if self.zero:
            notes.append(
                f"{self.zero} of {self.rows} samples have a gradient of exactly zero, the first "
                f"is {self.example}: no method can say anything about them"
            )
        if self.tiny:
            notes.append(f"{self.tiny} samples have gradients below {_TINY:g}: they may underflow")
        return notes


def _check_finite(what: str, ids: IdArray, finite: np.ndarray[Any, Any]) -> None:
    if not finite.all():
        raise CaptureError(
            f"the {what} of sample {ids[int((~finite).argmax())]} is not a number; nothing of this "
            "batch was kept",
            fix="look at that sample, or capture an earlier checkpoint: training diverged",
        )
