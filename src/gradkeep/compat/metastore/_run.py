"""One experiment: collect, load, compute, and write down how long each took."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from datetime import date
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import gradkeep as gk
from gradkeep.compat.metastore._config import dotted_names, make_data, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from gradkeep.compat.metastore._config import MetaStoreExperiment
    from gradkeep.query import Gradients
    from gradkeep.store import Encoding


def run(experiment: MetaStoreExperiment) -> Path:
    """Collect what is missing, answer the queries, and return the folder with results and times.

    `scores.npz` holds every product `[Q, N]` with the ids, and `total`, their sum over the
    queries. All methods give the same numbers: the gradients of each sample's own loss, unscaled.
    """
    train, test = make_data(experiment)
    network = make_model(experiment, train)
    _load_weights(experiment, network)
    layers = dotted_names(network, experiment.target_layers)
    storage = "dense" if experiment.method == "naive" else "factors"
    name = f"{experiment.model_name}_{experiment.data_name}.gradkeep"
    store = gk.open(experiment.artifacts / name)
    names = {
        "train": f"{storage}-{experiment.encoding}-{experiment.num_analyzed_samples}",
        "test": f"{storage}-{experiment.encoding}-{experiment.num_query}",
    }
    counts = {"train": experiment.num_analyzed_samples, "test": experiment.num_query}
    times: dict[str, Any] = {"method": experiment.method, "collect": {}, "layers": {}}
    for split, data in (("train", train), ("test", test)):
        part = _first(data, counts[split], split)
        times["collect"][split] = _collect(
            experiment, store, network, part, layers, split=split, keep=storage, name=names[split]
        )

    def side(split: str, layer: str | list[str]) -> Gradients:
        return gk.gradients(
            store, split=split, checkpoints="final", name=names[split], layers=layer
        )

    total: Any = 0.0
    for layer in layers:
        queries, rows = side("test", layer), side("train", layer)
        loading = _timed(lambda rows=rows: _read(rows))[0]
        computing, found = _timed(
            lambda queries=queries, rows=rows: gk.query.dot(
                queries, rows, compute=experiment.method, memory_budget=experiment.memory_budget
            )
        )
        times["layers"][layer] = {"load": loading, "compute": max(0.0, computing - loading)}
        total = total + found.values.numpy()
        print(f"{layer}: load {loading:.3f} s, compute {max(0.0, computing - loading):.3f} s")
    folder = _folder(experiment)
    shutil.copy(experiment.config, folder / "config.yaml")
    np.savez(
        folder / "scores.npz",
        scores=total,
        total=total.sum(0),
        query_ids=side("test", layers).ids,
        train_ids=side("train", layers).ids,
    )
    times["bytes"] = {split: _bytes(store, split, name) for split, name in names.items()}
    (folder / f"times_{experiment.method}.json").write_text(json.dumps(times, indent=2) + "\n")
    print(f"{experiment.method}: {total.shape[0]} queries x {total.shape[1]} samples in {folder}")
    return folder


def _collect(
    experiment: MetaStoreExperiment,
    store: gk.Store,
    network: Any,
    data: Any,
    layers: list[str],
    *,
    split: str,
    keep: str,
    name: str,
) -> float:
    from torch.utils.data import DataLoader

    seconds, kept = _timed(
        lambda: gk.capture(
            store,
            network,
            DataLoader(data, batch_size=experiment.batch_size),
            task=gk.Classification(),
            split=split,
            name=name,
            layers=layers,
            keep=keep,
            encoding=cast("Encoding", experiment.encoding),
            mode="eval",
        )
    )
    print(f"collect {kept}")
    return seconds


def _first(data: Any, rows: int, split: str) -> Any:
    from torch.utils.data import Subset

    if rows > len(data):
        print(f"{split}: {rows} samples were asked for, there are {len(data)}")
    return Subset(data, range(min(rows, len(data))))


def _load_weights(experiment: MetaStoreExperiment, network: Any) -> None:
    from gradkeep.capturing import load_weights, put_weights

    path = experiment.checkpoint
    if path is not None and path.exists():
        put_weights(network, load_weights(path), name=str(path))
        return
    warnings.warn(
        f"no checkpoint{'' if path is None else f' at {path}'}: the model has random weights "
        f"(seed {experiment.seed})",
        gk.CaptureWarning,
        stacklevel=2,
    )


def _read(side: Gradients) -> None:
    for _ in side.stream(1024):
        pass


def _bytes(store: gk.Store, split: str, name: str) -> int:
    return store.read(gk.CaptureKey("final", split, "main", name)).manifest.bytes


def _folder(experiment: MetaStoreExperiment) -> Path:
    name = (
        f"{experiment.method}_{experiment.data_name}_{experiment.num_analyzed_samples}_"
        f"{experiment.num_query}"
    )
    folder = experiment.logs / date.today().isoformat() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _timed(function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = function()
    return time.perf_counter() - started, found
