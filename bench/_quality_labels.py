"""Planted label errors: compare measures that detect them, and retrain without the suspects."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import gradkeep as gk
from bench import _lds_truth
from bench import _quality_cleanlab as cleanlab
from bench._quality_board import Section, format_evaluation
from gradkeep.attribution._suspects import Suspects
from gradkeep.datamodels import Output, Training, margins
from gradkeep.evaluate import (
    Evaluation,
    Recipe,
    compare,
    label_detection,
    out_of_fold,
    rank_sum,
    verify_rows,
)

RATE = 0.1
COMBINED = "rank sum of saved-epochs loss and out-of-fold loss"


@dataclass(frozen=True, eq=False)
class LabelSetting:
    """Rows and the training recipe."""

    title: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    make: Callable[[], nn.Module]
    epochs: int
    batch_size: int
    lr: float
    saved_epochs: tuple[int, ...]
    least: float | None = None
    """AUC that the combined measure must reach."""


def digits(full: bool) -> Section:
    """Evaluate 1,297 digits with an MLP."""
    setting = _lds_truth.build_digits_mlp()
    data = LabelSetting(
        "digits MLP", setting.train, setting.test, setting.make, 15, 32, 0.05, (2, 3, 4, 5)
    )
    return evaluate_labels("labels-digits", data, seeds=5)


def mnist(full: bool) -> Section:
    """Evaluate MNIST with an MLP."""
    setting = _lds_truth.build_mnist("mlp")
    rows = 5000 if full else 3000
    train = (setting.train[0][:rows], setting.train[1][:rows])
    data = LabelSetting(
        "MNIST MLP", train, setting.test, setting.make, 10, 64, 0.05, (2, 3, 4, 5), least=0.97
    )
    return evaluate_labels("labels-mnist", data, seeds=5)


def cifar(full: bool) -> Section:
    """Evaluate CIFAR-10 with a small convolutional network."""
    rows = 8000 if full else 2000
    parts = load_cifar(rows, 1000)
    data = LabelSetting("CIFAR-10 CNN", *parts, build_cnn, 10, 32, 0.03, (3, 4, 5, 6))
    return evaluate_labels("labels-cifar", data, seeds=5)


def load_cifar(rows: int, queries: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return training and test images `[N, 3, 32, 32]` in a fixed random order."""
    with np.load(_lds_truth.DATA / "cifar10" / "cifar10_10k_2k.npz") as archive:
        parts = []
        for split, count in (("train", rows), ("test", queries)):
            order = np.random.default_rng(3).permutation(len(archive[f"y_{split}"]))[:count]
            images = torch.from_numpy(archive[f"x_{split}"][order]).permute(0, 3, 1, 2).float()
            labels = torch.from_numpy(archive[f"y_{split}"][order].astype(np.int64))
            parts.append((images / 127.5 - 1, labels))
    return parts


def build_cnn() -> nn.Module:
    """Build three convolutions with strides and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def evaluate_labels(name: str, data: LabelSetting, *, seeds: int, runs: int = 3) -> Section:
    """Flip labels, detect them by several measures, and retrain without the most suspicious
    rows."""
    x, y = data.train
    noisy, wrong = flip_labels(y)
    training = Training(data.make, data.epochs, data.batch_size, data.lr, options={"momentum": 0.9})
    store = gk.open(tempfile.mkdtemp(prefix="gradkeep-"), durability="process")
    recipe = Recipe((x, noisy), data.test, training)
    places = capture_epochs(store, data, training, noisy, runs)
    by_run = {"run": [f"run-{run}" for run in range(runs)]}
    last = f"epoch-{data.epochs:02d}"
    probabilities = out_of_fold(recipe, store=store, folds=5, workers=0)
    unseen = -np.log(np.maximum(probabilities[np.arange(len(y)), noisy.numpy()], 1e-12))
    epoch_losses = order_by_row(gk.suspects(store, by="loss", checkpoints=places, **by_run))
    measures = {
        "mean loss over saved epochs": epoch_losses,
        "final loss": order_by_row(gk.suspects(store, by="loss", checkpoints=last, **by_run)),
        "self, saved epochs": order_by_row(
            gk.suspects(store, by="self", checkpoints=places, **by_run)
        ),
        "out-of-fold loss": unseen,
        COMBINED: rank_sum([epoch_losses, unseen]),
    }
    lines: list[str] = []
    theirs = cleanlab.rank_rows(probabilities, noisy.numpy())
    if theirs is None:
        lines.append("cleanlab could not be installed and is missing here.")
    else:
        quality, listed = theirs
        measures["cleanlab self-confidence (peer)"] = quality
        # The rows of find_label_issues first, in its order; then the others by the same score.
        ahead = np.zeros(len(y))
        ahead[listed] = 1
        measures["cleanlab find_label_issues, then the rest (peer)"] = ahead + quality / 2
        right = int(wrong[listed].sum())
        lines.append(
            f"`find_label_issues` lists {len(listed)} rows, {right} of the {int(wrong.sum())} flips "
            f"among them (precision {right / max(1, len(listed)):.2f}, recall {right / wrong.sum():.2f})."
        )
    evaluations = {
        key: label_detection(value, wrong, subject=key) for key, value in measures.items()
    }
    head, missed = compare_measures(evaluations, int(wrong.sum()), data.least)
    lines = [*head, "", *lines] if lines else head
    suspects = np.argsort(-measures[COMBINED], kind="stable")[: int(wrong.sum())]
    removal_lines, failed = compare_removals(recipe, store, suspects, data, seeds)
    title = f"{data.title}, {len(y):,} rows, {RATE:.0%} of the labels flipped to any other class"
    return Section(name, title, (*lines, "", *removal_lines), missed or failed)


def flip_labels(y: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Flip a tenth of the labels; return the labels and a mask `[N]` of the flipped rows."""
    rng = np.random.default_rng(11)
    wrong = np.zeros(len(y), bool)
    wrong[rng.permutation(len(y))[: round(RATE * len(y))]] = True
    other = (y.numpy() + rng.integers(1, 10, len(y))) % 10
    return torch.from_numpy(np.where(wrong, other, y.numpy())), wrong


def capture_epochs(
    store: gk.Store, data: LabelSetting, training: Training, noisy: torch.Tensor, runs: int
) -> list[str]:
    """Capture losses and norms at the saved epochs and the last; return names of the saved ones."""
    x = data.train[0]
    steps = -(-len(x) // data.batch_size)
    for run in range(runs):
        net = training.begin(run).train()
        optimizer = training.make_optimizer(list(net.parameters()))
        for number, batch in enumerate(training.batches(len(x), run), 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), noisy[batch]).backward()
            optimizer.step()
            epoch, rest = divmod(number, steps)
            if rest == 0 and epoch in (*data.saved_epochs, data.epochs):
                loader = list(zip(x.split(500), noisy.split(500), strict=True))
                gk.capture(
                    store,
                    net,
                    loader,
                    task=gk.Classification(),
                    checkpoints=f"epoch-{epoch:02d}",
                    split="train",
                    run=f"run-{run}",
                    progress=False,
                )
    return [f"epoch-{epoch:02d}" for epoch in data.saved_epochs]


def order_by_row(suspects: Suspects) -> np.ndarray:
    """Return suspicion `[N]` in row order."""
    return np.asarray(suspects.values, np.float64)[np.argsort(suspects.ids)]


def compare_measures(
    evaluations: dict[str, Evaluation], flips: int, least: float | None
) -> tuple[list[str], bool]:
    """Return the table, the comparison with the best single measure, and True if a bar is
    missed."""
    lines = [
        f"| measure | AUC | precision at {flips} | recall at {2 * flips} | rank sum minus this |",
        "| --- | --- | --- | --- | --- |",
    ]
    whole = evaluations[COMBINED]
    for key, one in sorted(evaluations.items(), key=lambda pair: -pair[1].value):
        assert one.curve is not None
        at = one.curve.at.tolist()
        precision = one.curve.values[0, at.index(flips)]
        recall = one.curve.values[1, at.index(2 * flips)]
        difference = compare(whole, one)
        low, high = difference.interval
        ahead = "-" if one is whole else f"{difference.value:+.4f} [{low:+.4f}, {high:+.4f}]"
        lines.append(
            f"| {key} | {format_evaluation(one)} | {precision:.2f} | {recall:.2f} | {ahead} |"
        )
    best = max(
        (one for key, one in evaluations.items() if key != COMBINED), key=lambda one: one.value
    )
    difference = compare(whole, best)
    worse = difference.interval[1] < 0
    lines += [
        "",
        (
            f"Target: the rank sum no worse than the best single measure ({best.subject}) within the interval; "
            f"{'**missed**' if worse else 'reached'} with {difference.value:+.4f} "
            f"[{difference.interval[0]:+.4f}, {difference.interval[1]:+.4f}]."
        ),
    ]
    low_value = least is not None and whole.value < least
    if least is not None:
        verdict = "**missed**" if low_value else "reached"
        lines += ["", f"Target: AUC at least {least:.2f}; {verdict}: {whole.value:.3f}."]
    return lines, worse or low_value


def compare_removals(
    recipe: Recipe, store: gk.Store, suspects: np.ndarray, data: LabelSetting, seeds: int
) -> tuple[list[str], bool]:
    """Compare training without the suspects to training without as many random rows."""
    count = len(data.test[1])
    with_outputs = dataclasses.replace(recipe, output=_margins_and_hits(data.test), falling=False)
    lines, failed = [], False
    for what, first in (("margin", 0), ("test accuracy", count)):
        # The second call reuses the trained models.
        queries = range(first, first + count)
        gain = verify_rows(
            suspects, with_outputs, store=store, queries=queries, seeds=seeds, workers=0
        )
        beats = gain.interval[0] > 0
        failed |= not beats
        lines += [
            "",
            (
                f"Without {len(suspects)} suspects of the rank sum, {what}: {format_evaluation(gain)} above training "
                f"without as many random rows ({gain.sizes}), "
                f"{'beats' if beats else '**does not beat**'} random."
            ),
        ]
    return lines[1:], failed


def _margins_and_hits(test: tuple[torch.Tensor, torch.Tensor]) -> Output:
    """Return an output of shape `[2 T]`: margins of all queries, then 1 for each correct one."""
    like = margins(test)
    of_model = dataclasses.replace(like.of_model, of_logits=_margins_then_hits)
    shape = (2 * len(test[1]),)
    return dataclasses.replace(like, shape=shape, of_model=of_model, of_logits=_margins_then_hits)


def _margins_then_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    places = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    right = logits.gather(-1, places).squeeze(-1)
    margins_of_rows = right - logits.scatter(-1, places, -torch.inf).amax(-1)
    return torch.cat([margins_of_rows, (margins_of_rows > 0).float()], -1)
