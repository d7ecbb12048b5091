"""Replay of one checkpoint over a data set: prove the rows that are there, make the rest, keep them.

One loop serves every capture. A fresh one makes all rows; a resumed one compares the rows it passes and
makes the others; a finished one is only compared; a distributed one has workers make segments first, and
then goes over them as a resumed one does.
"""

from __future__ import annotations

import contextlib
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
from gradkeep._display import progress as shown
from gradkeep.capturing._audit import (
    RowAudit,
    buffers_kept,
    check_first_rows,
    fingerprint_function,
    is_steady,
)
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
from gradkeep.capturing._keeping import NO_ADJUSTMENTS, Adjustments, BatchMismatchError
from gradkeep.capturing._loader import task_batches, without_columns
from gradkeep.capturing._moments import FirstMoments
from gradkeep.capturing._readiness import check_recomputable, device_of, in_mode, ready
from gradkeep.capturing._report import Captured, CaptureWarning, kept_layer
from gradkeep.capturing._resume import (
    EarlierRun,
    RowFingerprints,
    RowsMadeAgain,
    changed_rows,
    earlier_run,
)
from gradkeep.capturing._rows import (
    GradientMaker,
    LossMaker,
    RowAlarms,
    RowFeed,
    arrays_for,
    modules_named,
)
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.capturing.rules._rules import units_of
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from gradkeep._preview import Preview
    from gradkeep.capturing._distributed import DistributedCapture
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._loader import Columns, Ids
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._rows import MadeRows, RowMaker
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.store import CaptureKey, Schema, Store

_log = logging.getLogger(__name__)
LOSSES = "losses"
"""`keep` of a capture without gradients."""
Report = Callable[[int, int], None]
Delivered = tuple[Any, Any, Any]
"""Ids, fingerprints and contents of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class CaptureRequest:
    """A capture but for its store, as it is sent to workers."""

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
    """Outcome of trying a capture on its first rows."""

    maker: RowMaker
    at_once: int
    """Samples that run at once."""
    steady: bool
    """Whether rows come out the same when they are made again."""
    rows: MadeRows
    """The first rows."""
    schema: Schema


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """Outcome of one attempt."""

    maker: RowMaker
    reused: int
    """Rows that were there already."""
    warnings: list[str]


class Replay:
    """All checkpoints of one call to `capture`."""

    def __init__(
        self, request: CaptureRequest, store: Store, *, resume: bool, progress: bool
    ) -> None:
        self.request, self.store, self.resume, self.progress = request, store, resume, progress
        self.model, self.task, self.settings = request.model, request.task, request.settings
        given = request.memory_budget
        budget = None if given is None else parse_budget(given)
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
        self.watched = modules_named(self.model, request.embeddings)
        self.device = device_of(self.model)
        self.contents: RowFingerprints | None = None
        """Fingerprints of the first pass: every other one must see the same rows."""

    def capture(
        self,
        key: CaptureKey,
        *,
        step: int | None,
        lr: float | None,
        distributed: DistributedCapture | None = None,
    ) -> Captured:
        """Capture the weights that the model has now, in this process or with workers.

        A batch that does not fit what was chosen on the first one makes it begin again, adjusted and
        in this process alone.
        """
        started, cpu = time.perf_counter(), time.process_time()
        adjustments = NO_ADJUSTMENTS
        while True:
            try:
                captured = self._attempt(key, step, lr, distributed, adjustments)
            except BatchMismatchError as error:
                more = adjustments | error.adjustments
                earlier = earlier_run(self.store, key)
                if earlier is not None and earlier.sealed:
                    raise
                if distributed is None and more == adjustments:
                    raise
                is_known = distributed is None or error.adjustments
                distributed = None  # this process finds out what the batch needs
                if not is_known:
                    continue
                if error.candidates:
                    more |= Adjustments(late=self._used_layers(error.candidates))
                _log.info("beginning again, as %s", error.message)
                if earlier is not None:
                    more |= earlier.adjustments
                    self.store.delete(key)
                adjustments = more
                continue
            for note in captured.warnings:
                warnings.warn(note, CaptureWarning, stacklevel=3)
            block, maker = self.store.read(key), captured.maker
            return Captured(
                key=key,
                rows=len(block),
                reused_rows=captured.reused,
                bytes=block.manifest.bytes,
                layers=tuple(kept_layer(keeping) for keeping in maker.kept),
                seconds=time.perf_counter() - started,
                cpu_seconds=time.process_time() - cpu,
                notes=(*captured.warnings, *maker.facts()),
            )

    def _attempt(
        self,
        key: CaptureKey,
        step: int | None,
        lr: float | None,
        distributed: DistributedCapture | None,
        adjustments: Adjustments,
    ) -> _Attempt:
        """Capture with these adjustments."""
        packed = b"" if distributed is None else distributed.packed()
        with contextlib.ExitStack() as stack:
            notes = self.make_ready(stack)
            if self.recompute is not None:
                check_recomputable(self.model)
            earlier = earlier_run(self.store, key)
            if earlier is not None and not self.resume:
                raise CaptureError(
                    "there is such a capture already",
                    path=earlier.path,
                    fix="pass resume=True to go on with it, another name=, or delete it first",
                )
            first = self.try_first_rows(key, earlier, adjustments)
            weights = str(first.schema.fingerprints["weights"])
            # Rows of an earlier run are made again and compared, whatever the code looks like now.
            function = fingerprint_function(self.model) if earlier is None else None
            checkpoint = gs.Checkpoint(
                key.run, key.checkpoint, weights, step, lr, function=function
            )
            if earlier is not None and earlier.sealed:
                earlier.schema.require_same(first.schema, path=earlier.path)
                self.store.add_checkpoint(checkpoint)
                with self._bar(f"compare {key.split} at {key.checkpoint}") as report:
                    earlier.check_all(
                        self._delivered(report), first.maker if first.steady else None
                    )
                return _Attempt(first.maker, earlier.rows, [*notes, *first.maker.notes()])
            delivered = self._delivered(None)
            begin = next(delivered)  # what it refuses leaves no trace in the store
            self.store.add_checkpoint(checkpoint)
            alarms, reused = RowAlarms(), None
            if distributed is not None:
                delivered.close()
                if not first.steady:
                    raise CaptureError(
                        "a model that draws at random gives other rows to every worker",
                        fix="pass mode='eval', or leave workers= out",
                    )
                reused = 0 if earlier is None else earlier.rows
                self.store.write(key, first.schema).close()  # workers read the schema
                alarms = distributed.fill(SegmentMaker(self, key, first), packed)
                earlier = earlier_run(self.store, key)
                if earlier is not None and earlier.rows > 0:
                    stack.enter_context(distributed.threads())
                delivered = self._delivered(None)
                begin = next(delivered)
            passing = itertools.chain([begin], delivered)
            seen = self._write(key, first, earlier, passing, alarms)
            notes = [*notes, *first.maker.notes(), *alarms.notes()]
            return _Attempt(first.maker, seen if reused is None else reused, notes)

    def make_ready(self, stack: contextlib.ExitStack) -> list[str]:
        """Hold the model ready to be replayed until the stack closes; notes about what that changed."""
        notes = stack.enter_context(ready(self.model))
        stack.enter_context(in_mode(self.model, self.request.mode))
        for parameter in self.model.parameters():  # whatever happens, `.grad` is what it was
            stack.callback(setattr, parameter, "grad", parameter.grad)
        stack.enter_context(buffers_kept(self.model))
        return notes

    def try_first_rows(
        self, key: CaptureKey, earlier: EarlierRun | None, adjustments: Adjustments
    ) -> FirstBatch:
        """Find out how rows are made, make the first ones, and describe what they hold."""
        weights = fingerprint_weights(self.model)
        if earlier is not None:
            adjustments = adjustments | earlier.adjustments
        first = without_columns(self.batches.first)
        if self.settings.keep == LOSSES:
            steady = is_steady(self.model, self.task, first, self.request.mode)
            at_once = batch_size(first)
            maker: RowMaker = LossMaker(
                model=self.model,
                task=self.task,
                watched=self.watched,
                device=self.device,
                audit=RowAudit(self.model, self.task, self.device) if steady else None,
            )
        else:
            maker, at_once, steady = self._gradient_maker(key, weights, earlier, adjustments)
        rows = maker.make(self._first_rows(), alone=True)
        values = rows.values | {"example": digests(self.batches.first)[:0]}
        gradients = tuple(array for keeping in maker.kept for array in keeping.arrays)
        small, size = isinstance(maker, CoordinateMaker), segment_bytes(self.budget)
        per_segment = segment_rows(maker.row_bytes, size, coordinates=small)
        if earlier is not None:
            per_segment = earlier.schema.rows_per_segment
        schema = gs.Schema(
            arrays=(*arrays_for(values), *gradients),
            num_rows=self.batches.num_rows,
            rows_per_segment=per_segment,
            layers=maker.layers(),
            fingerprints={
                "weights": weights,
                "task": self.task.describe(),
                "mode": "train" if self.model.training else "eval",
                "model": type(self.model).__name__,
                **maker.fingerprints(values),
                **({"adjustments": adjustments.to_text()} if adjustments else {}),
            },
        )
        return FirstBatch(maker, at_once, steady, rows, schema)

    def _gradient_maker(
        self, key: CaptureKey, weights: str, earlier: EarlierRun | None, adjustments: Adjustments
    ) -> tuple[RowMaker, int, bool]:
        """The maker of rows with gradients, how many samples run at once, and whether it is steady."""
        first, budget = without_columns(self.batches.first), self.budget
        small = self.settings.compressed is not None or self.settings.keep == QUERIES
        # Samples with which the rules of layers are proved: few where memory may be short.
        tried = 2 if small or budget is not None else 16
        rows = min(batch_size(first), tried)
        batch = to_device(rows_of(first, 0, rows), self.device)
        prepared = prepare_capture(
            self.model,
            self.task,
            batch,
            self.settings.exact if small else self.settings,
            as_before=None if earlier is None or small else earlier.storages,
            placed=earlier is None or earlier.placed,  # one that was begun without goes on so
            adjustments=adjustments,
            proof_rows=tried,
        )
        if not prepared.kept:
            raise CaptureError(
                "nothing is left to capture: no chosen layer has a gradient",
                fix="choose other layers, or uncovered='dense'",
            )
        # Before a basis is found with many rows.
        steady = is_steady(self.model, self.task, first, self.request.mode)
        small_maker = self._coordinate_maker(prepared, key, weights, batch) if small else None
        maker: RowMaker
        if small_maker is not None:
            maker, at_once, tracer = small_maker, batch_size(first), small_maker.tracer
            project, beside = small_maker.project, small_maker.basis.nbytes
            size = small_maker.basis.size
        else:
            moments = None
            if not small and self.recompute is None:  # a plan wants every step to be the same
                moments = FirstMoments.plan(prepared, budget)
            maker = GradientMaker(
                prepared=prepared,
                kept=prepared.kept,
                watched=self.watched,
                recompute=self.recompute,
                device=self.device,
                moments=moments,
            )
            at_once, tracer = rows_at_once(prepared, rows), prepared.tracer
            project, beside, size = None, 0, None
        if steady:
            maker.audit = RowAudit(self.model, self.task, self.device, tracer, project)
        if budget is not None:
            if size is None:
                footprint = row_footprint(prepared, batch, rows)
            else:
                footprint = coordinate_footprint(prepared, size, batch, rows)
            at_once = min(at_once, rows_within(budget, footprint, beside=beside))
        return maker, at_once, steady

    def _coordinate_maker(
        self, prepared: PreparedCapture, key: CaptureKey, weights: str, batch: Any
    ) -> CoordinateMaker | None:
        """The maker of coordinates; None where exact gradients of every row take no more bytes."""
        keep, budget = self.settings.compressed, self.budget
        if keep is not None and prepared.fits_exactly(keep):
            return None
        rows = batch_size(batch)
        basis = find_basis(
            self.store,
            gs.BasisKey((keep and keep.basis) or key.checkpoint, key.run, key.capture),
            keep,
            prepared,
            self.batches,
            self.device,
            weights=weights,
            all_layers=self.settings.layers is not None,
            budget=budget,
            footprint=0 if budget is None else coordinate_footprint(prepared, 0, batch, rows),
        )
        return coordinate_maker(
            prepared, basis, keep, self.watched, recompute=self.recompute, device=self.device
        )

    def _first_rows(self) -> Any:
        first = self.batches.first
        return rows_of(first, 0, min(2, batch_size(first)))

    def _used_layers(self, names: frozenset[str]) -> frozenset[str]:
        """The layers of these that run in any batch; one forward pass over the data."""
        units = [unit for unit in units_of(self.model) if unit.name in names]
        owners = {module: unit.name for unit in units for module in unit.modules}
        ran: set[str] = set()

        def hook(module: nn.Module, *_: object) -> None:
            ran.add(owners[module])

        with contextlib.ExitStack() as stack:
            self.make_ready(stack)
            for module in owners:
                stack.callback(module.register_forward_hook(hook).remove)
            for _, batch in self.batches:
                own = to_device(without_columns(batch), self.device)
                losses_alone(self.task, self.model, own)
                if len(ran) == len(units):
                    break
        return frozenset(ran)

    def _delivered(self, report: Report | None) -> Generator[Delivered]:
        """Ids, fingerprints and batches of one pass; every later pass must be as the first."""
        parts: list[tuple[Any, Any]] = []
        done, total = 0, self.batches.num_rows
        for ids, batch in self.batches:
            found = digests(batch)
            if self.contents is None:
                parts.append((ids, found))
            else:
                changed = self.contents.changed(ids, found)
                if len(changed):
                    raise changed_rows(changed, path=self.store.location, known=len(self.contents))
            yield ids, found, batch
            done += len(ids)
            if report is not None:
                report(done, total or done)
        if self.contents is None:
            ids, found = (np.concatenate(part) for part in zip(*parts, strict=True))
            self.contents = RowFingerprints.of(ids, found)

    def _bar(self, title: str) -> AbstractContextManager[Report | None]:
        return shown(title, "rows") if self.progress else contextlib.nullcontext()

    def _write(
        self,
        key: CaptureKey,
        first: FirstBatch,
        earlier: EarlierRun | None,
        delivered: Iterable[Delivered],
        alarms: RowAlarms,
    ) -> int:
        """Make all rows that are missing and seal; how many were there already."""
        maker, schema, done = first.maker, first.schema, 0
        again = RowsMadeAgain(earlier, maker) if earlier is not None and first.steady else None
        if self.store.has(key.moments):
            self.store.delete(key.moments)  # of an interrupted run, perhaps of other rows
        moments, moment_ids = maker.moments, [np.empty(0, np.int64)]
        if moments is not None:
            moments.begin()
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(self.store.write(key, schema))
            report = stack.enter_context(self._bar(f"capture {key.split} at {key.checkpoint}"))
            feed = RowFeed(writer, maker, first.at_once, alarms)
            if earlier is None:
                # At most an eighth of a segment waits: rows that wait are lost with the process.
                feed.least = max(1, min(maker.joined, schema.rows_per_segment // 8))
            for ids, found, batch in delivered:
                if moments is not None and moments.open:
                    moment_ids.append(np.asarray(ids, np.int64))
                if earlier is not None:
                    earlier.check(ids, found)
                if again is not None:
                    again.look(ids, batch)
                done += len(ids)
                if maker.audit is not None:
                    maker.audit.is_last = done == self.batches.num_rows
                feed.add(ids, found, batch)
                if report is not None:
                    report(done, self.batches.num_rows or done)
            feed.flush()
            alarms.check_all_zero()
            if maker.audit is not None:
                last = maker.make(self._first_rows(), alone=True)
                check_first_rows(
                    first.rows.values,
                    last.values,
                    1e-2,
                    when="at the end of the capture",
                    fix="capture a model that does not change while it runs: no counters, caches or "
                    "running means; nothing was sealed, so delete this capture first",
                )
            if moments is not None:
                weights = str(schema.fingerprints["weights"])
                kept = moments.means(weights, np.concatenate(moment_ids))
                if kept is not None:
                    kept.save(self.store, key)  # before the capture is sealed
        return feed.reused


@dataclass(frozen=True, slots=True, eq=False)
class SegmentMaker:
    """Makes segments of a capture in a process whose model is ready."""

    replay: Replay
    key: CaptureKey
    first: FirstBatch
    ready: contextlib.ExitStack | None = None
    """Holds the model ready, where nobody else does."""

    @classmethod
    def begin(
        cls, replay: Replay, key: CaptureKey, contents: Any, values: Mapping[str, Any]
    ) -> SegmentMaker:
        """Be ready to make segments of a capture that another process has begun.

        `contents` are the fingerprints of its first batch, `values` losses and norms of its first rows.
        """
        stack = contextlib.ExitStack()
        replay.make_ready(stack)
        earlier = earlier_run(replay.store, key)
        if earlier is None:
            raise CaptureError(
                "there is no such capture to make a part of: it was deleted meanwhile",
                path=replay.store.backend.describe(key.folder),
                fix="run the whole capture again",
            )
        if not np.array_equal(contents, digests(replay.batches.first)):
            raise CaptureError(
                "this worker sees other data than the process that began the capture",
                fix="let every worker read the same files; what was kept stays as it is",
            )
        first = replay.try_first_rows(key, earlier, earlier.adjustments)
        check_first_rows(
            values,
            first.rows.values,
            1e-3,
            when="in this worker: its code is not that of the process that began the capture",
            fix="install the same versions of model, task and packages everywhere",
        )
        return cls(replay, key, first, stack)

    def make(self, segments: range) -> RowAlarms:
        """Make the missing ones of these segments, from the batches of a whole pass."""
        alarms, per_segment = RowAlarms(), self.first.schema.rows_per_segment
        start, stop = segments.start * per_segment, segments.stop * per_segment
        share = gs.WriterShare(segments=segments)
        with self.replay.store.write(self.key, self.first.schema, share=share) as writer:
            feed = RowFeed(writer, self.first.maker, self.first.at_once, alarms)
            for at, ids, batch in self.replay.batches.between(start, stop):
                if writer.position < at:
                    writer.begin_at(at)
                feed.add(ids, digests(batch), batch)
        return alarms
