"""One experiment: collect, load, compute, and write down how long each took."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

import gradkeep as gk
from gradkeep.capturing._weights import fingerprint_weights
from gradkeep.compat.metastore._blocks import target_layers
from gradkeep.compat.metastore._data import DataSource
from gradkeep.compat.metastore._models import build_model, choose_gradients
from gradkeep.compat.metastore._results import LayerTime, MethodResult, write_results
from gradkeep.errors import CaptureError, ConflictError, GradkeepError, SchemaMismatchError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from gradkeep.compat.metastore._config import MetaStoreExperiment
    from gradkeep.query import Gradients
    from gradkeep.store import Encoding


AVERAGED = ("half", "recon")
"""The methods that MetaStore asks about the mean; it adds up the answers of the others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The training or the test samples of an experiment, and what their capture is called."""

    split: str
    data: Any
    positions: range | tuple[int, ...]
    key: gk.store.CaptureKey


def run(experiment: MetaStoreExperiment) -> Path:
    """Collect what is missing, answer the queries, and return the folder with results and times.

    `scores.npz` holds every product `[Q, N]` with the ids, and `total`, their sum over the
    queries. All methods give the same numbers: the gradients of each sample's own loss, unscaled.
    """
    return measure(experiment)[0]


def measure(experiment: MetaStoreExperiment) -> tuple[Path, MethodResult]:
    """The same, with what was written."""
    train, test = DataSource(
        experiment.data_name,
        experiment.files,
        experiment.folder,
        experiment.vocabulary,
        str(experiment.config),
    ).load()
    network = build_model(experiment, train)
    layers = target_layers(experiment, network)
    choose_gradients(network, list(layers.values()), weights_only=experiment.weights_only)
    store = gk.open(
        experiment.artifacts / f"{experiment.model_name}_{experiment.data_name}.gradkeep"
    )
    rows = _train_side(experiment, train, layers)
    queries = _test_side(experiment, test, layers)
    if experiment.collect or not store.has(rows.key):
        _check_room(experiment, store, network, rows)
    collected = {
        side.split: _collect(experiment, store, network, list(layers.values()), side)
        for side in (rows, queries)
    }
    started = time.perf_counter()
    times: dict[str, LayerTime] = {}
    total: Any = 0.0
    for name, path in layers.items():
        asked, kept = (_gradients(store, side, path) for side in (queries, rows))
        loading = _timed(lambda kept=kept: _read(kept))[0]
        whole, found = _timed(
            lambda asked=asked, kept=kept: gk.query.dot(
                asked, kept, compute=experiment.method, memory_budget=experiment.memory_budget
            )
        )
        times[name] = LayerTime(path, loading, max(0.0, whole - loading))
        total = total + found.values.numpy()
        print(f"{path}: load {loading:.3f} s, compute {times[name].compute:.3f} s")
    query_seconds = time.perf_counter() - started
    mean_seconds, mean = _mean(experiment, store, queries, rows)
    result = MethodResult(
        method=experiment.method,
        scores=total,
        mean=mean,
        query_ids=_ids(store, queries),
        train_ids=_ids(store, rows),
        collect=collected,
        layers=times,
        query_seconds=query_seconds,
        mean_seconds=mean_seconds,
        bytes={side.split: store.read(side.key).manifest.bytes for side in (rows, queries)},
    )
    folder = write_results(experiment, result)
    print(f"{experiment.method}: {total.shape[0]} queries x {total.shape[1]} samples in {folder}")
    return folder, result


def _mean(
    experiment: MetaStoreExperiment, store: gk.Store, queries: _Side, rows: _Side
) -> tuple[float | None, Any]:
    """What MetaStore asks `half` and `recon`, the mean of all queries `[N]`, with its seconds."""
    if experiment.method not in AVERAGED:
        return None, None
    seconds, found = _timed(
        lambda: mean_query(
            experiment.method,
            _gradients(store, queries, None),
            _gradients(store, rows, None),
            memory_budget=experiment.memory_budget,
        )
    )
    return seconds, found.numpy()


def mean_query(
    method: str, queries: Gradients, rows: Gradients, *, memory_budget: int
) -> torch.Tensor:
    """Products `[N]` with the mean query: by `half` from factors, by `recon` from gradients made again.

    Cost: one pass over the kept rows, whatever the number of queries.
    """
    directions = gk.query.mean(queries, memory_budget=memory_budget)
    if method == "half":
        return gk.query.along(rows, directions, memory_budget=memory_budget)[0]
    at_once = max(1, memory_budget // (8 * rows.size))
    found = []
    for some in rows.stream(at_once):
        total = torch.zeros(some.stop - some.start)
        for name, form in rows.forms.items():
            gradients = form.restore(some.factors[name].widened())
            total += (gradients @ directions.layers[name][0].to(gradients.dtype)).float()
        found.append(total)
    answer = torch.cat(found)
    slopes = rows.slopes()
    return answer if slopes is None else answer * slopes


def _train_side(experiment: MetaStoreExperiment, data: Any, layers: dict[str, str]) -> _Side:
    count = experiment.num_analyzed_samples
    return _side(experiment, "train", data, range(_available("train", data, count)), layers)


def _test_side(experiment: MetaStoreExperiment, data: Any, layers: dict[str, str]) -> _Side:
    chosen = experiment.test_indices
    if chosen is None:
        first = range(_available("test", data, experiment.num_query))
        return _side(experiment, "test", data, first, layers)
    outside = [index for index in chosen if index >= len(data)]
    if outside:
        raise CaptureError(
            f"--test_indices: there is no test sample {outside[0]}",
            path=experiment.config,
            expected=f"0 to {len(data) - 1}",
            fix="leave out what is not there",
        )
    return _side(experiment, "test", data, chosen, layers)


def _available(split: str, data: Any, wanted: int) -> int:
    if wanted > len(data):
        print(f"{split}: {wanted} samples were asked for, there are {len(data)}")
    return min(wanted, len(data))


def _side(
    experiment: MetaStoreExperiment,
    split: str,
    data: Any,
    positions: range | tuple[int, ...],
    layers: dict[str, str],
) -> _Side:
    """What is kept of other epochs, layers, parameters or samples has another name."""
    told = [*layers.values(), f"weights only: {experiment.weights_only}"]
    if not isinstance(positions, range):
        told.append(f"samples {positions}")
    digest = xxhash.xxh3_64_hexdigest("\n".join(told).encode())[:8]
    name = f"{_storage(experiment)}-{experiment.encoding}-{len(positions)}-{digest}"
    return _Side(
        split,
        data,
        positions,
        gk.store.CaptureKey(
            f"epoch-{experiment.target_epoch}", split, experiment.name or "main", name
        ),
    )


def _storage(experiment: MetaStoreExperiment) -> str:
    return "dense" if experiment.method == "naive" else "factors"


def _collect(
    experiment: MetaStoreExperiment,
    store: gk.Store,
    network: nn.Module,
    layers: list[str],
    side: _Side,
) -> float | None:
    """Seconds that collecting took; None where the gradients were there already."""
    from torch.utils.data import DataLoader, Subset

    if side.split == "train" and not experiment.collect:
        _check_kept(experiment, store, network, side)
        return None
    chosen = not isinstance(side.positions, range)
    try:
        seconds, kept = _timed(
            lambda: gk.capture(
                store,
                network,
                DataLoader(Subset(side.data, side.positions), batch_size=experiment.batch_size),
                task=gk.Classification(),
                checkpoints=side.key.checkpoint,
                split=side.split,
                run=side.key.run,
                name=side.key.capture,
                layers=layers,
                keep=_storage(experiment),
                encoding=cast("Encoding", experiment.encoding),
                mode="eval",
                ids=side.positions if chosen else None,
            )
        )
    except GradkeepError as error:
        if not store.has(side.key) and not isinstance(error, SchemaMismatchError | ConflictError):
            raise
        raise _other_weights(error, side) from error
    print(f"collect {kept}")
    return seconds if kept.rows > kept.reused_rows else None


def _check_kept(
    experiment: MetaStoreExperiment, store: gk.Store, network: nn.Module, side: _Side
) -> None:
    """Refuse to go on with gradients that are not there, or of another checkpoint."""
    fix = "set system.collect_artifacts: true for one run"
    try:
        kept = _gradients(store, side, None)
    except GradkeepError:
        raise CaptureError(
            f"system.collect_artifacts is false, and the gradients of {side.key.checkpoint} are not "
            "kept (wholly) for these layers and samples",
            path=experiment.config,
            found=f"no {side.key.folder} in {store.location}",
            fix=fix,
        ) from None
    if kept.weights != fingerprint_weights(network):
        raise CaptureError(
            "system.collect_artifacts is false, and the kept gradients are of other weights",
            path=experiment.config,
            found=f"{experiment.checkpoint} has changed since they were kept",
            fix=f"{fix}, with another --name",
        )


def _other_weights(error: GradkeepError, side: _Side) -> GradkeepError:
    return CaptureError(
        f"what is kept of {side.split} at {side.key.checkpoint} was made by another checkpoint, "
        f"model or data: {error.message}",
        path=error.path,
        found=error.found,
        expected=error.expected,
        fix="pass --name NEW to keep these beside the old ones, or delete the store",
    )


def _check_room(
    experiment: MetaStoreExperiment, store: gk.Store, network: nn.Module, rows: _Side
) -> None:
    """Refuse whole gradients that the disk cannot hold before hours are spent on them."""
    if _storage(experiment) != "dense" or store.has(rows.key):
        return
    each = sum(p.numel() for p in network.parameters() if p.requires_grad)
    wanted = 4 * each * len(rows.positions)
    free = shutil.disk_usage(experiment.artifacts).free
    if wanted > free:
        raise CaptureError(
            f"naive keeps whole gradients, and the disk of {experiment.artifacts} is too small",
            found=f"{free / 1e9:.1f} GB free",
            expected=f"{wanted / 1e9:.1f} GB for {len(rows.positions)} samples",
            fix="fewer --num_analyzed_samples or target_layers; or ted, half or recon",
        )


def _gradients(store: gk.Store, side: _Side, layers: str | None) -> Gradients:
    return gk.gradients(
        store,
        split=side.split,
        checkpoints=side.key.checkpoint,
        run=side.key.run,
        name=side.key.capture,
        layers=layers,
    )


def _ids(store: gk.Store, side: _Side) -> np.ndarray[Any, np.dtype[np.int64]]:
    return _gradients(store, side, None).ids


def _read(side: Gradients) -> None:
    for _ in side.stream(1024):
        pass


def _timed(function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = function()
    return time.perf_counter() - started, found
