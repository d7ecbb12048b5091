"""Retrain models on random subsets: the ground truth that attribution scores are compared with.

Models are trained several at a time with stacked weights, momentum and a one-cycle schedule.
`margins` are those of the correct class, log p - log(1 - p), averaged over seeds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from gradkeep.data import dataset, load_digits

DATA = Path(
    os.environ.get("GRADKEEP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)
MODELS_AT_A_TIME = 50
"""Default number of models that are trained with stacked weights."""


@dataclass(frozen=True)
class Setting:
    """A data set, a model and its training recipe."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    make: Callable[[], nn.Module]
    epochs: int = 15
    batch_size: int = 32
    lr: float = 0.05
    models_at_a_time: int = MODELS_AT_A_TIME
    """Models trained with stacked weights."""


@dataclass(frozen=True)
class Trained:
    """K models: their weights `[K, ...]` after each saved epoch, and their test margins."""

    states: dict[int, dict[str, torch.Tensor]]
    margins: torch.Tensor
    """`[K, T]`"""
    accuracy: float


@dataclass(frozen=True)
class Truth:
    """Subsets `[m, n]` and the mean margins `[m, T]` of the models trained on them."""

    masks: np.ndarray
    margins: np.ndarray
    ceiling: float
    """Score of a perfect prediction of the mean over infinitely many seeds."""
    by_seed: np.ndarray
    """`[m, seeds, T]`"""
    states: dict[int, dict[str, torch.Tensor]]
    """Weights `[m x seeds, ...]` of these models after each saved epoch."""


def build_digits_mlp() -> Setting:
    """Build the digits setting: 1,297 rows to train, 500 to test, MLP 64-128-64-10."""
    digits = load_digits()
    images = np.concatenate([digits.train_images, digits.test_images])
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.from_numpy(images[order]), torch.from_numpy(labels[order])
    return Setting("digits MLP", (x[:1297], y[:1297]), (x[1297:], y[1297:]), mlp(64, 128, 64))


def build_mnist(kind: str) -> Setting:
    """Build an MNIST setting with 5,000 rows to train and 500 to test; `kind` is mlp or
    logistic."""
    parts = []
    for split, count in (("train", 5000), ("test", 500)):
        source = dataset("idx", DATA / "mnist", split)
        chosen = np.random.default_rng(1).permutation(len(source))[:count]
        rows = [source[int(row)] for row in chosen]
        images = torch.stack([torch.as_tensor(row[0]).float().flatten() for row in rows])
        parts.append((images, torch.tensor([int(row[1]) for row in rows])))
    make = mlp(784, 128, 64) if kind == "mlp" else mlp(784)
    # Fewer at a time than for digits: weights, gradients and momenta of 50 do not fit into the cache.
    return Setting(f"MNIST {kind}", parts[0], parts[1], make, models_at_a_time=20)


def train_many(
    setting: Setting, subsets: torch.Tensor, seeds: Sequence[int], keep: Sequence[int] = ()
) -> Trained:
    """Train one model per subset `[K, S]` and seed; save weights after the epochs in `keep`."""
    many = setting.models_at_a_time
    parts = [
        _train_stacked(setting, subsets[at : at + many], seeds[at : at + many], keep)
        for at in range(0, len(seeds), many)
    ]
    states = {
        epoch: {n: torch.cat([p.states[epoch][n] for p in parts]) for n in parts[0].states[epoch]}
        for epoch in parts[0].states
    }
    accuracy = float(np.mean([part.accuracy for part in parts]))
    return Trained(states, torch.cat([part.margins for part in parts]), accuracy)


def compute_truth(
    setting: Setting,
    *,
    subsets: int = 100,
    seeds: int = 5,
    share: float = 0.5,
    keep: Sequence[int] = (),
) -> Truth:
    """Train several seeds on each of some random subsets of the training rows."""
    count = len(setting.train[1])
    size = round(share * count)
    rng = np.random.default_rng(7)
    rows = np.stack([rng.permutation(count)[:size] for _ in range(subsets)])
    masks = np.zeros((subsets, count), bool)
    np.put_along_axis(masks, rows, True, 1)
    every = torch.from_numpy(np.repeat(rows, seeds, 0))
    numbers = [10_000 + seed for seed in range(subsets * seeds)]
    trained = train_many(setting, every, numbers, keep)
    margins = trained.margins.reshape(subsets, seeds, -1).numpy()
    return Truth(masks, margins.mean(1), _estimate_ceiling(margins), margins, trained.states)


def train_full_runs(setting: Setting, runs: int, keep: Sequence[int], *, first: int = 0) -> Trained:
    """Train models on all rows."""
    rows = torch.arange(len(setting.train[1])).expand(runs, -1)
    return train_many(setting, rows, list(range(first, first + runs)), keep)


def compute_lds(scores: np.ndarray, truth: Truth) -> tuple[float, float, float]:
    """Return the linear datamodeling score of scores `[T, n]` and its 95 % bootstrap interval."""
    from gradkeep.datamodels import correlation

    predicted = truth.masks.astype(np.float64) @ np.asarray(scores, np.float64).T
    result = correlation(predicted, truth.margins, kind="spearman", resamples=200)
    return result.mean, result.mean_low, result.mean_high


def _estimate_ceiling(margins: np.ndarray) -> float:
    """Estimate the ceiling by Spearman-Brown from the agreement of two halves of the seeds."""
    from gradkeep.datamodels import correlation

    seeds = margins.shape[1]
    half = seeds // 2
    if half == 0:
        return float("nan")
    agree = correlation(
        margins[:, :half].mean(1),
        margins[:, half : 2 * half].mean(1),
        kind="spearman",
        resamples=10,
    ).mean
    one = agree / (half - (half - 1) * agree)
    return float(np.sqrt(seeds * one / (1 + (seeds - 1) * one)))


def _train_stacked(
    setting: Setting, subsets: torch.Tensor, seeds: Sequence[int], keep: Sequence[int]
) -> Trained:
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(setting.make())
    stacked, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    each = torch.vmap(lambda w, b, x: functional_call(skeleton, (w, b), (x,)))
    shared = torch.vmap(lambda w, b, x: functional_call(skeleton, (w, b), (x,)), (0, 0, None))
    x, y = setting.train
    size = subsets.shape[1]
    steps = -(-size // setting.batch_size)
    optimizer = torch.optim.SGD(list(stacked.values()), lr=setting.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, setting.lr, total_steps=steps * setting.epochs
    )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    states = {}
    for epoch in range(1, setting.epochs + 1):
        orders = torch.stack([torch.randperm(size, generator=g) for g in generators])
        rows = subsets.gather(1, orders)
        for places in rows.split(setting.batch_size, 1):
            flat = places.flatten()
            logits = each(stacked, buffers, x[flat].reshape(*places.shape, *x.shape[1:]))
            loss = F.cross_entropy(logits.flatten(0, 1), y[flat], reduction="sum")
            optimizer.zero_grad()
            (loss / places.shape[1]).backward()
            optimizer.step()
            schedule.step()
        if epoch in keep:
            states[epoch] = {name: value.detach().clone() for name, value in stacked.items()}
    with torch.no_grad():
        logits = shared(stacked, buffers, setting.test[0])
    labels = setting.test[1].expand(len(seeds), -1).unsqueeze(2)
    right = logits.gather(2, labels).squeeze(2)
    others = logits.scatter(2, labels, -torch.inf).logsumexp(2)
    accuracy = float((logits.argmax(2) == setting.test[1]).float().mean())
    return Trained(states, right - others, accuracy)


def mlp(*sizes: int, classes: int = 10) -> Callable[[], nn.Module]:
    """Return a function that builds linear layers with ReLU between them."""

    def make() -> nn.Module:
        parts: list[nn.Module] = []
        for d_in, d_out in zip(sizes, (*sizes[1:], classes), strict=True):
            parts += [nn.Linear(d_in, d_out), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    return make
