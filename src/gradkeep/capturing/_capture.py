"""`gk.capture`: replay checkpoints over a data set and store every sample's gradients.

In a distributed capture, ranges of segments are jobs of the farm. A worker computes the rows of its range
as a single process would, from the same batches, and writes whole segments. Existing segments are skipped,
so a killed worker loses one segment. When all segments exist, the process that started the capture reads
the data once more without the model, compares every row's fingerprint and the gradients of some rows with
its own, and seals.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import math
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np
import torch

import gradkeep.store as gs
from gradkeep import farm
from gradkeep._arguments import count, flag, instance, number, one_of, optional, texts
from gradkeep._display import progress as show_progress
from gradkeep._environment import torch_threads
from gradkeep._preview import Preview
from gradkeep.capturing._batches import batch_size as samples_in
from gradkeep.capturing._batches import digests
from gradkeep.capturing._first_batch import CaptureSettings
from gradkeep.capturing._loader import as_loader
from gradkeep.capturing._readiness import device_of, moved_to, uncompiled
from gradkeep.capturing._replay import CaptureRequest, Replay, SegmentMaker
from gradkeep.capturing._report import CapturedList
from gradkeep.capturing._rows import RowAlarms
from gradkeep.capturing._storage import BatchMismatchError
from gradkeep.capturing._weights import Source, Weights, load_weights, put_weights
from gradkeep.capturing.tasks._tasks import Task
from gradkeep.errors import CaptureError, FarmError, GradkeepError
from gradkeep.farm._run import count_workers, run_parts, validate_workers
from gradkeep.farm._worker import pickle_job, worker_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.utils.data import Dataset

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._loader import Columns, Ids
    from gradkeep.capturing._proofs import Uncovered
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._report import Captured
    from gradkeep.farm._run import Engine, Progress
    from gradkeep.query._gradients import GradientOf, LayerChoice
    from gradkeep.store import CaptureKey, Encoding, Store

Checkpoints = Mapping[str, "Weights | Source"]


class CaptureOptions(TypedDict, total=False):
    """Further arguments of `capture`, for type checkers."""

    run: str
    name: str
    layers: LayerChoice
    encoding: Encoding
    keep: KeepChoice
    tolerance: float
    of: GradientOf | None
    uncovered: Uncovered
    mode: Mode | None
    ids: Ids | None
    embeddings: Sequence[str]
    columns: Columns | None
    preview: Preview | None
    memory_budget: float | str | None
    resume: bool
    step: int | None
    lr: float | None
    workers: int | None
    engine: Engine | None
    progress: bool
    batch_size: int | None
    device: str | torch.device | None


@overload
def capture(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    loader: Iterable[Any] | Dataset[Any],
    *,
    task: Task,
    split: str,
    checkpoints: str = ...,
    **options: Unpack[CaptureOptions],
) -> Captured: ...


@overload
def capture(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    loader: Iterable[Any] | Dataset[Any],
    *,
    task: Task,
    split: str,
    checkpoints: Checkpoints,
    **options: Unpack[CaptureOptions],
) -> CapturedList: ...


def capture(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    loader: Iterable[Any] | Dataset[Any],
    *,
    task: Task,
    split: str,
    checkpoints: str | Checkpoints = "final",
    run: str = "main",
    name: str = "main",
    layers: LayerChoice = None,
    encoding: Encoding = "plain",
    keep: KeepChoice = None,
    tolerance: float = 0.0,
    of: GradientOf | None = None,
    uncovered: Uncovered = "dense",
    mode: Mode | None = "eval",
    ids: Ids | None = None,
    embeddings: Sequence[str] = (),
    columns: Columns | None = None,
    preview: Preview | None = None,
    memory_budget: float | str | None = None,
    resume: bool = True,
    step: int | None = None,
    lr: float | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
) -> Captured | CapturedList:
    """Replay a model over a loader and store every sample's gradients, loss, output and label.

    Cost: about one forward and backward pass, without the gradients of weights (with `keep="losses"`: one
    forward pass). An interrupted capture resumes after the last complete segment, once the rows that it
    skips have the stored fingerprints and some of them, recomputed, have the stored gradients.

    Rows that hold several documents, as padding-free collators build them, are unpacked: every document
    is a row.

    Args:
        store: Store, or the path of one, to write to.
        model: Model with the weights to capture; `torch.compile`d models are unwrapped.
        loader: Iterable of batches with a fixed order, such as a `DataLoader` with `shuffle=False`; or a map-style
            data set, which is read in batches of `batch_size`.
        task: Computes the loss, and optionally an output, of each sample.
        split: Name of this data set, such as `"train"`.
        checkpoints: Name for the weights that the model has now; or a mapping of names to state dicts,
            files, folders or `gk.Weights`, which are captured one after the other. The model's own
            weights are restored afterwards.
        run: Name of the training run.
        name: Name of the capture; captures with other settings need another name.
        layers: Names, globs or module types of the layers to capture; None for all.
        encoding: Encoding of stored arrays, such as `"bfloat16"`.
        keep: How gradients are stored. `"exact"` (the default): each layer as factors or dense,
            whichever is smaller. `"4KiB"` or `gk.Keep("4KiB")`: that many bytes per row, as coordinates
            in an eigenbasis. `"queries"`: the same coordinates, not rounded, for query rows.
            `"losses"`: no gradients, only losses, outputs, labels and class probabilities, for
            `gk.suspects`. A mapping of globs to names sets it per layer.
        tolerance: Largest relative error of a gradient whose rank is cut; 0 cuts nothing.
        of: `"loss"` or `"output"`: what is differentiated; None for the output if the task gives it
            together with its slope, else the loss.
        uncovered: What to do with parameters without a factor rule: `"dense"` stores their whole
            gradients, `"skip"` leaves them out, `"error"` raises.
        mode: `"eval"` or `"train"` during the capture; the model's own mode is restored afterwards. None leaves
            the model's mode, and raises if it would make gradients random or depend on the batch.
        ids: Ids of all samples in order, the key or index of the ids in a batch, or a function of the
            batch; None numbers the samples from 0.
        embeddings: Paths of modules whose outputs are stored as embeddings.
        columns: Further entries of the batch, numbers or texts, that are stored with every row for SQL:
            `["source", "text"]`, `{"document": "id"}`, or values in the loader's order,
            `{"text": dataset["text"]}`.
        preview: Copies small images or texts of rows into the store for `gradkeep serve`; its functions
            are called with the rows 0, 1, 2 ... in the loader's order.
        memory_budget: In bytes, such as `"2GiB"`: run as many samples at once as fit. A float below 1 is
            a fraction of what the batches take otherwise: activations are evicted and recomputed
            exactly, by `gk.memory_budget`.
        resume: Continue an interrupted capture; False raises if one exists.
        step: Training step of the checkpoint, stored with it.
        lr: Learning rate of the checkpoint, stored with it.
        workers: Number of processes that share the segments, each with its own device if there are
            several. Model, loader and task are sent to them. The stored bytes are those of one process
            with as many threads.
        engine: Runs the workers elsewhere, such as `gk.farm.engine("ray", address="auto")`.
        progress: Show a progress bar.
        batch_size: Samples per batch of a data set; 64 by default.
        device: Device to run on, such as `"cuda"`; the model is moved there and back.

    Returns:
        A report of the capture; a list of reports if `checkpoints` is a mapping.

    Raises:
        CaptureError: The model, task, loader or an option cannot be captured.
        BudgetError: One sample needs more than `memory_budget`.
        SchemaMismatchError: An earlier capture of this name has other weights, layers or settings.

    Example:
        >>> import gradkeep as gk, tempfile
        >>> store = gk.open(tempfile.mkdtemp())
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> report = gk.capture(store, model, data, task=gk.Classification(), split="train")
        >>> report.rows, [layer.storage for layer in report.layers]
        (5, ['factors', 'factors'])
    """
    if not isinstance(task, Task):
        raise CaptureError(
            "task must be a gk.Task",
            code="capture.not_a_task",
            found=type(task).__name__,
            fix="Pass gk.Classification(), or a subclass of gk.Task with losses(model, batch).",
        )
    instance("model", model, torch.nn.Module, error=CaptureError, expected="a torch.nn.Module")
    model = uncompiled(model)
    batches = as_loader(loader, batch_size)
    flag("resume", resume, error=CaptureError)
    flag("progress", progress, error=CaptureError)
    optional(count, "step", step, error=CaptureError)
    optional(number, "lr", lr, error=CaptureError, least=0)
    optional(instance, "preview", preview, kind=Preview, error=CaptureError)
    optional(one_of, "mode", mode, words=("eval", "train"), error=CaptureError)
    named = (checkpoints,) if isinstance(checkpoints, str) else _validate_checkpoints(checkpoints)
    keys = [gs.CaptureKey(label, split, run, name) for label in named]
    settings = CaptureSettings(layers, of, uncovered, encoding, keep, tolerance)
    names = texts("embeddings", embeddings, error=CaptureError)
    options = (ids, columns, preview, memory_budget, mode)
    request = CaptureRequest(model, batches, task, settings, names, *options)
    validate_workers(workers, engine, least=1)
    shared = workers is not None or engine is not None
    distributed = DistributedCapture(request, workers, engine) if shared else None
    with moved_to(model, device):
        replay = Replay(
            request, gs.open(store), resume=resume, progress=progress, distributed=distributed
        )
        if isinstance(checkpoints, str):
            return replay.capture(keys[0], step, lr)
        original = {key: value.clone() for key, value in model.state_dict().items()}
        reports = CapturedList()
        try:
            for key, entry in zip(keys, checkpoints.values(), strict=True):
                weights = entry if isinstance(entry, Weights) else Weights(entry)
                model.load_state_dict(original)  # adapters are put on the model's own base
                put_weights(model, load_weights(weights.source), name=key.checkpoint)
                reports.append(replay.capture(key, weights.step, weights.lr))
        finally:
            model.load_state_dict(original)
        return reports


def _validate_checkpoints(checkpoints: object) -> Checkpoints:
    mapping = instance(
        "checkpoints",
        checkpoints,
        Mapping,
        error=CaptureError,
        expected="a name for the weights that the model has, or a mapping of names to weights",
    )
    if not mapping:
        raise CaptureError(
            "checkpoints is empty", code="capture.no_checkpoints", fix="Pass {name: weights}."
        )
    for entry in mapping.values():
        source = entry.source if isinstance(entry, Weights) else entry
        kinds = (Mapping, str, os.PathLike)
        expected = "a state dict, a file or a folder"
        instance("checkpoints", source, kinds, error=CaptureError, expected=expected)
    return mapping


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
        workers, size = count_workers(self.workers, self.engine), samples_in(replay.batches.first)
        per_segment = schema.rows_per_segment
        ranges = segment_ranges(schema.num_rows, per_segment, batch=size, workers=workers)
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
        bar = show_progress(title, "ranges") if replay.progress else contextlib.nullcontext()
        with self.threads(), bar as report:

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
            raise BatchMismatchError("a batch does not fit the choices made on the first batch")
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
        for place in numbers:
            try:
                alarms = self.maker.make(range(*self.ranges[place]))
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
                f"this worker has other package versions: {versions}, not {self.versions}",
                code="capture.worker_versions",
                fix="Install the same versions everywhere.",
            )
        sys.path += [path for path in self.paths if path not in sys.path]
        request: CaptureRequest = pickle.loads(self.request)
        own = device_for(self.device, worker_number(), torch.cuda.device_count())
        request.model.to(own)
        store = gs.open(self.store, create=False, durability=self.durability)
        assert self.key is not None
        return SegmentMaker.begin(Replay(request, store), self.key, self.contents, self.values)
