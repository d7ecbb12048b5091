"""Replay of one checkpoint over a data set: check the stored rows, compute the others, write them.

One loop serves every capture. A new one computes all rows; a resumed one compares the stored rows and
computes the others; a finished one is only compared; in a distributed one workers compute segments first,
and then it continues as a resumed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as gs
from gradkeep import remat
from gradkeep._budgets import parse_budget
from gradkeep._display import progress as show_progress
from gradkeep.capturing._batches import batch_size, digests, rows_of, to_device
from gradkeep.capturing._coordinates import CoordinateMaker, coordinate_maker, find_basis
from gradkeep.capturing._first_batch import (
    QUERIES,
    CaptureSettings,
    coordinate_footprint,
    prepare_capture,
    row_footprint,
    rows_at_once,
    rows_within,
    segment_bytes,
    segment_rows,
)
from gradkeep.capturing._loader import task_batches, without_columns
from gradkeep.capturing._readiness import (
    check_recomputable,
    device_of,
    has_modes,
    in_mode,
    ready,
    restore_buffers,
)
from gradkeep.capturing._report import Captured, CaptureWarning, report_layer
from gradkeep.capturing._resume import (
    EarlierRun,
    RecomputeCheck,
    RowAudit,
    RowFingerprints,
    change_of_first_rows,
    changed_rows_error,
    check_repeatable,
    find_earlier_run,
    fingerprint_function,
    fingerprint_weights,
)
from gradkeep.capturing._rows import (
    FirstMoments,
    GradientMaker,
    LossMaker,
    RowAlarms,
    RowFeed,
    arrays_for,
    find_modules,
)
from gradkeep.capturing._storage import NO_ADJUSTMENTS, Adjustments, BatchMismatchError
from gradkeep.capturing._tracer import Tracer
from gradkeep.capturing.rules._rules import units_of
from gradkeep.capturing.tasks._tasks import measure_losses
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._capture import DistributedCapture
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._loader import Columns, Ids
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._rows import RowArrays, RowMaker
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import CaptureKey, Checkpoint, Schema, Store

_log = logging.getLogger(__name__)
LOSSES = "losses"
"""`keep` of a capture without gradients."""
Report = Callable[[int, int], None]
Delivered = tuple[Any, Any, Any]
"""Ids, fingerprints and contents of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class CaptureRequest:
    """A capture without its store, as it is sent to workers."""

    model: nn.Module
    loader: Iterable[Any]
    task: Task
    settings: CaptureSettings
    embeddings: tuple[str, ...]
    ids: Ids | None
    columns: Columns | None
    preview: Preview | None
    memory_budget: float | str | None
    mode: Mode | None


@dataclass(frozen=True, slots=True, eq=False)
class FirstBatch:
    """Result of trying a capture on its first rows."""

    maker: RowMaker
    at_once: int
    """Number of samples that run at once."""
    repeatable: bool
    """True if recomputed rows are the same."""
    rows: RowArrays
    """First rows."""
    schema: Schema


class Replay:
    """All checkpoints of one call to `capture`."""

    def __init__(
        self,
        request: CaptureRequest,
        store: Store,
        *,
        resume: bool = True,
        progress: bool = False,
        distributed: DistributedCapture | None = None,
    ) -> None:
        self.request, self.store, self.resume, self.progress = request, store, resume, progress
        self.distributed = distributed
        self.model, self.task, self.settings = request.model, request.task, request.settings
        memory = request.memory_budget
        budget = None if memory is None else parse_budget(memory)
        self.batches = task_batches(
            request.loader,
            self.model,
            self.task,
            request.mode,
            ids=request.ids,
            columns=request.columns,
            preview=request.preview,
        )
        self.budget = budget if isinstance(budget, int) else None
        self.recompute: remat.MemoryBudget | None = None
        if isinstance(budget, float):
            self.recompute = remat.memory_budget(budget, mode="planned")
        self.device = device_of(self.model)
        self._common: dict[str, Any] = {
            "watched": find_modules(self.model, request.embeddings),
            "device": self.device,
            "recompute": self.recompute,
        }
        """Fields of every maker of rows."""
        self.contents: RowFingerprints | None = None
        """Fingerprints of the first pass; every other pass must have the same rows."""

    def capture(self, key: CaptureKey, step: int | None, lr: float | None) -> Captured:
        """Capture the weights that the model has now, in this process or with workers.

        If a batch does not fit the choices made on the first one, start again, adjusted and in this process
        alone.
        """
        started, cpu = time.perf_counter(), time.process_time()
        adjustments, distributed = NO_ADJUSTMENTS, self.distributed
        checkpoint = gs.Checkpoint(key.run, key.checkpoint, "", step, lr)
        while True:
            try:
                captured = self._attempt(key, checkpoint, distributed, adjustments)
                seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
                return dataclasses.replace(captured, seconds=seconds, cpu_seconds=cpu)
            except BatchMismatchError as error:
                more = adjustments | error.adjustments
                earlier = find_earlier_run(self.store, key)
                is_sealed = earlier is not None and earlier.sealed
                if is_sealed or (distributed is None and more == adjustments):
                    raise
                is_known = distributed is None or error.adjustments
                distributed = None  # this process determines what the batch needs
                if not is_known:
                    continue
                if error.candidates:
                    more |= Adjustments(late=self._used_layers(error.candidates))
                _log.info("restarting the capture: %s", error.message)
                if earlier is not None:
                    more |= earlier.adjustments
                    self.store.delete(key)
                adjustments = more

    def _attempt(
        self,
        key: CaptureKey,
        checkpoint: Checkpoint,
        distributed: DistributedCapture | None,
        adjustments: Adjustments,
    ) -> Captured:
        """Capture with these adjustments."""
        packed = b"" if distributed is None else distributed.packed()
        with contextlib.ExitStack() as stack:
            notes = self.prepare_model(stack)
            if self.recompute is not None:
                check_recomputable(self.model)
            earlier = find_earlier_run(self.store, key)
            if earlier is not None and not self.resume:
                raise CaptureError(
                    "this capture exists already",
                    code="capture.exists",
                    path=earlier.block.path,
                    fix="Pass resume=True to continue it, another name=, or delete it first.",
                )
            first = self.try_first_rows(key, earlier, adjustments)
            weights = str(first.schema.fingerprints["weights"])
            # Rows of an earlier run are recomputed and compared instead.
            function = fingerprint_function(self.model) if earlier is None else None
            checkpoint = dataclasses.replace(checkpoint, weights=weights, function=function)
            if earlier is not None and earlier.sealed:
                earlier.block.schema.require_same(first.schema, path=earlier.block.path)
                self.store.add_checkpoint(checkpoint)
                with self._bar(f"compare {key.split} at {key.checkpoint}") as report:
                    earlier.check_all(
                        self._delivered(report), first.maker if first.repeatable else None
                    )
                return self._report(key, first.maker, len(earlier.block), notes)
            delivered = self._delivered(None)
            begin = next(delivered)  # errors here leave the store unchanged
            self.store.add_checkpoint(checkpoint)
            alarms, reused = RowAlarms(), None
            if distributed is not None:
                delivered.close()
                if not first.repeatable:
                    raise CaptureError(
                        "a random model gives other rows in every worker",
                        code="capture.random_with_workers",
                        fix="Pass mode='eval', or leave out workers=.",
                    )
                reused = 0 if earlier is None else len(earlier.block)
                self.store.write(key, first.schema).close()  # workers read the schema
                alarms = distributed.fill(SegmentMaker(self, key, first), packed)
                earlier = find_earlier_run(self.store, key)
                if earlier is not None and len(earlier.block) > 0:
                    stack.enter_context(distributed.threads())
                delivered = self._delivered(None)
                begin = next(delivered)
            passing = itertools.chain([begin], delivered)
            seen = self._write(key, first, earlier, passing, alarms)
            reused = seen if reused is None else reused
            return self._report(key, first.maker, reused, [*notes, *alarms.notes()])

    def _report(
        self, key: CaptureKey, maker: RowMaker, reused: int, notes: Sequence[str]
    ) -> Captured:
        """Describe the finished capture, and warn of anything suspicious."""
        block, notes = self.store.read(key), (*notes, *maker.notes())
        for note in notes:
            warnings.warn(note, CaptureWarning, stacklevel=5)
        layers = tuple(report_layer(layer) for layer in maker.layers)
        size = block.manifest.bytes
        notes = (*notes, *maker.facts())
        return Captured(key, len(block), reused, size, layers, 0.0, 0.0, notes, self.store)

    def prepare_model(self, stack: contextlib.ExitStack) -> list[str]:
        """Prepare the model for replay until the stack closes; return notes for the user."""
        notes = stack.enter_context(ready(self.model))
        stack.enter_context(in_mode(self.model, self.request.mode))
        for parameter in self.model.parameters():  # restore `.grad` in any case
            stack.callback(setattr, parameter, "grad", parameter.grad)
        stack.enter_context(restore_buffers(self.model))
        return notes

    def try_first_rows(
        self, key: CaptureKey, earlier: EarlierRun | None, adjustments: Adjustments
    ) -> FirstBatch:
        """Choose how rows are computed, compute the first ones, and build their schema."""
        weights = fingerprint_weights(self.model)
        adjustments |= NO_ADJUSTMENTS if earlier is None else earlier.adjustments
        if self.settings.keep == LOSSES:
            maker: RowMaker = LossMaker(tracer=Tracer(self.model, self.task), **self._common)
            at_once = batch_size(self.batches.first)
            repeatable = self._check_repeatable(maker)
        else:
            maker, at_once, repeatable = self._gradient_maker(key, weights, earlier, adjustments)
        rows = maker.make(self._first_rows(), alone=True)
        values = rows.values | {"example": digests(self.batches.first)[:0]}
        gradients = tuple(array for layer in maker.layers for array in layer.arrays)
        small, size = isinstance(maker, CoordinateMaker), segment_bytes(self.budget)
        per_segment = segment_rows(maker.row_bytes, size, coordinates=small)
        if earlier is not None:
            per_segment = earlier.block.schema.rows_per_segment
        mode = "train" if self.model.training else "eval"
        if earlier is not None and not has_modes(self.model):
            mode = str(earlier.block.schema.fingerprints.get("mode", mode))
        schema = gs.Schema(
            arrays=(*arrays_for(values), *gradients),
            num_rows=self.batches.num_rows,
            rows_per_segment=per_segment,
            layers=tuple(layer.schema_layer() for layer in maker.layers),
            fingerprints={
                "weights": weights,
                "task": self.task.describe(),
                "mode": mode,
                "model": type(self.model).__name__,
                **maker.fingerprints(values),
                **({"adjustments": adjustments.to_text()} if adjustments else {}),
            },
        )
        return FirstBatch(maker, at_once, repeatable, rows, schema)

    def _check_repeatable(self, maker: RowMaker | None = None) -> bool:
        """Return True if rows are repeatable; then some of the maker's rows are audited."""
        first = without_columns(self.batches.first)
        repeatable = check_repeatable(self.model, self.task, first, self.request.mode)
        if repeatable and maker is not None:
            maker.audit = RowAudit(self.model, self.task, self.device)
        return repeatable

    def _gradient_maker(
        self, key: CaptureKey, weights: str, earlier: EarlierRun | None, adjustments: Adjustments
    ) -> tuple[RowMaker, int, bool]:
        """Return the maker of rows with gradients, the samples that run at once, and whether rows are repeatable."""
        first, budget = without_columns(self.batches.first), self.budget
        small = self.settings.compressed is not None or self.settings.keep == QUERIES
        # Samples that rules are proved on: few if memory may be short.
        tried = 2 if small or budget is not None else 16
        rows = min(batch_size(first), tried)
        batch = to_device(rows_of(first, 0, rows), self.device)
        prepared = prepare_capture(
            self.model,
            self.task,
            batch,
            self.settings.exact if small else self.settings,
            earlier=None if small else earlier,
            adjustments=adjustments,
            proof_rows=tried,
        )
        if not prepared.layers:
            raise CaptureError(
                "no chosen layer has a gradient",
                code="capture.nothing_to_capture",
                fix="Choose other layers, or pass uncovered='dense'.",
            )
        repeatable = self._check_repeatable()  # before computing a basis, which takes long
        keep = self.settings.compressed
        basis_key = gs.BasisKey((keep and keep.basis) or key.checkpoint, key.run, key.capture)
        whole = self._whole_gradients(key, basis_key, prepared) if small else prepared
        maker: RowMaker
        if whole is None:
            footprint = 0 if budget is None else coordinate_footprint(prepared, batch, rows)
            basis = find_basis(
                *(self.store, basis_key, self.settings, prepared, self.batches, weights),
                budget=budget,
                footprint=footprint,
            )
            maker = coordinate_maker(prepared, basis, keep, self._common)
            at_once, project, beside = batch_size(first), maker.project, basis.nbytes
            footprint += 3 * 4 * basis.size  # coordinates by layer, together, and once more rounded
        else:
            prepared = whole
            maker = GradientMaker.of(prepared, **self._common)
            if not small and self.recompute is None:  # a memory plan needs equal steps
                maker.moments = FirstMoments.plan(prepared, budget)
            at_once, project, beside = rows_at_once(prepared, rows), None, 0
            footprint = 0 if budget is None else row_footprint(prepared, batch, rows)
        if repeatable:
            maker.audit = RowAudit(self.model, self.task, self.device, maker.tracer, project)
        if budget is not None:
            at_once = min(at_once, rows_within(budget, footprint, beside=beside))
        return maker, at_once, repeatable

    def _whole_gradients(
        self, key: CaptureKey, basis_key: gs.BasisKey, prepared: PreparedCapture
    ) -> PreparedCapture | None:
        """Return the capture if whole gradients fit a number of bytes; None to store coordinates.

        Coordinates are stored if a basis exists, such as that of another split. Query rows are whole if
        the other splits are.
        """
        keep = self.settings.compressed
        if keep is not None and prepared.fits_exactly(keep):
            return prepared
        if self.store.has(basis_key):
            return None
        if keep is not None:
            return prepared.within(keep)
        others = (
            k for k in self.store.captures() if dataclasses.replace(k, split=key.split) == key
        )
        earlier = (find_earlier_run(self.store, other) for other in others)
        storages = [
            storage for run in earlier if run is not None for storage in run.storages.values()
        ]
        is_whole = any(storage != "coordinates" for storage in storages)
        return prepared if is_whole else None

    def _first_rows(self) -> Any:
        first = self.batches.first
        return rows_of(first, 0, min(2, batch_size(first)))

    def _used_layers(self, names: frozenset[str]) -> frozenset[str]:
        """Return the layers that run in any batch, by one forward pass over the data."""
        units = [unit for unit in units_of(self.model) if unit.name in names]
        owners = {module: unit.name for unit in units for module in unit.modules}
        ran: set[str] = set()

        def hook(module: nn.Module, *_: object) -> None:
            ran.add(owners[module])

        with contextlib.ExitStack() as stack:
            self.prepare_model(stack)
            for module in owners:
                stack.callback(module.register_forward_hook(hook).remove)
            for _, batch in self.batches:
                own = to_device(without_columns(batch), self.device)
                measure_losses(self.task, self.model, own)
                if len(ran) == len(units):
                    break
        return frozenset(ran)

    def _delivered(self, report: Report | None) -> Generator[Delivered]:
        """Yield ids, fingerprints and batches of one pass; later passes must equal the first."""
        parts: list[tuple[Any, Any]] = []
        done, total = 0, self.batches.num_rows
        for ids, batch in self.batches:
            contents = digests(batch)
            if self.contents is None:
                parts.append((ids, contents))
            else:
                changed = self.contents.changed(ids, contents)
                if len(changed):
                    raise changed_rows_error(
                        changed, path=self.store.location, known=len(self.contents)
                    )
            yield ids, contents, batch
            done += len(ids)
            if report is not None:
                report(done, total or done)
        if self.contents is None:
            ids, contents = (np.concatenate(part) for part in zip(*parts, strict=True))
            self.contents = RowFingerprints.of(ids, contents)

    def _bar(self, title: str) -> AbstractContextManager[Report | None]:
        return show_progress(title, "rows") if self.progress else contextlib.nullcontext()

    def _write(
        self,
        key: CaptureKey,
        first: FirstBatch,
        earlier: EarlierRun | None,
        delivered: Iterable[Delivered],
        alarms: RowAlarms,
    ) -> int:
        """Compute all missing rows and seal; return how many were stored before."""
        maker, schema, done = first.maker, first.schema, 0
        recheck = (
            RecomputeCheck(earlier, maker) if earlier is not None and first.repeatable else None
        )
        if self.store.has(key.moments):
            self.store.delete(key.moments)  # left by an interrupted run
        moments, moment_ids = maker.moments, [np.empty(0, np.int64)]
        if moments is not None:
            moments.begin()
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(self.store.write(key, schema))
            report = stack.enter_context(self._bar(f"capture {key.split} at {key.checkpoint}"))
            feed = RowFeed(writer, maker, first.at_once, alarms)
            if earlier is None:
                # At most an eighth of a segment is buffered, and lost if the process dies.
                feed.least = max(1, min(maker.joined, schema.rows_per_segment // 8))
            for ids, contents, batch in delivered:
                if moments is not None and moments.needs_rows:
                    moment_ids.append(np.asarray(ids, np.int64))
                if earlier is not None:
                    earlier.check(ids, contents)
                if recheck is not None:
                    recheck.check_batch(ids, batch)
                done += len(ids)
                if maker.audit is not None:
                    maker.audit.is_last = done == self.batches.num_rows
                feed.add(ids, contents, batch)
                if report is not None:
                    report(done, self.batches.num_rows or done)
            feed.flush()
            alarms.check_all_zero()
            if maker.audit is not None:
                last = maker.make(self._first_rows(), alone=True)
                change = change_of_first_rows(first.rows.values, last.values, 1e-2)
                if change:
                    raise CaptureError(
                        f"the first samples changed during the capture: {change}",
                        code="capture.model_changed",
                        fix="Capture a model without counters, caches or running means; delete this "
                        "capture first, of which nothing was sealed.",
                    )
            if moments is not None:
                weights = str(schema.fingerprints["weights"])
                means = moments.means(weights, np.concatenate(moment_ids))
                if means is not None:
                    means.save(self.store, key)  # before the capture is sealed
        return feed.reused


@dataclass(frozen=True, slots=True, eq=False)
class SegmentMaker:
    """Compute segments of a capture in a process whose model is prepared."""

    replay: Replay
    key: CaptureKey
    first: FirstBatch
    ready: contextlib.ExitStack | None = None
    """Keeps the model prepared; None if the caller does."""

    @classmethod
    def begin(
        cls, replay: Replay, key: CaptureKey, contents: Any, values: Mapping[str, Any]
    ) -> SegmentMaker:
        """Prepare to compute segments of a capture that another process started.

        `contents` are the fingerprints of its first batch, `values` the losses and norms of its first rows.
        """
        stack = contextlib.ExitStack()
        replay.prepare_model(stack)
        earlier = find_earlier_run(replay.store, key)
        if earlier is None:
            raise CaptureError(
                "the capture was deleted meanwhile",
                code="capture.deleted",
                fix="Run the capture again.",
            )
        if not np.array_equal(contents, digests(replay.batches.first)):
            raise CaptureError(
                "this worker reads other data than the process that started the capture",
                code="capture.worker_data",
                fix="Let every worker read the same files; stored rows stay as they are.",
            )
        first = replay.try_first_rows(key, earlier, earlier.adjustments)
        change = change_of_first_rows(values, first.rows.values, 1e-3)
        if change:
            raise CaptureError(
                f"the first samples differ in this worker, whose code differs: {change}",
                code="capture.worker_code",
                fix="Install the same versions of model, task and packages everywhere.",
            )
        return cls(replay, key, first, stack)

    def make(self, segments: range) -> RowAlarms:
        """Compute the missing segments, from the batches of a whole pass."""
        alarms, per_segment = RowAlarms(), self.first.schema.rows_per_segment
        start, stop = segments.start * per_segment, segments.stop * per_segment
        with self.replay.store.write(self.key, self.first.schema, segments=segments) as writer:
            feed = RowFeed(writer, self.first.maker, self.first.at_once, alarms)
            for at, ids, batch in self.replay.batches.between(start, stop):
                if writer.position < at:
                    writer.begin_at(at)
                feed.add(ids, digests(batch), batch)
        return alarms
