"""`gk.capture`: replay checkpoints over a data set and store every sample's gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

import gradkeep.store as gs
from gradkeep._arguments import count, flag, instance, number, one_of, optional, texts
from gradkeep._preview import Preview
from gradkeep.capturing._distributed import DistributedCapture
from gradkeep.capturing._first_batch import CaptureSettings
from gradkeep.capturing._loader import as_loader
from gradkeep.capturing._readiness import moved_to, uncompiled
from gradkeep.capturing._replay import CaptureRequest, Replay
from gradkeep.capturing._report import CapturedList
from gradkeep.capturing._weights import Source, Weights, load_weights, put_weights
from gradkeep.capturing.tasks._tasks import Task
from gradkeep.errors import CaptureError
from gradkeep.farm._run import validate_workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.utils.data import Dataset

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._loader import Columns, Ids
    from gradkeep.capturing._proofs import Uncovered
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._report import Captured
    from gradkeep.farm._run import Engine
    from gradkeep.query._gradients import GradientOf, LayerChoice
    from gradkeep.store import Encoding, Store

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
    request = CaptureRequest(
        model=model,
        loader=batches,
        task=task,
        settings=CaptureSettings(layers, of, uncovered, encoding, keep, tolerance),
        embeddings=texts("embeddings", embeddings, error=CaptureError),
        ids=ids,
        columns=columns,
        preview=preview,
        memory_budget=memory_budget,
        mode=mode,
    )
    validate_workers(workers, engine, least=1)
    shared = workers is not None or engine is not None
    distributed = DistributedCapture(request, workers, engine) if shared else None
    with moved_to(model, device):
        replay = Replay(request, gs.open(store), resume=resume, progress=progress)
        if isinstance(checkpoints, str):
            return replay.capture(keys[0], step=step, lr=lr, distributed=distributed)
        original = {key: value.clone() for key, value in model.state_dict().items()}
        reports = CapturedList()
        try:
            for key, entry in zip(keys, checkpoints.values(), strict=True):
                weights = entry if isinstance(entry, Weights) else Weights(entry)
                model.load_state_dict(original)  # adapters are put on the model's own base
                put_weights(model, load_weights(weights.source), name=key.checkpoint)
                reports.append(
                    replay.capture(key, step=weights.step, lr=weights.lr, distributed=distributed)
                )
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
