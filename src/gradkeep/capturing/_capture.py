"""`gk.capture`: replay checkpoints over a data set, and keep every sample's gradients."""

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
from gradkeep.capturing._readiness import uncompiled
from gradkeep.capturing._replay import CaptureRequest, Replay
from gradkeep.capturing._weights import Source, Weights, load_weights, put_weights
from gradkeep.capturing.tasks._tasks import Task
from gradkeep.errors import CaptureError
from gradkeep.farm._run import check_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gradkeep.capturing._first_batch import KeepChoice
    from gradkeep.capturing._loader import Columns, Ids
    from gradkeep.capturing._proofs import Uncovered
    from gradkeep.capturing._readiness import Mode
    from gradkeep.capturing._report import Captured
    from gradkeep.farm._run import Engine
    from gradkeep.query._gradients import GradientOf
    from gradkeep.query._layers import LayerChoice
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


@overload
def capture(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    loader: Iterable[Any],
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
    loader: Iterable[Any],
    *,
    task: Task,
    split: str,
    checkpoints: Checkpoints,
    **options: Unpack[CaptureOptions],
) -> list[Captured]: ...


def capture(
    store: Store | str | os.PathLike[str],
    model: nn.Module,
    loader: Iterable[Any],
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
    mode: Mode | None = None,
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
) -> Captured | list[Captured]:
    """Replay a model over a loader and keep every sample's gradients, loss, output and label.

    `checkpoints` names the weights that the model has now; a mapping of names to state dicts, files
    or folders captures one after the other, puts the model's weights back and gives a list. Each
    layer is kept as `keep` says: "exact" (the default) as factors or dense, whichever is smaller;
    `keep="4KiB"` keeps so many bytes a row, the coordinates that tell most about it (`gk.Keep`), and
    `keep="queries"` the same coordinates unrounded, for rows that will be asked about;
    `keep="losses"` keeps no gradients at all, only losses, outputs, labels and the probabilities of
    classes, for `gk.suspects`. Cost: about one forward and backward pass, without the gradients of
    weights (of losses: one forward pass). Interrupted, it resumes after the last whole segment, once
    the rows it passes are seen to be the kept ones and some of them come out the same again.

    `columns` names further entries of the batch, numbers or texts, that are kept of every row for
    SQL: `["source", "text"]`, `{"document": "id"}`, or values in the loader's order,
    `{"text": dataset["text"]}`. Rows of several documents, as padding-free collators make them, are
    taken apart: every document is a row. `preview` copies what rows look like into the store, small,
    for `gradkeep serve`: its functions are asked for the rows 0, 1, 2 ... in the loader's order.

    `memory_budget` in bytes takes as many samples at once as fit. As a fraction, a float below 1, it
    is of the bytes that the batches take otherwise: activations are dropped and made again, to the
    bit, by `gk.memory_budget`.

    `workers` processes share the segments out, each with a device of its own if there are several;
    `engine` has them elsewhere: `gk.farm.engine("ray", address="auto")`. The bytes are those of one
    process that computes with as many threads. Model, loader and task travel to the workers.

    >>> import gradkeep as gk, tempfile
    >>> store = gk.open(tempfile.mkdtemp())
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> data = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
    >>> kept = gk.capture(store, model, data, task=gk.Classification(), split="train")
    >>> kept.rows, [layer.storage for layer in kept.layers]
    (5, ['factors', 'factors'])
    """
    if not isinstance(task, Task):
        raise CaptureError(
            "task must be a gk.Task",
            found=type(task).__name__,
            fix="pass gk.Classification(), or a subclass of gk.Task with losses(model, batch)",
        )
    instance("model", model, torch.nn.Module, error=CaptureError, expected="a torch.nn.Module")
    model = uncompiled(model)
    flag("resume", resume, error=CaptureError)
    flag("progress", progress, error=CaptureError)
    optional(count, "step", step, error=CaptureError)
    optional(number, "lr", lr, error=CaptureError, least=0)
    optional(instance, "preview", preview, kind=Preview, error=CaptureError)
    optional(one_of, "mode", mode, words=("eval", "train"), error=CaptureError)
    named = (checkpoints,) if isinstance(checkpoints, str) else _checked(checkpoints)
    keys = [gs.CaptureKey(label, split, run, name) for label in named]
    request = CaptureRequest(
        model=model,
        loader=loader,
        task=task,
        settings=CaptureSettings(layers, of, uncovered, encoding, keep, tolerance),
        embeddings=texts("embeddings", embeddings, error=CaptureError),
        ids=ids,
        columns=columns,
        preview=preview,
        memory_budget=memory_budget,
        mode=mode,
    )
    check_place(workers, engine, least=1)
    shared = workers is not None or engine is not None
    distributed = DistributedCapture(request, workers, engine) if shared else None
    replay = Replay(request, gs.open(store), resume=resume, progress=progress)
    if isinstance(checkpoints, str):
        return replay.capture(keys[0], step=step, lr=lr, distributed=distributed)
    original = {key: value.clone() for key, value in model.state_dict().items()}
    done = []
    try:
        for key, given in zip(keys, checkpoints.values(), strict=True):
            weights = given if isinstance(given, Weights) else Weights(given)
            model.load_state_dict(original)  # an adapter goes on the base that the model came with
            put_weights(model, load_weights(weights.source), name=key.checkpoint)
            done.append(
                replay.capture(key, step=weights.step, lr=weights.lr, distributed=distributed)
            )
    finally:
        model.load_state_dict(original)
    return done


def _checked(checkpoints: object) -> Checkpoints:
    found = instance(
        "checkpoints",
        checkpoints,
        Mapping,
        error=CaptureError,
        expected="a name for the weights that the model has, or a mapping of names to weights",
    )
    if not found:
        raise CaptureError("no checkpoint was given", fix="pass {name: weights, ...}, or a name")
    for given in found.values():
        source = given.source if isinstance(given, Weights) else given
        kinds = (Mapping, str, os.PathLike)
        expected = "a state dict, a file or a folder"
        instance("checkpoints", source, kinds, error=CaptureError, expected=expected)
    return found
