"""Replaying one checkpoint over a data set: prove what is there, make the rest, keep it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import gradkeep.store as gs
from gradkeep._progress import progress as shown
from gradkeep.capturing._audit import (
    RowAudit,
    buffers_kept,
    check_unchanged,
    fingerprint_function,
    is_steady,
)
from gradkeep.capturing._basis import BasisRequest, find_basis
from gradkeep.capturing._batches import batch_size, digests, rows_of, to_device
from gradkeep.capturing._coordinates import CoordinateMaker, coordinate_maker
from gradkeep.capturing._distributed import RowProof
from gradkeep.capturing._first_batch import (
    CaptureSettings,
    coordinate_footprint,
    prepare_capture,
    row_footprint,
    rows_at_once,
    rows_within,
    segment_bytes,
)
from gradkeep.capturing._keep import OVERHEAD, QUERIES
from gradkeep.capturing._keeping import NO_ADJUSTMENTS, Adjustments, BatchUnlikeFirst
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
from gradkeep.capturing._row_making import (
    GradientMaker,
    JoinedRows,
    LossMaker,
    RowAlarms,
    append_rows,
    arrays_for,
    keeping_columns,
    layers_of,
    maker_within,
    modules_named,
    without_columns,
)
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.capturing.rules._rules import units_of
from gradkeep.capturing.tasks._tasks import losses_alone
from gradkeep.errors import CaptureError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from gradkeep.capturing._distributed import Crew
    from gradkeep.capturing._first_batch import PreparedCapture
    from gradkeep.capturing._loader import Batches
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._row_making import MadeRows, RowMaker
    from gradkeep.capturing.tasks._tasks import Task
    from gradkeep.remat import MemoryBudget
    from gradkeep.store import CaptureKey, Schema, Store

_log = logging.getLogger(__name__)
_TRIED, _FEW_TRIED = 16, 2
"""Samples with which it is found out how each layer is captured: few where memory may be short."""
_WAITING = 8
LOSSES = "losses"
"""What `keep` is for a capture without gradients."""
COORDINATE_ROWS = 1024
"""Rows of a segment of coordinates: they take few bytes, but as long to make again as any."""
Report = Callable[[int, int], None]


class Replay:
    """What all checkpoints of one call share."""

    def __init__(
        self,
        *,
        store: Store,
        model: nn.Module,
        batches: Batches,
        task: Task,
        settings: CaptureSettings,
        embeddings: tuple[str, ...],
        budget: int | None,
        recompute: MemoryBudget | None,
        resume: bool,
        progress: bool,
        mode: Mode | None,
    ) -> None:
        self.store, self.model, self.batches, self.task = store, model, batches, task
        self.settings, self.budget, self.resume, self.progress = settings, budget, resume, progress
        self.mode: Mode | None = mode
        self.recompute = recompute
        self.watched = modules_named(model, embeddings)
        self.device = device_of(model)
        self.contents: RowFingerprints | None = None
        """Those of the first checkpoint: every other one must see the same rows."""

    def one(
        self, key: CaptureKey, *, step: int | None, lr: float | None, crew: Crew | None = None
    ) -> Captured:
        """Capture the weights that the model has now, by oneself or with others.

        A batch that does not fit what was chosen on the first one makes it begin again, adjusted and
        in this process alone.
        """
        started, cpu = time.perf_counter(), time.process_time()
        adjustments = NO_ADJUSTMENTS
        while True:
            try:
                captured = self._attempt(key, step, lr, crew, adjustments)
            except BatchUnlikeFirst as error:
                more = adjustments | error.adjustments
                earlier = earlier_run(self.store, key)
                if earlier is not None and earlier.sealed:
                    raise
                if crew is not None:
                    crew = None  # this process finds out what the batch needs
                    if not error.adjustments:
                        continue
                elif more == adjustments:
                    raise
                if error.candidates:
                    more |= Adjustments(late=self._used_layers(error.candidates))
                _log.info("beginning again, as %s", error.what)
                if earlier is not None:
                    more |= earlier.adjustments
                    self.store.delete(key)
                adjustments = more
                continue
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
            return dataclasses.replace(captured, seconds=seconds, cpu_seconds=cpu_seconds)

    def _used_layers(self, names: frozenset[str]) -> frozenset[str]:
        """Those of the layers that run in any batch; one forward pass over the data."""
        units = [unit for unit in units_of(self.model) if unit.name in names]
        ran: set[str] = set()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ready(self.model))
            stack.enter_context(in_mode(self.model, self.mode))
            stack.enter_context(buffers_kept(self.model))
            for unit in units:
                for module in unit.modules:
                    hook = _adding(ran, unit.name)
                    stack.callback(module.register_forward_hook(hook).remove)
            for _, batch in self.batches:
                own = to_device(without_columns(batch), self.device)
                losses_alone(self.task, self.model, own)
                if len(ran) == len(units):
                    break
        return frozenset(ran)

    def _attempt(
        self,
        key: CaptureKey,
        step: int | None,
        lr: float | None,
        crew: Crew | None,
        adjustments: Adjustments,
    ) -> Captured:
        started, cpu = time.perf_counter(), time.process_time()
        packed = b"" if crew is None else crew.packed()
        with (
            ready(self.model) as told,
            in_mode(self.model, self.mode),
            _no_gradients_left(self.model),
            buffers_kept(self.model),
        ):
            if self.recompute is not None:
                check_recomputable(self.model)
            weights = fingerprint_weights(self.model)
            earlier = earlier_run(self.store, key)
            if earlier is not None and not self.resume:
                raise CaptureError(
                    "there is such a capture already",
                    path=self.store.backend.describe(key.folder),
                    fix="pass resume=True to go on with it, another name=, or delete it first",
                )
            # Rows of an earlier run are made again and compared, whatever the code looks like now.
            checkpoint = gs.Checkpoint(
                *(key.run, key.checkpoint, weights, step, lr),
                function=fingerprint_function(self.model) if earlier is None else None,
            )
            first = self.batches.first
            if earlier is not None:
                adjustments = adjustments | earlier.adjustments
            maker, at_once, made, steady = self._tried(key, weights, earlier, adjustments)
            schema = self._schema(maker, made, weights, earlier, adjustments)
            proof = maker if steady else None
            if earlier is not None and earlier.sealed:
                earlier.schema.require_same(schema, path=earlier.path)
                self.store.add_checkpoint(checkpoint)
                with self._bar(f"compare {key.split} at {key.checkpoint}") as report:
                    earlier.check_all(self._delivered(report), proof)
                reused, notes = earlier.rows, list[str]()
            else:
                delivered = self._delivered(None)
                begin = next(delivered)  # what it refuses leaves no trace in the store
                self.store.add_checkpoint(checkpoint)
                alarms, before = RowAlarms(), None
                if crew is not None:
                    delivered.close()
                    if proof is None:
                        raise _random_with_workers()
                    before = 0 if earlier is None else earlier.rows
                    self.store.write(key, schema).close()  # workers go by what it says
                    same = RowProof.of(first, made.values)
                    size = batch_size(first)
                    part = PartReplay(self, key, schema, maker, at_once)
                    alarms = crew.fill(part, same, packed=packed, batch=size)
                    earlier = earlier_run(self.store, key)
                    delivered = self._delivered(None)
                    begin = next(delivered)
                again = None if earlier is None or proof is None else RowsMadeAgain(earlier, proof)
                passing = itertools.chain([begin], delivered)
                by_others = crew is not None and earlier is not None and earlier.rows > 0
                with crew.threads() if crew and by_others else contextlib.nullcontext():
                    reused, notes = self._write(
                        key, schema, maker, made, at_once, earlier, again, passing, alarms
                    )
                reused = reused if before is None else before
        block = self.store.read(key)
        notes = [*told, *maker.notes(), *notes]
        for note in notes:
            warnings.warn(note, CaptureWarning, stacklevel=3)
        return Captured(
            key=key,
            rows=len(block),
            reused_rows=reused,
            bytes=block.manifest.bytes,
            layers=tuple(kept_layer(keeping) for keeping in maker.kept),
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu,
            notes=(*notes, *maker.facts()),
        )

    def begin_part(self, key: CaptureKey, proof: RowProof) -> PartReplay:
        """Be ready to make some segments of a capture that another process has begun."""
        stack = contextlib.ExitStack()
        stack.enter_context(ready(self.model))
        stack.enter_context(in_mode(self.model, self.mode))
        stack.enter_context(_no_gradients_left(self.model))
        stack.enter_context(buffers_kept(self.model))
        weights = fingerprint_weights(self.model)
        earlier = earlier_run(self.store, key)
        if earlier is None:
            raise CaptureError(
                "there is no such capture to make a part of: it was deleted meanwhile",
                path=self.store.backend.describe(key.folder),
                fix="run the whole capture again",
            )
        adjustments = earlier.adjustments
        maker, at_once, made, _ = self._tried(key, weights, earlier, adjustments)
        proof.check(RowProof.of(self.batches.first, made.values))
        schema = self._schema(maker, made, weights, earlier, adjustments)
        return PartReplay(self, key, schema, maker, at_once, stack)

    def _tried(
        self,
        key: CaptureKey,
        weights: str,
        earlier: EarlierRun | None,
        adjustments: Adjustments,
    ) -> tuple[RowMaker, int, MadeRows, bool]:
        """What makes rows of batches, of how many samples at once, and a few rows made by it.

        And whether rows come out the same when they are made again.
        """
        first = self.batches.first
        maker, at_once, steady = self._maker(
            without_columns(first), earlier, key, weights, adjustments
        )
        maker = keeping_columns(maker, first)
        made = maker.make(self._first_rows(), alone=True)
        return maker, at_once, made, steady

    def _maker(
        self,
        first: Any,
        earlier: EarlierRun | None,
        key: CaptureKey,
        weights: str,
        adjustments: Adjustments,
    ) -> tuple[RowMaker, int, bool]:
        """What makes rows of batches, how many samples at once, and whether the model is steady."""
        if self.settings.keep == LOSSES:
            at_once, steady = batch_size(first), self._is_steady(first)
            audit = RowAudit(self.model, self.task, self.device) if steady else None
            losses = LossMaker(self.model, self.task, self.watched, self.device, audit=audit)
            return losses, at_once, steady
        small = self.settings.compressed is not None or self.settings.keep == QUERIES
        tried = _FEW_TRIED if small or self.budget is not None else _TRIED
        rows = min(batch_size(first), tried)
        batch = to_device(rows_of(first, 0, rows), self.device)
        as_before = None if earlier is None or small else earlier.storages
        settings = self.settings.exact if small else self.settings
        placed = earlier is None or earlier.placed  # a capture that was begun without goes on so
        prepared = prepare_capture(
            self.model,
            self.task,
            batch,
            settings,
            as_before=as_before,
            placed=placed,
            adjustments=adjustments,
            proof_rows=tried,
        )
        if not prepared.kept:
            raise CaptureError(
                "nothing is left to capture: no chosen layer has a gradient",
                fix="choose other layers, or uncovered='dense'",
            )
        steady = self._is_steady(first)  # before a basis is found with many rows
        moments = None
        if not small and self.recompute is None:  # a plan wants every step to be the same
            moments = FirstMoments.wanted(prepared, self.budget)
        audit = RowAudit(self.model, self.task, self.device, prepared.tracer) if steady else None
        maker: RowMaker = GradientMaker(
            prepared, self.watched, self.recompute, self.device, moments, audit
        )
        at_once = rows_at_once(prepared, rows)
        if small:
            compressed = self._compressed(prepared, key, weights, batch)
            if compressed is not None:
                maker, at_once = compressed.audited() if steady else compressed, batch_size(first)
        if self.budget is None:
            return maker, at_once, steady
        if isinstance(maker, CoordinateMaker):
            size, beside = maker.basis.size, maker.basis.nbytes
            footprint = coordinate_footprint(prepared, size, batch, rows)
            within = rows_within(self.budget, footprint, beside=beside)
            return maker, min(at_once, within), steady
        footprint = row_footprint(prepared, batch, rows)
        return maker, min(at_once, rows_within(self.budget, footprint)), steady

    def _first_rows(self) -> Any:
        first = self.batches.first
        return rows_of(first, 0, min(2, batch_size(first)))

    def _is_steady(self, first: Any) -> bool:
        return is_steady(self.model, self.task, first, self.mode)

    def _compressed(
        self, prepared: PreparedCapture, key: CaptureKey, weights: str, batch: Any
    ) -> CoordinateMaker | None:
        """What makes coordinates; None where the exact gradients of every row take no more bytes."""
        keep = self.settings.compressed
        ragged = any(array.ragged for keeping in prepared.kept for array in keeping.arrays)
        if keep is not None and not ragged and prepared.row_bytes + OVERHEAD <= keep.row_bytes:
            return None
        request = BasisRequest(
            store=self.store,
            key=gs.BasisKey((keep and keep.basis) or key.checkpoint, key.run, key.capture),
            keep=keep,
            weights=weights,
            task=self.task.describe(),
            trained_as=self.task.trained_as(),
            chosen=self.settings.layers is not None,
            budget=self.budget,
            footprint=0
            if self.budget is None
            else coordinate_footprint(prepared, 0, batch, batch_size(batch)),
        )
        basis = find_basis(request, prepared, self.batches, self.device)
        return coordinate_maker(
            prepared, basis, keep, self.watched, recompute=self.recompute, device=self.device
        )

    def _schema(
        self,
        maker: RowMaker,
        made: MadeRows,
        weights: str,
        earlier: EarlierRun | None,
        adjustments: Adjustments,
    ) -> Schema:
        values = made.values | {"example": digests(self.batches.first)[:0]}
        gradients = tuple(array for keeping in maker.kept for array in keeping.arrays)
        rows = earlier.schema.rows_per_segment if earlier is not None else self._rows(maker)
        return gs.Schema(
            arrays=(*arrays_for(values), *gradients),
            num_rows=self.batches.num_rows,
            rows_per_segment=rows,
            layers=layers_of(maker),
            fingerprints={
                "weights": weights,
                "task": self.task.describe(),
                "mode": "train" if self.model.training else "eval",
                "model": type(self.model).__name__,
                **maker.fingerprints(values),
                **({"adjustments": adjustments.to_text()} if adjustments else {}),
            },
        )

    def _rows(self, maker: RowMaker) -> int:
        """A power of two of rows per segment."""
        most = segment_bytes(self.budget)
        limit = COORDINATE_ROWS if isinstance(maker_within(maker), CoordinateMaker) else 1 << 16
        rows = 1
        while 2 * rows * maker.row_bytes <= most and rows < limit:
            rows *= 2
        return rows

    def _delivered(self, report: Report | None) -> Generator[tuple[Any, Any, Any]]:
        """Ids, fingerprints and batches of one pass; the first pass is what later ones must be."""
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
        schema: Schema,
        maker: RowMaker,
        made: MadeRows,
        at_once: int,
        earlier: EarlierRun | None,
        again: RowsMadeAgain | None,
        delivered: Iterable[tuple[Any, Any, Any]],
        alarms: RowAlarms,
    ) -> tuple[int, list[str]]:
        reused = done = 0
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(self.store.write(key, schema))
            report = stack.enter_context(self._bar(f"capture {key.split} at {key.checkpoint}"))
            # What goes on with earlier rows asks the writer about every batch.
            # Of a segment, not more than a small part waits: all that waits is lost with the process.
            least = max(1, min(maker.joined, schema.rows_per_segment // _WAITING))
            joined = JoinedRows(writer, least if earlier is None else 1)
            moments, first = self._begin_moments(key, maker), [np.empty(0, np.int64)]
            for ids, found, batch in delivered:
                if moments is not None and moments.open:
                    first.append(np.asarray(ids, np.int64))
                if earlier is not None:
                    earlier.check(ids, found)
                if again is not None:
                    again.look(ids, batch)
                if maker.audit is not None:
                    maker.audit.is_last = done + len(ids) == self.batches.num_rows
                needed = writer.needs(len(ids))
                reused += 0 if needed else len(ids)
                if needed or (moments is not None and moments.open):
                    at_once = append_rows(
                        joined, maker, ids, found, batch, at_once, alarms, moments
                    )
                else:
                    writer.skip(ids)
                done += len(ids)
                if report is not None:
                    report(done, self.batches.num_rows or done)
            joined.flush()
            alarms.check_all_zero()
            if maker.audit is not None:
                again_first = maker.make(self._first_rows(), alone=True)
                check_unchanged(made.values, again_first.values)
            weights = str(schema.fingerprints["weights"])
            kept = None if moments is None else moments.found(weights, np.concatenate(first))
            if kept is not None:
                kept.save(self.store, key)  # before the capture is sealed
        return reused, alarms.notes()

    def _begin_moments(self, key: CaptureKey, maker: RowMaker) -> FirstMoments | None:
        """What adds up moments of the first rows; None where none are wanted."""
        inner = maker_within(maker)
        moments = inner.moments if isinstance(inner, GradientMaker) else None
        if self.store.has(key.moments):
            self.store.delete(key.moments)  # left by what was interrupted, perhaps of other rows
        if moments is not None:
            moments.begin()
        return moments


@dataclass(frozen=True, slots=True, eq=False)
class PartReplay:
    """A replay that makes some segments of a capture, again and again; the model stays ready."""

    replay: Replay
    key: CaptureKey
    schema: Schema
    maker: RowMaker
    at_once: int
    ready: contextlib.ExitStack | None = None
    """What holds the model ready, where nobody else does."""

    def make(self, segments: range) -> RowAlarms:
        """Make those of the segments that are not there, from the batches of a whole pass."""
        alarms, share = RowAlarms(), gs.WriterShare(segments=segments)
        per_segment = self.schema.rows_per_segment
        start, stop = segments.start * per_segment, segments.stop * per_segment
        at_once = self.at_once
        with self.replay.store.write(self.key, self.schema, share=share) as writer:
            rows = JoinedRows(writer, 1)
            for at, ids, batch in self.replay.batches.between(start, stop):
                if writer.position < at:
                    writer.begin_at(at)
                found = digests(batch)
                at_once = append_rows(rows, self.maker, ids, found, batch, at_once, alarms)
        return alarms


def _random_with_workers() -> CaptureError:
    return CaptureError(
        "a model that draws at random gives other rows to every worker",
        found="dropout in train mode",
        fix="pass mode='eval', or leave workers= out",
    )


def _adding(names: set[str], name: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        names.add(name)

    return hook


@contextlib.contextmanager
def _no_gradients_left(model: nn.Module) -> Any:
    """Whatever happens, the parameters' `.grad` is what it was."""
    earlier_run = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for parameter, gradient in earlier_run.items():
            parameter.grad = gradient
