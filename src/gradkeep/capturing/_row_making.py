"""Rows of a capture: gradients, the values and columns beside them, and alarms about them."""

from __future__ import annotations

import abc
import contextlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from gradkeep._arguments import instance, text, texts, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._keeping import rows_to_store
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._tracer import DenseSoon, Traced, check_measured
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError
from gradkeep.factors._form import form_to_fields
from gradkeep.store import Array, Layer, Ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._audit import RowAudit
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._moments import FirstMoments
    from gradkeep.capturing._tracer import MadeSoon, Tracer
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured, Task
    from gradkeep.factors._form import GradientRows
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Writer

    IdArray = np.ndarray[Any, np.dtype[np.int64]]

Values = dict[str, Any]
Columns = Sequence[str] | Mapping[str, Any]
"""Keys of the batch; or names, each with its key, or with the values of all rows in order."""
_TINY = 1e-18
"""Length of a gradient whose square is next to the smallest number of float32."""
_MOST_JOINED = 4096
"""Rows that are handed to a writer at once, if they take less than a mebibyte."""
_TAKEN = (
    *(COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT),
    *("id", "ids", "run", "checkpoint", "split", "capture", "example", "loss", "norm", "norms"),
    *("output", "slope", "label", "predicted", "token_loss", "probabilities"),
)
_READ = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"),
    *("labels", "label", "targets", "target", "y"),
)
"""Entries that models and tasks read: they stay in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeRows:
    """Some rows as they are kept."""

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
    """Modules whose outputs are kept as embeddings."""
    device: torch.device
    kept: tuple[LayerKeeping, ...] = ()
    audit: RowAudit | None = None
    moments: FirstMoments | None = None
    """Adds up moments of the first rows, where layers are kept dense."""

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
        values = self._measured(traced.measured) | vectors(outputs, batch_size(own))
        gradients, layers = self._keep(traced, values)
        for name, column in batch.columns.items() if isinstance(batch, WithColumns) else ():
            values[name] = _as_kept(name, column)
        return MadeRows(values, gradients, layers)

    def layers(self) -> tuple[Layer, ...]:
        """The layers as a schema has them."""
        return tuple(
            Layer(one.unit.name, one.unit.type, one.unit.size, form_to_fields(one.form))
            for one in self.kept
        )

    @abc.abstractmethod
    def _pass(self, batch: Any, *, alone: bool) -> Traced: ...

    def _measured(self, measured: Measured) -> Values:
        return measured_values(measured)

    @abc.abstractmethod
    def _keep(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        """Gradients by array and by layer; their lengths are added to the values."""

    @abc.abstractmethod
    def fingerprints(self, values: Values) -> dict[str, str]:
        """What is compared when a capture is resumed."""

    def notes(self) -> list[str]:
        """Warnings for the user."""
        return []

    def facts(self) -> list[str]:
        """Lines of the report, beside the notes."""
        return []


def traced_fingerprints(tracer: Tracer, values: Values, skipped: Sequence[str]) -> dict[str, str]:
    """Whose gradients are kept, and which layers have none."""
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
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
        light: Any = ()
        if self.recompute is not None and not alone:
            within, light = self.recompute.step, prepared.light
        soon: MadeSoon | None = DenseSoon(prepared.dense) if prepared.dense else None
        if self.moments is not None and not alone and self.moments.open:
            soon = self.moments.during()
        return prepared.tracer.run(batch, soon=soon, light=light, device=self.device, within=within)

    def _keep(
        self, traced: Traced, values: Values
    ) -> tuple[dict[str, Any], dict[str, GradientRows]]:
        with torch.no_grad():
            factors, gradients = rows_to_store(self.kept, traced.pieces)
            lengths = norms(self.kept, factors).cpu()
        values["norms"] = lengths.float().numpy()
        values["norm"] = lengths.double().square().sum(1).sqrt().float().numpy()
        if self.moments is not None:
            self.moments.add_batch(len(lengths))  # a pass that failed does not count
        return gradients, {unit.name: rows for unit, rows in factors.items()}

    def fingerprints(self, values: Values) -> dict[str, str]:
        """Whose gradients these are, and which layers have none."""
        skipped = [unit.name for unit in self.prepared.skipped]
        return traced_fingerprints(self.prepared.tracer, values, skipped)

    def notes(self) -> list[str]:
        """Which layers are not kept, and why."""
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

    def _measured(self, measured: Measured) -> Values:
        values, logits = measured_values(measured), measured.logits
        # Up to so many classes a row's probabilities are kept: more would be most of its bytes.
        if logits is not None and logits.shape[1] <= 256:
            values["probabilities"] = plain(logits.detach().float().softmax(1))
        return values

    def _keep(
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
        """Take a batch; while moments want rows, those that are there already run once more."""
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
            found=str(error).splitlines()[0][:200],
            fix="capture fewer layers at a time (layers=, with another name=)",
        ) from error
    told = f"out of memory with {rows} samples at once: going on with {rows // 2}"
    warnings.warn(told, CaptureWarning, stacklevel=4)
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


def norms(kept: Sequence[LayerKeeping], factors: Mapping[LayerUnit, GradientRows]) -> torch.Tensor:
    """The length `[B, L]` of each sample's gradient in each layer."""
    squared = [keeping.form.squared_norms(factors[keeping.unit]).clamp(min=0) for keeping in kept]
    return torch.stack(squared, 1).sqrt()


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


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values as numpy has them; 16 bits become float32."""
    values = tensor.detach().cpu()
    low = values.dtype in (torch.bfloat16, torch.float16)
    return (values.float() if low else values).numpy()


def modules_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules with these paths."""
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        raise CaptureError(
            f"no layer {missing[0]!r} to take embeddings from",
            found=f"{', '.join(list(known)[1:9])} ...",
            fix="give the path of a module, such as 'fc1'",
        )
    return {name: known[name] for name in names}


@contextlib.contextmanager
def _first_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The first output of each module while the block runs."""
    outputs: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in modules.items()}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
        if tensors:
            outputs.setdefault(names[module], tensors[0].detach())

    with contextlib.ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(keep).remove)
        yield outputs


def vectors(outputs: dict[str, torch.Tensor], rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """One vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    found = {}
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
        found[f"embedding.{name}"] = output.float().cpu().numpy()
    return found


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
        losses, fix = values["loss"], "look at that sample, or capture an earlier checkpoint"
        finite = np.isfinite(losses)
        if not finite.all():
            row = int((~finite).argmax())
            raise CaptureError(
                f"the loss of sample {ids[row]} is not a number; nothing of this batch was kept",
                found=f"loss {losses[row]}",
                fix=f"{fix}: training diverged",
            )
        if not kept:
            return
        lengths = values["norms"] if "norms" in values else values["norm"][:, None]
        finite = np.isfinite(lengths)
        if not finite.all():
            row, layer = np.argwhere(~finite)[0].tolist()
            where = f" in layer {kept[layer].unit.name}" if "norms" in values else ""
            raise CaptureError(
                f"the gradient of sample {ids[row]} is not a number{where}; nothing of this batch "
                "was kept",
                found=f"loss {losses[row]}",
                fix=f"{fix}: training diverged",
            )
        total = values["norm"]
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
                found=f"{self.rows} samples",
                fix="multiply the loss of the task by a constant, such as 1e20",
            )
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero: there is nothing to answer questions with",
                found=f"{self.rows} samples",
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


@dataclass(frozen=True, slots=True, eq=False)
class WithColumns:
    """A batch, and what is kept of its rows beside what the model is given."""

    batch: Any
    columns: Values
    """A list or tensor with a value for each row, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnChoice:
    """Which columns are kept, and where they come from."""

    keys: dict[str, str]
    """The key of each in a batch."""
    whole: dict[str, Sequence[Any]]
    """The values of all rows, in the loader's order."""
    preview: Preview | None = None
    """What rows look like, in the loader's order."""

    @property
    def by_order(self) -> tuple[str, ...]:
        """Columns that belong to rows by their order alone."""
        return (*self.whole, *(() if self.preview is None else ("preview",)))

    def taken(self, batch: Any, *, at: int, rows: int) -> Any:
        """The batch, whose first row is row `at` of the loader, with its columns beside it."""
        if not self.keys and not self.by_order:
            return batch
        columns: Values = {}
        for name, key in self.keys.items():
            if not isinstance(batch, Mapping) or key not in batch:
                keys = isinstance(batch, Mapping) and ", ".join(map(str, batch))
                raise CaptureError(
                    f"no column {key!r} in the batch",
                    found=keys or type(batch).__name__,
                    expected="batches that are dicts, with the column as a list or tensor",
                    fix="let the collate function pass it on, or give all values in the loader's "
                    f"order: columns={{{name!r}: dataset[{key!r}]}}",
                )
            columns[name] = batch[key]
        if isinstance(batch, Mapping):
            gone = [key for key in self.keys.values() if key not in _READ]
            batch = {key: value for key, value in batch.items() if key not in gone}
        columns |= {name: values[at : at + rows] for name, values in self.whole.items()}
        if self.preview is not None:
            columns |= self.preview.copied(range(at, at + rows))
        for name, values in columns.items():
            _check_length(name, values, rows)
            if not isinstance(values, torch.Tensor):
                columns[name] = list(values)
            _as_kept(name, columns[name])  # before a model runs
        return WithColumns(batch, columns)

    def check_all_used(self, rows: int) -> None:
        """Raise if a column has values for more rows than there were."""
        for name, values in self.whole.items():
            _check_length(name, values, rows)


def column_choice(columns: Columns | None, preview: Preview | None = None) -> ColumnChoice:
    """Parse the `columns` argument of a capture."""
    error, choice = CaptureError, ColumnChoice({}, {}, preview)
    if columns is not None and not isinstance(columns, Mapping):
        columns = {name: name for name in texts("columns", columns, error=error)}
    for name, source in (columns or {}).items():
        text("columns", name, error=error)
        if name in _TAKEN:
            raise CaptureError(
                f"a column cannot be called {name!r}: every capture has one",
                expected=f"another name than {', '.join(_TAKEN)}",
                fix=f"columns={{'document': {name!r}}} keeps it under another name",
            )
        if isinstance(source, str):
            choice.keys[name] = source
            continue
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            expected = "the key of a column in the batch, or the values of all rows"
            instance("columns", source, Sequence, error=error, expected=expected)
        choice.whole[name] = source
    return choice


def without_columns(batch: Any) -> Any:
    """What a model is given of a batch."""
    return batch.batch if isinstance(batch, WithColumns) else batch


def _as_kept(name: str, column: Any) -> np.ndarray[Any, Any] | Ragged:
    """Numbers `[B]`, or texts as the bytes of their UTF-8."""
    if isinstance(column, torch.Tensor):
        values, found = plain(column), f"a tensor of shape {tuple(column.shape)}"
    else:
        kinds = {type(value) for value in column}
        if kinds == {str}:
            broken = [value for value in column if not writable(value)]
            if not broken:
                return Ragged.of_texts(column)
            values, found = np.empty((0, 0)), f"a text that is no UTF-8: {broken[0][:40]!r}"
        else:
            values, found = np.asarray(column), ", ".join(sorted(kind.__name__ for kind in kinds))
    if values.ndim == 1 and (isinstance(column, torch.Tensor) or values.dtype.kind in "biuf"):
        return values
    raise CaptureError(
        f"column {name!r} holds what cannot be kept",
        found=found,
        expected="a text for each row, or a number for each row",
        fix="fill what is missing, and turn lists and dicts into texts, for instance with json.dumps",
    )


def _check_length(name: str, values: Any, rows: int) -> None:
    if not hasattr(values, "__len__") or len(values) != rows:
        known = hasattr(values, "__len__")
        raise CaptureError(
            f"column {name!r} must have a value for each row",
            found=f"{len(values)} values" if known else type(values).__name__,
            expected=f"{rows} values",
            fix="give them in the loader's order; of packed batches, one for each document",
        )
