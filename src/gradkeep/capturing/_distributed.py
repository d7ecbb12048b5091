"""Distributed capture: ranges of segments are jobs of the farm.

A worker computes the rows of its range as a single process would, from the same batches, and writes whole
segments. Existing segments are skipped, so a killed worker loses one segment. When all segments exist, the
process that started the capture reads the data once more without the model, compares every row's
fingerprint and the gradients of some rows with its own, and seals.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import math
import pickle
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import gradkeep.store as gs
from gradkeep import farm
from gradkeep._display import progress as show_progress
from gradkeep._environment import torch_threads
from gradkeep.capturing._batches import batch_size, digests
from gradkeep.capturing._readiness import device_of
from gradkeep.capturing._replay import CaptureRequest, Replay, SegmentMaker
from gradkeep.capturing._rows import RowAlarms
from gradkeep.capturing._storage import BatchMismatchError
from gradkeep.errors import CaptureError, FarmError, GradkeepError
from gradkeep.farm._run import count_workers, run_parts
from gradkeep.farm._worker import pickle_job, worker_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from gradkeep.farm._run import Engine, Progress
    from gradkeep.store import CaptureKey

_COUNTS = ("rows", "zero", "tiny", "example")
_ARRAYS = tuple(gs.Array(name, "int64", nan="keep") for name in _COUNTS)
"""Counts of a range: rows, and rows with zero or tiny gradients."""
_MISMATCH = -2
"""Marks a range with a batch that does not fit the choices made on the first batch."""


@dataclass(frozen=True, slots=True, eq=False)
class DistributedCapture:
    """Workers of a capture: local processes, or those of an engine."""

    request: CaptureRequest
    workers: int | None
    engine: Engine | None

    def threads(self) -> AbstractContextManager[None]:
        """Set this process to the threads of a worker, so that both compute the same bytes."""
        place = farm.LocalProcesses(self.workers) if self.engine is None else self.engine
        return torch_threads(place.threads)

    def packed(self) -> bytes:
        """Serialize the request: the model as it is now, the loader, the task and the settings."""
        request = self.request
        if device_of(request.model).type != "cpu":  # a worker may not have this device
            request = dataclasses.replace(request, model=copy.deepcopy(request.model).cpu())
        return pickle_job(request)

    def fill(self, here: SegmentMaker, request: bytes) -> RowAlarms:
        """Compute all missing segments, and count suspicious gradients in their rows.

        `here` computes segments in this process, which is ready before local workers are.
        """
        replay, key, schema = here.replay, here.key, here.first.schema
        if schema.num_rows is None:
            raise CaptureError(
                "the number of rows is unknown, and workers= needs it",
                code="capture.unknown_length",
                fix="Pass a DataLoader of a data set with a length, or capture without workers=.",
            )
        ranges = segment_ranges(
            schema.num_rows,
            schema.rows_per_segment,
            batch=batch_size(replay.batches.first),
            workers=count_workers(self.workers, self.engine),
        )
        if len(ranges) < 2:
            return RowAlarms()  # this process is faster than starting another
        job = _RangeJob(
            ranges,
            request=request,
            device=device_of(replay.model),
            paths=tuple(path for path in sys.path if path),
            versions=_versions(),
            store=replay.store.location,
            durability=replay.store.durability,
            key=key,
            contents=digests(replay.batches.first),
            values={n: v for n, v in here.first.rows.values.items() if n in ("loss", "norm")},
        )
        title = f"capture {key.split} at {key.checkpoint}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.threads())
            report = (
                stack.enter_context(show_progress(title, "ranges")) if replay.progress else None
            )

            def on_progress(seen: Progress) -> None:
                if report is not None:
                    report(seen.done, seen.total)

            try:
                counts = run_parts(
                    replay.store,
                    key.folder,
                    _ARRAYS,
                    len(ranges),
                    job,
                    workers=self.workers,
                    engine=self.engine,
                    here=_RangeJob(ranges, here),
                    progress=on_progress,
                )
            except FarmError as error:
                raise CaptureError(
                    f"workers did not finish: {error.message}",
                    code="capture.workers_failed",
                    path=replay.store.backend.describe(key.folder),
                    found=error.found,
                    fix="Fix the error and run the same call again: finished segments are reused.",
                ) from error
        examples = [int(number) for number in counts["example"]]
        if _MISMATCH in examples:
            raise BatchMismatchError(
                "a batch does not fit the choices made on the first batch",
                fix="Capture without workers=.",
            )
        rows, zero, tiny = (int(np.sum(counts[name])) for name in ("rows", "zero", "tiny"))
        example = min((one for one in examples if one >= 0), default=None)
        return RowAlarms(rows, zero, tiny, example)


def segment_ranges(
    rows: int, per_segment: int, *, batch: int, workers: int
) -> tuple[tuple[int, int], ...]:
    """Split segments into ranges `(first, stop)`, some for every worker, cut where batches end.

    A batch that lies in two ranges is run for both.

    >>> segment_ranges(3072, 64, batch=128, workers=2)[:2]
    ((0, 2), (2, 4))
    """
    segments = -(-rows // per_segment)
    # 16 ranges per worker, so that none waits long for the last one.
    each = max(1, segments // (16 * workers))
    even = batch // math.gcd(batch, per_segment)  # segments after which a batch ends, too
    if even <= 2 * each:
        each = -(-each // even) * even
    return tuple((at, min(at + each, segments)) for at in range(0, segments, each))


def device_for(device: torch.device, worker: int, devices: int) -> torch.device:
    """Choose the device of a worker: workers of one machine share its devices.

    >>> device_for(torch.device("cuda", 0), 5, 4), device_for(torch.device("cpu"), 5, 0)
    (device(type='cuda', index=1), device(type='cpu'))
    """
    if device.type == "cpu" or devices < 1:
        return device
    return torch.device(device.type, worker % devices)


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("gradkeep", "torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its sources
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclass(slots=True, eq=False)
class _RangeJob:
    """Compute ranges of segments as a farm job; the first call prepares the model."""

    ranges: Sequence[tuple[int, int]]
    maker: SegmentMaker | GradkeepError | None = None
    """Computes segments once the model is ready; or the error that prevented it."""
    request: bytes = b""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    paths: tuple[str, ...] = ()
    """Import paths, also valid on other machines that see the same files."""
    versions: dict[str, str] = field(default_factory=dict)
    store: str = ""
    durability: Any = None
    key: CaptureKey | None = None
    contents: Any = None
    """Fingerprints of the first batch."""
    values: dict[str, Any] = field(default_factory=dict)
    """Losses and norms of the first rows, which a worker must reproduce."""

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Compute these ranges, and count suspicious gradients in their rows."""
        if self.maker is None:
            try:
                self.maker = self._begin()
            except GradkeepError as error:
                self.maker = error
        if isinstance(self.maker, GradkeepError):
            raise self.maker
        results = []
        for number in numbers:
            try:
                alarms = self.maker.make(range(*self.ranges[number]))
                example = -1 if alarms.example is None else alarms.example
            except BatchMismatchError:
                alarms, example = RowAlarms(), _MISMATCH
            counts = (alarms.rows, alarms.zero, alarms.tiny, example)
            results.append(dict(zip(_COUNTS, counts, strict=True)))
        return results

    def _begin(self) -> SegmentMaker:
        versions = _versions()
        if versions != self.versions:
            raise CaptureError(
                "this worker has other package versions than the process that started the capture",
                code="capture.worker_versions",
                found=str(versions),
                expected=str(self.versions),
                fix="Install the same versions everywhere.",
            )
        sys.path += [path for path in self.paths if path not in sys.path]
        request: CaptureRequest = pickle.loads(self.request)
        own = device_for(self.device, worker_number(), torch.cuda.device_count())
        request.model.to(own)
        store = gs.open(self.store, create=False, durability=self.durability)
        replay = Replay(request, store, resume=True, progress=False)
        assert self.key is not None
        return SegmentMaker.begin(replay, self.key, self.contents, self.values)
