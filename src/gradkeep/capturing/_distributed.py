"""Distributed capture: ranges of segments are jobs of the farm.

A worker makes the rows of its range as a single process would, from the same batches, and puts whole
segments; what is there it skips, so a killed worker costs the segment it was at. When all are there,
the process that began the capture goes through the data once more, without the model, compares every
row's fingerprint and some rows' gradients with its own, and seals.
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
from gradkeep._display import progress as shown
from gradkeep._surroundings import torch_threads
from gradkeep.capturing._batches import batch_size, digests
from gradkeep.capturing._keeping import BatchMismatchError
from gradkeep.capturing._readiness import device_of
from gradkeep.capturing._replay import CaptureRequest, Replay, SegmentMaker
from gradkeep.capturing._rows import RowAlarms
from gradkeep.errors import CaptureError, FarmError, GradkeepError
from gradkeep.farm._job import packed
from gradkeep.farm._run import share_out, size_of
from gradkeep.farm._worker import worker_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from gradkeep.farm._run import Engine, Progress
    from gradkeep.store import CaptureKey

_COUNTS = ("rows", "zero", "tiny", "example")
_ARRAYS = tuple(gs.Array(name, "int64", nan="keep") for name in _COUNTS)
"""Counts of a range: rows, and rows without a gradient to speak of."""
_UNLIKE_FIRST = -2
"""Example of a range with a batch that the choices of the first one do not fit: it was not made."""


@dataclass(frozen=True, slots=True, eq=False)
class DistributedCapture:
    """Workers of a capture: so many processes here, or those of an engine."""

    request: CaptureRequest
    workers: int | None
    engine: Engine | None

    def threads(self) -> AbstractContextManager[None]:
        """As many threads as each worker has: the bytes of this process are then those of theirs."""
        place = farm.LocalProcesses(self.workers) if self.engine is None else self.engine
        return torch_threads(place.threads)

    def packed(self) -> bytes:
        """The request as it is sent: the model as it is now, the loader, the task and the choices."""
        request = self.request
        if device_of(request.model).type != "cpu":  # a worker may not have this device
            request = dataclasses.replace(request, model=copy.deepcopy(request.model).cpu())
        return packed(request)

    def fill(self, here: SegmentMaker, request: bytes) -> RowAlarms:
        """Have all missing segments made; counts of what looked wrong in their rows.

        `here` is what this process makes itself: it is ready, and local workers take seconds to be.
        """
        replay, key, schema = here.replay, here.key, here.first.schema
        if schema.num_rows is None:
            raise CaptureError(
                "workers need to know how many rows there are",
                fix="give a DataLoader of a data set with a length; or capture without workers=",
            )
        ranges = segment_ranges(
            schema.num_rows,
            schema.rows_per_segment,
            batch=batch_size(replay.batches.first),
            workers=size_of(self.workers, self.engine),
        )
        if len(ranges) < 2:
            return RowAlarms()  # this process makes it sooner than another would be started
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
            report = stack.enter_context(shown(title, "ranges")) if replay.progress else None

            def told(seen: Progress) -> None:
                if report is not None:
                    report(seen.done, seen.total)

            try:
                found = share_out(
                    replay.store,
                    key.folder,
                    _ARRAYS,
                    len(ranges),
                    job,
                    workers=self.workers,
                    engine=self.engine,
                    here=_RangeJob(ranges, here),
                    progress=told,
                )
            except FarmError as error:
                raise CaptureError(
                    f"workers did not finish: {error.message}",
                    path=replay.store.backend.describe(key.folder),
                    found=error.found,
                    fix="repair what it says and run the same again: whole segments stay, and are "
                    "not made twice",
                ) from error
        examples = [int(number) for number in found["example"]]
        if _UNLIKE_FIRST in examples:
            raise BatchMismatchError(
                "a batch does not fit what was chosen on the first one",
                fix="capture without workers=",
            )
        rows, zero, tiny = (int(np.sum(found[name])) for name in ("rows", "zero", "tiny"))
        example = min((one for one in examples if one >= 0), default=None)
        return RowAlarms(rows, zero, tiny, example)


def segment_ranges(
    rows: int, per_segment: int, *, batch: int, workers: int
) -> tuple[tuple[int, int], ...]:
    """Segments `(first, behind the last)` of each job: some for every worker, cut where batches end.

    A batch that lies in two ranges is run for both.

    >>> segment_ranges(3072, 64, batch=128, workers=2)[:2]
    ((0, 2), (2, 4))
    """
    segments = -(-rows // per_segment)
    # Ranges for each worker: enough that none waits long for the last one.
    each = max(1, segments // (16 * workers))
    even = batch // math.gcd(batch, per_segment)  # segments after which a batch ends, too
    if even <= 2 * each:
        each = -(-each // even) * even
    return tuple((at, min(at + each, segments)) for at in range(0, segments, each))


def device_for(given: torch.device, worker: int, devices: int) -> torch.device:
    """The device of a worker: workers of one machine share its devices out.

    >>> device_for(torch.device("cuda", 0), 5, 4), device_for(torch.device("cpu"), 5, 0)
    (device(type='cuda', index=1), device(type='cpu'))
    """
    if given.type == "cpu" or devices < 1:
        return given
    return torch.device(given.type, worker % devices)


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("gradkeep", "torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its sources
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclass(slots=True, eq=False)
class _RangeJob:
    """A job of the farm: makes ranges of segments; the model is made ready when the first one comes."""

    ranges: Sequence[tuple[int, int]]
    maker: SegmentMaker | GradkeepError | None = None
    """Set in a process whose model is ready; or why it cannot be."""
    request: bytes = b""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    paths: tuple[str, ...] = ()
    """Where modules are found, also on other machines that see the same files."""
    versions: dict[str, str] = field(default_factory=dict)
    store: str = ""
    durability: Any = None
    key: CaptureKey | None = None
    contents: Any = None
    """Fingerprints of the first batch."""
    values: dict[str, Any] = field(default_factory=dict)
    """Losses and norms of the first rows: a worker must compute the same."""

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Make these ranges, and count what looked wrong in their rows."""
        if self.maker is None:
            try:
                self.maker = self._begin()
            except GradkeepError as error:
                self.maker = error
        if isinstance(self.maker, GradkeepError):
            raise self.maker
        found = []
        for number in numbers:
            try:
                alarms = self.maker.make(range(*self.ranges[number]))
                example = -1 if alarms.example is None else alarms.example
            except BatchMismatchError:
                alarms, example = RowAlarms(), _UNLIKE_FIRST
            counts = (alarms.rows, alarms.zero, alarms.tiny, example)
            found.append(dict(zip(_COUNTS, counts, strict=True)))
        return found

    def _begin(self) -> SegmentMaker:
        versions = _versions()
        if versions != self.versions:
            raise CaptureError(
                "this worker has other packages than the process that began the capture",
                found=str(versions),
                expected=str(self.versions),
                fix="install the same versions everywhere",
            )
        sys.path += [path for path in self.paths if path not in sys.path]
        request: CaptureRequest = pickle.loads(self.request)
        own = device_for(self.device, worker_number(), torch.cuda.device_count())
        request.model.to(own)
        store = gs.open(self.store, create=False, durability=self.durability)
        replay = Replay(request, store, resume=True, progress=False)
        assert self.key is not None
        return SegmentMaker.begin(replay, self.key, self.contents, self.values)
