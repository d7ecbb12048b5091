"""Rows of a capture: gradients, the values and columns beside them, and alarms about them."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from gradkeep._arguments import instance, text, texts, writable
from gradkeep._preview import COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT
from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._keeping import rows_to_store
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._tracer import DenseSoon, check_measured
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError
from gradkeep.factors._form import form_to_fields
from gradkeep.store import Array, Layer, Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing.rules._rules import LayerUnit
    from gradkeep.capturing.tasks._tasks import Measured
    from gradkeep.factors._form import GradientRows

    ArrayKind = Literal["text", "embedding", "scalar"]
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gradkeep._preview import Preview
    from gradkeep.capturing._audit import RowAudit
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._moments import FirstMoments
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Writer

Values = dict[str, Any]
_TINY = 1e-18
"""Length of a gradient whose square is next to the smallest number of float32."""


def measured_values(measured: Measured) -> Values:
    """Losses, outputs, slopes, labels, predictions and token losses, by the names of their arrays."""
    given = {
        "loss": measured.losses,
        "output": measured.outputs,
        "slope": measured.slopes,
        "label": measured.labels,
        "predicted": measured.predictions,
    }
    values: Values = {name: plain(tensor) for name, tensor in given.items() if tensor is not None}
    if measured.tokens is not None:
        tokens = plain(measured.tokens)
        values["token_loss"] = Ragged.of([row[~np.isnan(row)] for row in tokens])
    return values


def norms(kept: Sequence[LayerKeeping], factors: Mapping[LayerUnit, GradientRows]) -> torch.Tensor:
    """The length `[B, L]` of each sample's gradient in each layer."""
    squared = [keeping.form.squared_norms(factors[keeping.unit]).clamp(min=0) for keeping in kept]
    return torch.stack(squared, 1).sqrt()


def arrays_for(values: Mapping[str, Any]) -> tuple[Array, ...]:
    """The arrays that hold such values, NaN and infinity refused but in what is only told."""
    made = []
    for name, value in values.items():
        ragged = isinstance(value, Ragged)
        array = value.values if isinstance(value, Ragged) else value
        made.append(
            Array(
                name,
                dtype=str(array.dtype),
                shape=array.shape[1:],
                kind=_kind(name, array, ragged=ragged),
                encoding="float16" if name == "probabilities" else "plain",
                ragged=ragged,
                nan="refuse" if name in ("loss", "norm", "norms") else "keep",
            )
        )
    return tuple(made)


def _kind(name: str, array: np.ndarray[Any, Any], *, ragged: bool) -> ArrayKind:
    if ragged and array.dtype == np.uint8:
        return "text"
    return "embedding" if name.startswith("embedding.") else "scalar"


def plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values as numpy has them; 16 bits become float32."""
    values = tensor.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return values.numpy()


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
def seeing_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The first output of each module while the block runs."""
    seen: dict[str, torch.Tensor] = {}

    def keeper(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
            if tensors:
                seen.setdefault(name, tensors[0].detach())

        return keep

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keeper(name)).remove)
        yield seen


def vectors(seen: dict[str, torch.Tensor], rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """One vector `[B, D]` per sample: the mean over pixels `[B, D, ...]` or tokens `[B, T, D]`."""
    found = {}
    for name, output in seen.items():
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


def _check_losses(ids: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> None:
    finite = np.isfinite(losses)
    if not finite.all():
        row = int((~finite).argmax())
        raise CaptureError(
            f"the loss of sample {ids[row]} is not a number; nothing of this batch was kept",
            found=f"loss {losses[row]}",
            fix="look at that sample, or capture an earlier checkpoint: training diverged",
        )


class RowAlarms:
    """Counts what looks wrong in the gradients that pass."""

    def __init__(self) -> None:
        self.rows = self.zero = self.tiny = 0
        self.example: int | None = None

    def look(
        self, ids: np.ndarray[Any, Any], values: dict[str, Any], kept: Sequence[LayerKeeping]
    ) -> None:
        """Stop at NaN and infinity, which would spoil every answer; count vanished gradients."""
        _check_losses(ids, values["loss"])
        if not kept:
            return
        apart = "norms" in values
        lengths = torch.from_numpy(values["norms"] if apart else values["norm"][:, None])
        finite = lengths.isfinite()
        if not finite.all():
            row, layer = (~finite).nonzero()[0].tolist()
            raise CaptureError(
                f"the gradient of sample {ids[row]} is not a number"
                + (f" in layer {kept[layer].unit.name}" if apart else "")
                + "; nothing of this batch was kept",
                found=f"loss {values['loss'][row]}",
                fix="look at that sample, or capture an earlier checkpoint: training diverged",
            )
        total = values["norm"]
        self.rows += len(total)
        zero = total == 0
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
                expected="losses whose gradients can be multiplied with each other",
                fix="multiply the loss of the task by a constant, such as 1e20",
            )
        if self.rows and self.zero == self.rows:
            raise CaptureError(
                "all gradients are zero: there is nothing to answer questions with",
                found=f"{self.rows} samples",
                expected="a loss that depends on the chosen layers",
                fix="check the task and the labels; dead units or a detached loss do this",
            )

    def notes(self) -> list[str]:
        """What a user should know."""
        found = []
        if self.zero:
            found.append(
                f"{self.zero} of {self.rows} samples have a gradient of exactly zero, the first "
                f"is {self.example}: no method can say anything about them"
            )
        if self.tiny:
            found.append(f"{self.tiny} samples have gradients below {_TINY:g}: they may underflow")
        return found


_JOINED_BYTES, _MOST_JOINED = 1 << 20, 4096
"""Of rows that are handed to a writer at once."""
_ALLOCATION = ("can't allocate memory", "not enough memory", "out of memory")
_MOST_CLASSES = 256
"""Up to so many classes a row's probabilities are kept: more would be most of its bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeRows:
    """Some rows as they are kept."""

    values: dict[str, Any]
    """What is kept beside gradients, by array."""
    gradients: dict[str, Any] = field(default_factory=dict)
    """Gradients, by array."""
    layers: Mapping[str, GradientRows] = field(default_factory=dict)
    """The same by layer, in their forms."""


class RowMaker(Protocol):
    """Makes the rows of a capture out of batches."""

    @property
    def joined(self) -> int:
        """Rows that are handed to a writer at once, at least."""

    @property
    def audit(self) -> RowAudit | None:
        """What checks some of the rows; None: nothing does."""

    @property
    def kept(self) -> tuple[LayerKeeping, ...]:
        """How each layer is kept; empty where no gradients are."""

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's gradients, or of what is most of a row."""

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """What is compared when a capture is gone on with."""

    def notes(self) -> list[str]:
        """What a user should be warned of."""

    def facts(self) -> list[str]:
        """What stands in the report, beside the notes."""

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The rows of a batch; `alone` without the plan that a run of equal batches has.

        Some rows are checked where their `ids` are given.
        """


@dataclass(frozen=True, slots=True, eq=False)
class GradientMaker:
    """Makes rows with gradients."""

    prepared: PreparedCapture
    watched: dict[str, nn.Module]
    recompute: MemoryBudget | None
    device: torch.device
    moments: FirstMoments | None = None
    """What adds up moments of the first rows, where layers are kept dense."""
    audit: RowAudit | None = None

    @property
    def joined(self) -> int:
        """As many small rows as make a good handful of bytes."""
        return int(min(_MOST_JOINED, max(1.0, _JOINED_BYTES / max(1.0, self.row_bytes))))

    @property
    def kept(self) -> tuple[LayerKeeping, ...]:
        """How each layer is kept."""
        return self.prepared.kept

    @property
    def row_bytes(self) -> float:
        """Bytes on disk of one row's gradients."""
        return self.prepared.row_bytes

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The gradients and the other values of one batch."""
        started = time.perf_counter()
        within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
        light: Any = ()
        if self.recompute is not None and not alone:
            within, light = self.recompute.step, self.prepared.light
        first = None if alone or self.moments is None else self.moments.during()
        soon = DenseSoon(self.prepared.dense) if self.prepared.dense else None
        with seeing_outputs(self.watched) as seen:
            traced = self.prepared.tracer.run(
                batch, soon=first or soon, light=light, device=self.device, within=within
            )
        if self.audit is not None and ids is not None:
            losses = traced.measured.losses.detach()
            self.audit.look(ids, batch, losses, traced, time.perf_counter() - started)
        with torch.no_grad():
            factors, gradients = rows_to_store(self.kept, traced.pieces)
            lengths = norms(self.kept, factors).cpu()
        values = measured_values(traced.measured)
        values |= vectors(seen, batch_size(batch))
        values["norms"] = lengths.float().numpy()
        values["norm"] = lengths.double().square().sum(1).sqrt().float().numpy()
        layers = {unit.name: rows for unit, rows in factors.items()}
        if first is not None:
            first.moments.add(first.parts, batch_size(batch))  # a pass that failed does not count
        return MadeRows(values, gradients, layers)

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Whose gradients these are, and which layers have none."""
        wanted = self.prepared.tracer.of
        outputs = wanted == "output" or (wanted is None and "slope" in values)
        return {
            "of": "output" if outputs else "loss",
            "unused": ", ".join(unit.name for unit in self.prepared.tracer.unused),
            "skipped": ", ".join(unit.name for unit in self.prepared.skipped),
        }

    def notes(self) -> list[str]:
        """Which layers are not kept, and why."""
        found = []
        if self.prepared.tracer.unused:
            names = ", ".join(unit.name for unit in self.prepared.tracer.unused)
            found.append(f"the task does not use these layers, so they were not kept: {names}")
        if self.prepared.skipped:
            names = ", ".join(unit.name for unit in self.prepared.skipped)
            found.append(f"skipped, as no rule covers them: {names}")
        return found

    def facts(self) -> list[str]:
        """Nothing beside the table of layers."""
        return []


@dataclass(frozen=True, slots=True, eq=False)
class LossMaker:
    """Makes rows of losses, outputs, labels, predictions and probabilities: one forward pass."""

    model: nn.Module
    task: Task
    watched: dict[str, nn.Module]
    device: torch.device
    joined: int = _MOST_JOINED
    """A row takes so little that handing it over would be a good part of its price."""
    audit: RowAudit | None = None

    @property
    def kept(self) -> tuple[LayerKeeping, ...]:
        """No layer is."""
        return ()

    @property
    def row_bytes(self) -> float:
        """About what the values of a row take."""
        return 512.0

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The values of one batch, without a backward pass."""
        started = time.perf_counter()
        own = to_device(batch, self.device)
        with seeing_outputs(self.watched) as seen:
            measured = losses_alone(self.task, self.model, own)
        rows = batch_size(batch)
        check_measured("losses", measured.losses, rows)
        if self.audit is not None and ids is not None:
            self.audit.look(ids, batch, measured.losses, None, time.perf_counter() - started)
        values = measured_values(measured)
        logits = measured.logits
        if logits is not None and logits.shape[1] <= _MOST_CLASSES:
            values["probabilities"] = plain(logits.detach().float().softmax(1))
        return MadeRows(values | vectors(seen, rows))

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """That there are no gradients."""
        return {"of": "nothing"}

    def notes(self) -> list[str]:
        """Nothing to know."""
        return []

    def facts(self) -> list[str]:
        """Nothing beside the table of layers."""
        return []


class JoinedRows:
    """Rows of several batches on their way to a writer: each handing over has its price."""

    def __init__(self, writer: Writer, least: int) -> None:
        self._writer, self._least = writer, least
        self._parts: list[tuple[Any, dict[str, Any]]] = []
        self._rows = 0

    def needs(self, count: int) -> bool:
        """Whether any of the next rows has to be made; while rows wait here, all have."""
        return self._least > 1 or self._writer.needs(count)

    def skip(self, ids: np.ndarray[Any, Any]) -> None:
        """Pass over rows that need not be made."""
        self._writer.skip(ids)

    def add(self, ids: np.ndarray[Any, Any], values: dict[str, Any]) -> None:
        """Take rows; hand them over when there are enough."""
        self._parts.append((ids, values))
        self._rows += len(ids)
        if self._rows >= self._least:
            self.flush()

    def flush(self) -> None:
        """Hand over what is left."""
        if len(self._parts) == 1:
            self._writer.append(*self._parts[0])
        elif self._parts:
            ids, values = zip(*self._parts, strict=True)
            joined = {name: _concatenated([part[name] for part in values]) for name in values[0]}
            self._writer.append(np.concatenate(ids), joined)
        self._parts, self._rows = [], 0


def _concatenated(parts: list[Any]) -> Any:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Ragged(np.concatenate([part.values for part in parts]), offsets)


def append_rows(
    rows: JoinedRows,
    maker: RowMaker,
    ids: np.ndarray[Any, Any],
    found: np.ndarray[Any, Any],
    batch: Any,
    at_once: int,
    alarms: RowAlarms,
    moments: FirstMoments | None = None,
) -> int:
    """Capture a batch, in parts if it does not fit; returns how many samples fit at once.

    While moments want rows, those that are there already run once more.
    """
    start, count = 0, len(ids)
    while start < count:
        left = count - start
        # Parts of one size: a short last one would keep the processor waiting.
        stop = start + math.ceil(left / math.ceil(left / at_once))
        needed = rows.needs(stop - start)
        if not needed and (moments is None or not moments.open):
            rows.skip(ids[start:stop])
            start = stop
            continue
        part = batch if stop - start == count else rows_of(batch, start, stop)
        try:
            made = maker.make(part, ids=ids[start:stop])
        except (RuntimeError, MemoryError) as error:
            at_once = _half_of(stop - start, error)
            continue
        if needed:
            alarms.look(ids[start:stop], made.values, maker.kept)
            values = made.values | {"example": found[start:stop]}
            rows.add(ids[start:stop], values | made.gradients)
        else:
            rows.skip(ids[start:stop])
        start = stop
    return at_once


def _half_of(rows: int, error: BaseException) -> int:
    """Half the samples, if memory ran out; else the error goes on."""
    text = str(error).lower()
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not memory and not any(words in text for words in _ALLOCATION):
        raise error
    if rows <= 1:
        raise CaptureError(
            "there is not enough memory for a single sample",
            found=str(error).splitlines()[0][:200],
            fix="capture fewer layers at a time (layers=, with another name=)",
        ) from error
    warnings.warn(
        f"out of memory with {rows} samples at once: going on with {rows // 2}",
        CaptureWarning,
        stacklevel=4,
    )
    return rows // 2


def layers_of(maker: RowMaker) -> tuple[Layer, ...]:
    """The layers as a schema has them."""
    return tuple(
        Layer(kept.unit.name, kept.unit.type, kept.unit.size, form_to_fields(kept.form))
        for kept in maker.kept
    )


Columns = Sequence[str] | Mapping[str, Any]
"""Keys of the batch; or names, each with its key, or with the values of all rows in order."""
_TAKEN = (
    *(COPIED_IMAGE, COPIED_TABLE, COPIED_TEXT),
    *("id", "ids", "run", "checkpoint", "split", "capture", "example", "loss", "norm", "norms"),
    *("output", "slope", "label", "predicted", "token_loss", "probabilities"),
)
_READ = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"),
    *("labels", "label", "targets", "target", "y"),
)
"""What models and tasks read: it stays in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class WithColumns:
    """A batch, and what is kept of its rows beside what the model is given."""

    batch: Any
    columns: dict[str, Any]
    """A list or tensor with a value for each row, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnChoice:
    """Which columns are kept, and where they come from."""

    keys: dict[str, str]
    """The key of each in a batch."""
    whole: dict[str, Sequence[Any]]
    """The values of all rows, in the loader's order."""
    preview: Preview | None = None
    """What rows look like, which is asked for in the loader's order."""

    @property
    def by_order(self) -> tuple[str, ...]:
        """What is told apart by the order of rows alone."""
        return (*self.whole, *(() if self.preview is None else ("preview",)))

    def taken(self, batch: Any, *, at: int, rows: int) -> Any:
        """The batch, whose first row is row `at` of the loader, with its columns beside it."""
        if not self.keys and not self.by_order:
            return batch
        found: dict[str, Any] = {}
        for name, key in self.keys.items():
            if not isinstance(batch, Mapping) or key not in batch:
                raise CaptureError(
                    f"no column {key!r} in the batch",
                    found=", ".join(map(str, batch))
                    if isinstance(batch, Mapping)
                    else type(batch).__name__,
                    expected="batches that are dicts, with the column as a list or tensor",
                    fix="let the collate function pass it on, or give all values in the loader's "
                    f"order: columns={{{name!r}: dataset[{key!r}]}}",
                )
            found[name] = batch[key]
        if isinstance(batch, Mapping):
            gone = [key for key in self.keys.values() if key not in _READ]
            batch = {key: value for key, value in batch.items() if key not in gone}
        found |= {name: values[at : at + rows] for name, values in self.whole.items()}
        if self.preview is not None:
            found |= self.preview.copied(range(at, at + rows))
        for name, values in found.items():
            if not hasattr(values, "__len__") or len(values) != rows:
                raise _wrong_length(name, values, rows)
            if not isinstance(values, torch.Tensor):
                found[name] = list(values)
            _as_kept(name, found[name])  # before a model runs
        return WithColumns(batch, found)

    def check_all_used(self, rows: int) -> None:
        """Raise if a column has values for more rows than there were."""
        for name, values in self.whole.items():
            if len(values) != rows:
                raise _wrong_length(name, values, rows)


def column_choice(columns: Columns | None, preview: Preview | None = None) -> ColumnChoice:
    """What was asked for, once it makes sense."""
    error = CaptureError
    if columns is None:
        return ColumnChoice({}, {}, preview)
    if not isinstance(columns, Mapping):
        columns = {name: name for name in texts("columns", columns, error=error)}
    keys: dict[str, str] = {}
    whole: dict[str, Sequence[Any]] = {}
    for name, given in columns.items():
        text("columns", name, error=error)
        if name in _TAKEN:
            raise CaptureError(
                f"a column cannot be called {name!r}: every capture has one",
                expected=f"another name than {', '.join(_TAKEN)}",
                fix=f"columns={{'document': {name!r}}} keeps it under another name",
            )
        if isinstance(given, str):
            keys[name] = given
        else:
            expected = "the key of a column in the batch, or the values of all rows"
            if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
                instance("columns", given, Sequence, error=error, expected=expected)
            whole[name] = given
    return ColumnChoice(keys, whole, preview)


def without_columns(batch: Any) -> Any:
    """What a model is given of a batch."""
    return batch.batch if isinstance(batch, WithColumns) else batch


def keeping_columns(maker: RowMaker, batch: Any) -> RowMaker:
    """What makes rows of batches like this one, with their columns if they have any."""
    return ColumnMaker(maker) if isinstance(batch, WithColumns) else maker


def maker_within(maker: RowMaker) -> RowMaker:
    """What makes the rows to which columns are added."""
    return maker.maker if isinstance(maker, ColumnMaker) else maker


@dataclass(frozen=True, slots=True, eq=False)
class ColumnMaker:
    """Makes the rows of a capture as another maker does, and adds their columns."""

    maker: RowMaker

    @property
    def joined(self) -> int:
        """Rows that are handed to a writer at once, at least."""
        return self.maker.joined

    @property
    def kept(self) -> tuple[LayerKeeping, ...]:
        """How each layer is kept."""
        return self.maker.kept

    @property
    def row_bytes(self) -> float:
        """Bytes of one row's gradients, or of what is most of a row."""
        return self.maker.row_bytes

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, str]:
        """What is compared when a capture is gone on with."""
        return self.maker.fingerprints(values)

    def notes(self) -> list[str]:
        """What a user should know."""
        return self.maker.notes()

    def facts(self) -> list[str]:
        """What stands in the report, beside the notes."""
        return self.maker.facts()

    @property
    def audit(self) -> RowAudit | None:
        """What checks some of the rows."""
        return self.maker.audit

    def make(self, batch: Any, *, alone: bool = False, ids: Any = None) -> MadeRows:
        """The rows of a batch, with their columns."""
        made = self.maker.make(without_columns(batch), alone=alone, ids=ids)
        columns = batch.columns if isinstance(batch, WithColumns) else {}
        added = {name: _as_kept(name, values) for name, values in columns.items()}
        return MadeRows(made.values | added, made.gradients, made.layers)


def _as_kept(name: str, given: Any) -> np.ndarray[Any, Any] | Ragged:
    """Numbers `[B]`, or texts as the bytes of their UTF-8."""
    if isinstance(given, torch.Tensor):
        values = plain(given)
        if values.ndim == 1:
            return values
        raise _unkept(name, f"a tensor of shape {tuple(given.shape)}")
    kinds = {type(value) for value in given}
    if kinds == {str}:
        broken = [value for value in given if not writable(value)]
        if broken:
            raise _unkept(name, f"a text that cannot be written as UTF-8: {broken[0][:40]!r}")
        return Ragged.of_texts(given)
    values = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise _unkept(name, ", ".join(sorted(kind.__name__ for kind in kinds)))
    return values


def _unkept(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"column {name!r} holds what cannot be kept",
        found=found,
        expected="a text for each row, or a number for each row",
        fix="fill what is missing, and turn lists and dicts into texts, for instance with json.dumps",
    )


def _wrong_length(name: str, values: Any, rows: int) -> CaptureError:
    found = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
    return CaptureError(
        f"column {name!r} must have a value for each row",
        found=found,
        expected=f"{rows} values",
        fix="give them in the loader's order; of packed batches, one for each document",
    )
