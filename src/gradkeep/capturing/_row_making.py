"""What is made of a batch: gradients with the values beside them, or the values alone."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gradkeep.capturing._batches import batch_size, rows_of, to_device
from gradkeep.capturing._keeping import rows_to_store
from gradkeep.capturing._report import CaptureWarning
from gradkeep.capturing._row_values import measured_values, norms, plain, seeing_outputs, vectors
from gradkeep.capturing._tracer import DenseSoon, check_measured
from gradkeep.capturing.tasks._task import losses_alone
from gradkeep.errors import CaptureError
from gradkeep.factors._form import form_to_fields
from gradkeep.store import Layer, Ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import nn

    from gradkeep.capturing._audit import RowAudit
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._first_moments import FirstMoments
    from gradkeep.capturing._keeping import LayerKeeping
    from gradkeep.capturing._row_values import RowAlarms
    from gradkeep.capturing.tasks._task import Task
    from gradkeep.factors._form import GradientRows
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import Writer

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
