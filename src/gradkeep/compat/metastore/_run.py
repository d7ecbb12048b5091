"""Run one experiment: collect, load and compute, and measure the time of each."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

import gradkeep as gk
from gradkeep.capturing._resume import fingerprint_weights
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
"""Methods that MetaStore applies to the mean query; it sums the results of the others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Training or test samples of an experiment, and the key of their capture."""

    split: str
    data: Any
    positions: range | tuple[int, ...]
    key: gk.store.CaptureKey


def run(experiment: MetaStoreExperiment) -> Path:
    """Collect missing gradients, answer the queries, and return the folder with results and times.

    `scores.npz` holds every product `[Q, N]` with the ids, and `total`, their sum over the
    queries. All methods give the same numbers: the gradients of each sample's own loss, unscaled.
    """
    return measure(experiment)[0]


def measure(experiment: MetaStoreExperiment) -> tuple[Path, MethodResult]:
    """Run an experiment; return the folder and the written result."""
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
        _check_disk_space(experiment, store, network, rows)
    collected = {
        side.split: _collect(experiment, store, network, list(layers.values()), side)
        for side in (rows, queries)
    }
    started = time.perf_counter()
    times: dict[str, LayerTime] = {}
    total: Any = 0.0
    for name, path in layers.items():
        query_gradients, train_gradients = (
            _gradients(store, side, path) for side in (queries, rows)
        )
        loading = _timed(lambda train_gradients=train_gradients: _read(train_gradients))[0]
        whole, scores = _timed(
            lambda query_gradients=query_gradients, train_gradients=train_gradients: gk.query.dot(
                query_gradients,
                train_gradients,
                compute=experiment.method,
                memory_budget=experiment.memory_budget,
            )
        )
        times[name] = LayerTime(path, loading, max(0.0, whole - loading))
        total = total + scores.values.numpy()
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
    """Return seconds and scores `[N]` of the mean query, for `half` and `recon` as in MetaStore."""
    if experiment.method not in AVERAGED:
        return None, None
    seconds, scores = _timed(
        lambda: mean_query(
            experiment.method,
            _gradients(store, queries, None),
            _gradients(store, rows, None),
            memory_budget=experiment.memory_budget,
        )
    )
    return seconds, scores.numpy()


def mean_query(
    method: str, queries: Gradients, rows: Gradients, *, memory_budget: int
) -> torch.Tensor:
    """Return products `[N]` with the mean query: `half` from factors, `recon` from restored gradients.

    Cost: one pass over the stored rows, regardless of the number of queries.
    """
    directions = gk.query.mean(queries, memory_budget=memory_budget)
    if method == "half":
        return gk.query.along(rows, directions, memory_budget=memory_budget)[0]
    at_once = max(1, memory_budget // (8 * rows.size))
    parts = []
    for some in rows.stream(at_once):
        total = torch.zeros(some.stop - some.start)
        for name, form in rows.forms.items():
            gradients = form.restore(some.factors[name].widened())
            total += (gradients @ directions.layers[name][0].to(gradients.dtype)).float()
        parts.append(total)
    answer = torch.cat(parts)
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
            f"--test_indices: no test sample {outside[0]}",
            code="compat.no_test_sample",
            path=experiment.config,
            expected=f"0 to {len(data) - 1}",
            fix="Remove it from --test_indices.",
        )
    return _side(experiment, "test", data, chosen, layers)


def _available(split: str, data: Any, count: int) -> int:
    if count > len(data):
        print(f"{split}: {count} samples were requested, {len(data)} are available")
    return min(count, len(data))


def _side(
    experiment: MetaStoreExperiment,
    split: str,
    data: Any,
    positions: range | tuple[int, ...],
    layers: dict[str, str],
) -> _Side:
    """Name the capture: other epochs, layers, parameters or samples have other names."""
    facts = [*layers.values(), f"weights only: {experiment.weights_only}"]
    if not isinstance(positions, range):
        facts.append(f"samples {positions}")
    digest = xxhash.xxh3_64_hexdigest("\n".join(facts).encode())[:8]
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
    """Return the seconds of collecting; None if the gradients were stored before."""
    from torch.utils.data import DataLoader, Subset

    if side.split == "train" and not experiment.collect:
        _check_stored_gradients(experiment, store, network, side)
        return None
    chosen = not isinstance(side.positions, range)
    try:
        seconds, captured = _timed(
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
    print(f"collect {captured}")
    return seconds if captured.rows > captured.reused_rows else None


def _check_stored_gradients(
    experiment: MetaStoreExperiment, store: gk.Store, network: nn.Module, side: _Side
) -> None:
    """Raise if the gradients are missing or of another checkpoint."""
    fix = "Set system.collect_artifacts: true for one run"
    try:
        gradients = _gradients(store, side, None)
    except GradkeepError:
        raise CaptureError(
            f"system.collect_artifacts is false, and the gradients of {side.key.checkpoint} are not "
            "completely stored for these layers and samples",
            code="compat.gradients_missing",
            path=experiment.config,
            found=f"no {side.key.folder} in {store.location}",
            fix=f"{fix}.",
        ) from None
    if gradients.weights != fingerprint_weights(network):
        raise CaptureError(
            "system.collect_artifacts is false, and the stored gradients are of other weights",
            code="compat.other_weights",
            path=experiment.config,
            found=f"{experiment.checkpoint} has changed since they were stored",
            fix=f"{fix}, with another --name.",
        )


def _other_weights(error: GradkeepError, side: _Side) -> GradkeepError:
    return CaptureError(
        f"the stored gradients of {side.split} at {side.key.checkpoint} are of another checkpoint, "
        f"model or data ({error.message})",
        code="compat.other_capture",
        path=error.path,
        found=error.found,
        expected=error.expected,
        fix="Pass --name NEW to store these next to the old ones, or delete the store.",
    )


def _check_disk_space(
    experiment: MetaStoreExperiment, store: gk.Store, network: nn.Module, rows: _Side
) -> None:
    """Raise if the disk cannot hold dense gradients, before they are computed."""
    if _storage(experiment) != "dense" or store.has(rows.key):
        return
    each = sum(p.numel() for p in network.parameters() if p.requires_grad)
    needed = 4 * each * len(rows.positions)
    free = shutil.disk_usage(experiment.artifacts).free
    if needed > free:
        raise CaptureError(
            f"naive stores dense gradients, and the disk of {experiment.artifacts} is too small",
            code="compat.disk_too_small",
            found=f"{free / 1e9:.1f} GB free",
            expected=f"{needed / 1e9:.1f} GB for {len(rows.positions)} samples",
            fix="Reduce --num_analyzed_samples or target_layers, or use ted, half or recon.",
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
    result = function()
    return time.perf_counter() - started, result
