"""Many workers make one capture: ranges of its segments are jobs of the farm.

A worker makes the rows of its range as a single process would, from the same batches, and puts whole
segments; what is there it passes over, so a killed worker costs the segment it was at. When all are
there, the process that began the capture goes through the data once more, without the model, holds
every row's fingerprint and some rows' gradients against its own, and seals.
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
from gradkeep._progress import progress as shown
from gradkeep._surroundings import torch_threads
from gradkeep.capturing._adjustments import BatchUnlikeFirst
from gradkeep.capturing._batches import digests
from gradkeep.capturing._mode import device_of
from gradkeep.capturing._row_values import RowAlarms
from gradkeep.errors import CaptureError, FarmError, GradkeepError
from gradkeep.farm._job import packed
from gradkeep.farm._process import worker_number
from gradkeep.farm._sharing import share_out, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from gradkeep.capturing._capture import ReplayOrder
    from gradkeep.capturing._replay import PartReplay
    from gradkeep.farm._progress import Progress
    from gradkeep.farm._run import Engine
    from gradkeep.store import CaptureKey

_JOBS_EACH = 16
"""Ranges for each worker: enough that none waits long for the last one."""
_NEAR = 1e-3
_TOLD = ("rows", "zero", "tiny", "example")
_ARRAYS = tuple(gs.Array(name, "int64", nan="keep") for name in _TOLD)
"""What a range tells: how many rows, and how many of them without a gradient to speak of."""
_UNLIKE_FIRST = -2
"""Example of a range with a batch that the choices of the first one do not fit: it was not made."""
_PACKAGES = ("gradkeep", "torch", "numpy")


@dataclass(frozen=True, slots=True, eq=False)
class RowProof:
    """What the first rows of a capture are, by which a worker knows that it makes the same."""

    contents: np.ndarray[Any, np.dtype[np.uint64]]
    """Fingerprints of the first batch."""
    values: dict[str, np.ndarray[Any, Any]]
    """What was made of its first rows."""

    @classmethod
    def of(cls, first: Any, made: dict[str, Any]) -> RowProof:
        """That of the first batch, and of the values that were made of a few of its rows."""
        names: tuple[str, ...] = ("loss", "norm")
        told = {name: np.asarray(made[name]) for name in names if name in made}
        return cls(digests(first), told)

    def check(self, other: RowProof) -> None:
        """Raise unless a worker sees the same data and makes the same numbers of it."""
        if not np.array_equal(self.contents, other.contents):
            raise CaptureError(
                "this worker sees other data than the process that began the capture",
                found="other fingerprints of the first batch",
                fix="let every worker read the same files; what was kept stays as it is",
            )
        for name, mine in self.values.items():
            if not np.allclose(mine, other.values[name], rtol=_NEAR, atol=_NEAR / 10):
                raise CaptureError(
                    f"this worker makes another {name} of the first rows: its code is not that of "
                    "the process that began the capture",
                    found=np.array2string(other.values[name], precision=6),
                    expected=np.array2string(mine, precision=6),
                    fix="install the same versions of model, task and packages everywhere",
                )


@dataclass(frozen=True, slots=True, eq=False)
class Crew:
    """Who makes a capture: so many processes here, or the workers of an engine."""

    order: ReplayOrder
    workers: int | None
    engine: Engine | None

    def threads(self) -> AbstractContextManager[None]:
        """As many threads as each of them has: what this process makes has the bytes of theirs."""
        place = farm.LocalProcesses(self.workers) if self.engine is None else self.engine
        return torch_threads(place.threads)

    def packed(self) -> bytes:
        """What travels to the workers: the model as it is now, the loader, the task and the choices."""
        order = self.order
        if device_of(order.model).type != "cpu":  # a worker may not have this device
            order = dataclasses.replace(order, model=copy.deepcopy(order.model).cpu())
        return packed(order)

    def fill(
        self,
        part: PartReplay,
        proof: RowProof,
        *,
        packed: bytes,
        batch: int,
    ) -> RowAlarms:
        """Have all segments made that are missing; what looked wrong in their rows.

        `part` is what this process makes itself: it is ready, and local workers take seconds to be.
        """
        replay, key, schema = part.replay, part.key, part.schema
        if schema.num_rows is None:
            raise CaptureError(
                "workers need to know how many rows there are",
                found="a loader without a length, or packed batches",
                fix="give a DataLoader of a data set with a length; or capture without workers=",
            )
        ranges = segment_ranges(
            schema.num_rows,
            schema.rows_per_segment,
            batch=batch,
            workers=size_of(self.workers, self.engine),
        )
        if len(ranges) < 2:
            return RowAlarms()  # this process makes it sooner than another would be started
        job = _RangeJob(
            order=packed,
            device=device_of(replay.model),
            paths=tuple(path for path in sys.path if path),
            versions=_versions(),
            store=replay.store.location,
            durability=replay.store.durability,
            key=key,
            ranges=ranges,
            proof=proof,
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
                    here=_RangeMaker(part, ranges),
                    progress=told,
                )
            except FarmError as error:
                raise CaptureError(
                    f"workers did not finish: {error.what}",
                    path=replay.store.backend.describe(key.folder),
                    found=error.found,
                    fix="repair what it says and run the same again: whole segments stay, and are "
                    "not made twice",
                ) from error
        if (np.asarray(found["example"]) == _UNLIKE_FIRST).any():
            raise BatchUnlikeFirst(
                "a batch does not fit what was chosen on the first one",
                fix="capture without workers=",
            )
        return _added(found)


def _added(counted: Any) -> RowAlarms:
    total = RowAlarms()
    total.rows, total.zero, total.tiny = (
        int(np.sum(counted[name])) for name in ("rows", "zero", "tiny")
    )
    found = [int(number) for number in counted["example"] if number >= 0]
    total.example = min(found, default=None)
    return total


def segment_ranges(
    rows: int, per_segment: int, *, batch: int, workers: int
) -> tuple[tuple[int, int], ...]:
    """Segments `(first, behind the last)` of each job: some for every worker, cut where batches end.

    A batch that lies in two ranges is run for both.

    >>> segment_ranges(3072, 64, batch=128, workers=2)[:2]
    ((0, 2), (2, 4))
    """
    segments = -(-rows // per_segment)
    each = max(1, segments // (_JOBS_EACH * workers))
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
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its sources
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _RangeMaker:
    """A job of the farm for a process whose model is ready."""

    part: PartReplay
    ranges: Sequence[tuple[int, int]]

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Make these ranges, and tell what looked wrong in their rows."""
        found = []
        for number in numbers:
            try:
                alarms = self.part.make(range(*self.ranges[number]))
            except BatchUnlikeFirst:
                found.append(dict(zip(_TOLD, (0, 0, 0, _UNLIKE_FIRST), strict=True)))
                continue
            example = -1 if alarms.example is None else alarms.example
            told = (alarms.rows, alarms.zero, alarms.tiny, example)
            found.append(dict(zip(_TOLD, told, strict=True)))
        return found


@dataclass(slots=True, eq=False)
class _RangeJob:
    """The same for any other process: it makes the model ready when its first range comes."""

    order: bytes
    device: torch.device
    paths: tuple[str, ...]
    """Where modules are found, also on other machines that see the same files."""
    versions: dict[str, str]
    store: str
    durability: Any
    key: CaptureKey
    ranges: Sequence[tuple[int, int]]
    proof: RowProof
    _ready: _RangeMaker | GradkeepError | None = field(default=None, init=False)
    """Where the job is by then; or why it cannot be."""

    def __call__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Make these ranges, and tell what looked wrong in their rows."""
        if self._ready is None:
            try:
                self._ready = _RangeMaker(self._begin(), self.ranges)
            except GradkeepError as error:
                self._ready = error
        if isinstance(self._ready, GradkeepError):
            raise self._ready
        return self._ready(numbers)

    def _begin(self) -> PartReplay:
        found = _versions()
        if found != self.versions:
            raise CaptureError(
                "this worker has other packages than the process that began the capture",
                found=", ".join(f"{name} {version}" for name, version in found.items()),
                expected=", ".join(f"{name} {version}" for name, version in self.versions.items()),
                fix="install the same versions everywhere",
            )
        sys.path += [path for path in self.paths if path not in sys.path]
        order: ReplayOrder = pickle.loads(self.order)
        own = device_for(self.device, worker_number(), torch.cuda.device_count())
        order.model.to(own)
        store = gs.open(self.store, create=False, durability=self.durability)
        replay = order.replay(store, resume=True, progress=False)
        return replay.begin_part(self.key, self.proof)
