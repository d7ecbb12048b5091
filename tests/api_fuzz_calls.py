"""The world of the fuzz of public functions, and good arguments for each of them."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from api_fuzz import Call
from api_fuzz_evaluate import evaluate_calls
from api_fuzz_packages import room_calls

import gradkeep as gk
from gradkeep import datamodels as dm
from gradkeep import farm


class World:
    """A small store with everything, and what is made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.store = gk.open(folder / "store", durability="process")
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        )
        self.batch = torch.randn(6, 4), torch.arange(6) % 3
        for split in ("train", "test"):
            gk.capture(
                self.store,
                self.model,
                [self.batch],
                task=gk.Classification(),
                split=split,
                lr=0.1,
                progress=False,
            )
        self.train = gk.gradients(self.store, split="train")
        self.test = gk.gradients(self.store, split="test")
        self.read = {"model": gk.data.GPT(vocabulary=7, length=5, dim=4, heads=2, layers=1).eval()}
        self.read |= {"loader": [{"input_ids": torch.randint(7, (4, 5))}]}
        self.read |= {"task": gk.LanguageModeling()}
        gk.capture(
            self.store, split="texts", run="texts", keep="factors", progress=False, **self.read
        )
        self.texts = gk.gradients(self.store, split="texts", run="texts")
        self.scores = gk.attribute(self.store, method="dot")
        self.scores.save("kept", store=self.store)
        planted = dm.planted(40, 6, 2)
        self.masks, self.outputs = planted.masks, planted.outputs
        self.fit = dm.fit(self.masks, self.outputs)
        self.fit.save(self.store, "fitted")
        self.study = dm.Study(
            folder / "study",
            self.batch,
            dm.Training(model_of_four, epochs=1),
            num_models=3,
            outputs=dm.margins(self.batch),
            keep_models=True,
        )
        self.study.run(workers=0)
        self.store.rows("squares", gk.store.Schema((gk.store.Array("value"),)), num_rows=2)
        (folder / "text.txt").write_text("some text that is long enough\n" * 20)
        arrays = {"x_train": np.zeros((4, 3), np.float32), "y_train": np.arange(4)}
        np.savez(folder / "data.npz", **arrays)


def model_of_four() -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def squares(numbers: Any) -> list[dict[str, Any]]:
    return [{"value": np.float32(n * n)} for n in numbers]


def calls(w: World) -> list[Call]:
    """Public functions and methods of all rooms, with good arguments."""
    query, data = gk.query, gk.data
    sums = {"gradients": w.train, "by": None, "weights": None, "ids": None, "memory_budget": "1GiB"}
    pair = {"queries": w.test, "train": w.train, "ids": [0, 2], "compute": None}
    pair |= {"memory_budget": "1GiB", "weights": None}
    projection = gk.Projection(dim=4)
    fitted = {"fitted": w.fit}
    stored = {"store": w.store, "split": "train", "run": "main", "name": "main", "of": "loss"}
    stored |= {"layers": None, "checkpoints": "final"}
    queries = {
        "store": w.store,
        "method": "dot",
        "queries": "test",
        "train": "train",
        "layers": None,
    }
    queries |= {"run": "main", "name": "main", "compute": None, "memory_budget": "1GiB", "ids": [1]}
    queries |= {"checkpoints": None, "per_layer": False, "subsets": None, "save": None}
    queries |= {"engine": None}
    output = {
        key: queries[key] for key in ("store", "layers", "run", "name", "memory_budget", "ids")
    }
    output |= {"queries": "texts", "train": "texts", "train_ids": [2], "method": "ekfac"}
    output |= {"checkpoints": None, "loader_ids": None, "run": "texts"}
    queries |= {"documents": [7, 7, 8, 8, 9, 9], "query_documents": None}
    options = {"masks": w.masks, "outputs": w.outputs, "penalty": "l1", "lambdas": 3, "folds": None}
    options |= {"share": 0.5, "tolerance": 1e-4, "max_steps": 100, "dtype": "float32", "seed": 0}
    options |= {"lam": None, "held_out": None, "prior": None, "variances": None, "device": "cpu"}
    options |= {"memory_budget": "1GiB", "progress": None, "scratch": None}
    limits = {"batch": "int", "timeout": "float", "max_attempts": "int", "lease_seconds": "float"}
    table = {
        "query.dot": (query.dot, {**pair, "per_layer": False}),
        "query.cosine": (query.cosine, pair),
        "query.gram": (query.gram, {"gradients": w.train, "compute": None, "memory_budget": 10**9}),
        "query.top": (query.top, {**pair, "k": 2, "smallest": False, "engine": None}),
        "query.small_codes": (
            query.small_codes,
            {"train": w.train, "bytes": 10, "sample": 6, "seed": 0},
        ),
        "query.total": (query.total, sums),
        "query.mean": (query.mean, sums),
        "query.squares": (query.squares, sums),
        "query.variance": (query.variance, {k: v for k, v in sums.items() if k != "weights"}),
        "query.along": (
            query.along,
            {"gradients": w.train, "directions": query.mean(w.train), "memory_budget": None},
        ),
        "query.tokens": (
            query.tokens,
            {"queries": w.texts, "train": w.texts, "ids": [0], "train_ids": [1, 2]}
            | {"memory_budget": "1GiB"},
        ),
        "query.along_tokens": (
            query.along_tokens,
            {"gradients": w.texts, "directions": query.mean(w.texts), "ids": [3]}
            | {"memory_budget": None},
        ),
        "query.gradients": (query.gradients, stored),
        "Gradients.column": (w.train.column, {"name": "loss"}),
        "Gradients.norms": (w.train.norms, {"per_layer": False}),
        "Gradients.rows": (w.train.rows, {"positions": [0, 1]}),
        "Gradients.stream": (
            lambda batch_rows: list(w.train.stream(batch_rows)),
            {"batch_rows": 2},
        ),
        "Gradients.positions": (w.train.positions, {"ids": [0, 1]}),
        "Gradients.restore": (w.train.restore, {"ids": [0, 1]}),
        "attribute": (gk.attribute, queries),
        "attribute_tokens": (gk.attribute_tokens, output),
        "attribute_tokens again": (gk.attribute_tokens, output | w.read | {"columns": None}),
        "attribute_once": (
            gk.attribute_once,
            {
                "model": w.read["model"],
                "train": w.read["loader"],
                "queries": w.read["loader"],
                "task": w.read["task"],
                "method": "kfac",
                "damping": 0.1,
                "layers": None,
                "mode": None,
                "memory_budget": None,
                "progress": False,
            },
        ),
        "text_similarity": (
            gk.text_similarity,
            {
                "queries": ["a b"],
                "train": ["a", "b c"],
                "words": 2,
                "how": "bm25",
                "query_ids": [0],
                "train_ids": [0, 1],
            },
        ),
        "Scores.by_document": (
            w.scores.by_document,
            {"train": [0, 0, 1, 1, 2, 2], "queries": ["a", "b", "a", "b", "c", "c"]},
        ),
        "attribute kernel": (gk.attribute, {"store": w.store, "method": "kernel", "damping": 1.0}),
        "attribute trak": (gk.attribute, {"store": w.store, "method": "trak", "dim": 8}),
        "combine": (gk.combine, {"scores": [w.scores, w.scores], "how": "mean"}),
        "project": (gk.project, {"gradients": w.train, "projection": projection, "model": 0}),
        "Projection": (gk.Projection, {"kind": "auto", "dim": 4, "seed": 0}),
        "register_method": (gk.register_method, {"method": None}),
        "Scores": (
            gk.Scores,
            {
                "values": w.scores.values,
                "query_ids": w.scores.query_ids,
                "train_ids": w.scores.train_ids,
            },
        ),
        "Scores.top": (w.scores.top, {"k": 2, "query": 1}),
        "Scores.bottom": (w.scores.bottom, {"k": 2, "query": 1}),
        "Scores.of": (w.scores.of, {"query": 1}),
        "Scores.rank": (w.scores.rank, {"query": 1}),
        "Scores.save": (w.scores.save, {"name": "again", "store": w.store}),
        "Scores.load": (gk.Scores.load, {"store": w.store, "name": "kept"}),
        "Scores.to_arrow": (w.scores.to_arrow, {"k": 2}),
        "datamodels.fit": (dm.fit, options),
        "datamodels.planted": (
            dm.planted,
            {
                "models": 9,
                "examples": 4,
                "targets": 2,
                "alpha": 0.5,
                "large": 2,
                "tail": 0.02,
                "explained": 0.8,
                "seed": 0,
            },
        ),
        "datamodels.draw_masks": (
            dm.draw_masks,
            {"seed": 0, "indices": [0, 1], "num_examples": 6, "alpha": 0.5, "subsets": "fixed"},
        ),
        "datamodels.correlation": (
            dm.correlation,
            {
                "predicted": w.outputs,
                "actual": w.outputs,
                "kind": "pearson",
                "level": 0.9,
                "resamples": 10,
                "seed": 0,
            },
        ),
        "datamodels.learning_curve": (
            dm.learning_curve,
            {"masks": w.masks, "outputs": w.outputs, "sizes": [10, 20], "held_out": 0.2, "seed": 0}
            | {"kind": "pearson"},
        ),
        "datamodels.memorization": (
            dm.memorization,
            {"masks": w.masks, "outputs": np.ones((40, 6), np.float32)},
        ),
        "datamodels.values": (
            dm.values,
            {"masks": w.masks, "utility": w.outputs[:, 0], "kind": "banzhaf"},
        ),
        "datamodels.load": (dm.load, {"store": w.store, "name": "fitted"}),
        "datamodels.top": (dm.top, {**fitted, "count": 2, "targets": [0]}),
        "datamodels.data_support": (dm.data_support, {**fitted, "threshold": 0.0, "base": None}),
        "datamodels.counterfactual": (dm.counterfactual, {**fitted, "removed": [0], "base": None}),
        "datamodels.leakage": (dm.leakage, {**fitted, "threshold": 8.0}),
        "datamodels.near_duplicates": (dm.near_duplicates, {**fitted, "threshold": 0.8}),
        "datamodels.neighbors": (dm.neighbors, {**fitted, "count": 1}),
        "datamodels.components": (dm.components, {**fitted, "count": 1, "extremes": 1}),
        "datamodels.clusters": (dm.clusters, {**fitted, "count": 2, "near": 2, "seed": 0}),
        "datamodels.compare": (
            dm.compare,
            {"first": w.fit, "second": w.fit, "count": 1, "extremes": 1},
        ),
        "datamodels.by_group": (
            dm.by_group,
            {**fitted, "groups": list("ababab"), "target_groups": None},
        ),
        "datamodels.similarity": (dm.similarity, {**fitted, "other": None}),
        "datamodels.verify_removals": (
            dm.verify_removals,
            {**fitted, "removals": [[0]], "retrain": lambda mask, seed: np.zeros(2), "repeats": 1},
        ),
        "datamodels.margins": (dm.margins, {"examples": w.batch, "dtype": "float32"}),
        "datamodels.losses": (dm.losses, {"examples": w.batch, "dtype": "float32"}),
        "datamodels.confidences": (dm.confidences, {"examples": w.batch, "dtype": "float32"}),
        "datamodels.output": (dm.output, {"of_model": len, "shape": (2,), "dtype": "float32"}),
        "Datamodels.predict": (w.fit.predict, {"masks": w.masks}),
        "Datamodels.score": (
            w.fit.score,
            {"masks": w.masks, "outputs": w.outputs, "kind": "pearson"},
        ),
        "Datamodels.add": (w.fit.add, {"masks": w.masks, "outputs": w.outputs}),
        "Datamodels.save": (w.fit.save, {"store": w.store, "name": "more"}),
        "Masks.of": (dm.Masks.of, {"masks": w.masks}),
        "Masks.dense": (dm.Masks.of(w.masks).dense, {"start": 0, "stop": 3}),
        "Masks.blocks": (lambda most: list(dm.Masks.of(w.masks).blocks(most)), {"most": 10}),
        "Training": (
            dm.Training,
            {
                "model": model_of_four,
                "epochs": 1,
                "batch_size": 2,
                "lr": 0.1,
                "optimizer": "SGD",
                "options": {},
            },
        ),
        "Study": (
            study_of(w),
            {
                "dataset": w.batch,
                "train_fn": dm.Training(model_of_four, epochs=1),
                "num_models": 2,
                "outputs": dm.margins(w.batch),
                "alpha": 0.5,
                "seed": 0,
                "name": "study",
                "subsets": "fixed",
                "keep_models": False,
                "stacked": None,
                "memory_budget": None,
            },
        ),
        "Study.grow": (w.study.grow, {"num_models": 3}),
        "Study.masks": (w.study.masks, {"models": [0]}),
        "Study.outputs": (w.study.outputs, {"name": None, "models": [0]}),
        "Study.model": (w.study.model, {"index": 0}),
        "Study.run": (w.study.run, {"workers": 0, "max_attempts": 3}),
        "data.dataset": (data.dataset, {"kind": "digits", "path": None, "split": "train"}),
        "data.model": (data.model, {"name": "mlp", "seed": 0, "hidden": [4]}),
        "data.load_digits": (data.load_digits, {"wrong_labels": 0.1, "seed": 0}),
        "data.load_digit_images": (
            data.load_digit_images,
            {"split": "test", "normalise": True, "wrong_labels": 0.0, "seed": 0},
        ),
        "data.load_cifar10": (data.load_cifar10, {"path": w.folder, "split": "train"}),
        "farm.run": (
            farm.run,
            {"store": w.store, "rows": "squares", "job": squares, "workers": 0, "progress": None}
            | {
                "engine": None,
                "threads": None,
                "batch": 1,
                "max_attempts": 3,
                "lease_seconds": 5.0,
            },
            limits,
        ),
        "farm.engine": (farm.engine, {"name": "local", "workers": 1}, {"workers": "int"}),
        "farm.LocalProcesses": (farm.LocalProcesses, {"workers": 1}),
        "farm.RayCluster": (
            farm.RayCluster,
            {"address": None, "workers": 1, "cpus": 1.0, "gpus": 0.0},
        ),
        "farm.Slurm": (
            farm.Slurm,
            {"workers": 1, "folder": "x", "cluster": "local", "parameters": {}},
        ),
    }
    here = [
        Call(name, entry[0], lambda good=entry[1]: dict(good), *entry[2:])
        for name, entry in table.items()
    ]

    def call(name: str, function: Any, good: dict[str, Any]) -> Call:
        return Call(name, function, lambda: dict(good))

    return here + room_calls(w, call) + evaluate_calls(w, call)


def study_of(w: World) -> Callable[..., Any]:
    """A study in a new folder each time."""

    def made(**options: Any) -> Any:
        with tempfile.TemporaryDirectory(dir=w.folder) as folder:
            return dm.Study(folder, **options)

    made.__signature__ = inspect.signature(dm.Study)  # type: ignore[attr-defined]
    return made
