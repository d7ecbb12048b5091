"""The story of the demo: wrong labels are planted, found, and left out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep._surroundings import torch_threads
from gradkeep.cli import _story_breaks
from gradkeep.cli._story_checks import (
    budget_curve,
    explain_by_groups,
    hold_against_retraining,
    write_page,
)
from gradkeep.data import load_digits
from gradkeep.datamodels import Training
from gradkeep.evaluate import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gradkeep.data._digits import Digits

    States = Mapping[str, dict[str, torch.Tensor]]

WRONG = 0.08


def tell(folder: Path, *, seeds: int = 5, say: Callable[[str], None] = print) -> None:
    """Tell the whole story in `folder`; a second run goes on where the first one stopped."""
    with torch_threads(1):
        _tell(folder, seeds, say)


def _tell(folder: Path, seeds: int, say: Callable[[str], None]) -> None:
    started = time.perf_counter()
    store = gk.open(folder)
    digits = load_digits(wrong_labels=WRONG)
    wrong = int(digits.planted.sum())
    say(
        f"data       {len(digits.train_labels)} digits to train, {wrong} of them with a wrong label "
        f"planted; {len(digits.test_labels)} to test"
    )
    trained = train(digits, range(len(digits.train_labels)), seed=0, keep=True)
    say(
        f"trained    64-64-10 network, {EPOCHS} epochs, "
        f"{len(trained.states)} checkpoints: {trained.accuracy:.1%} of the test digits right"
    )
    _capture(store, digits, trained.states, say)
    scores, blamed = _attribute(store, digits, say)
    explain_by_groups(scores, blamed, digits.planted, say)
    suspected = _suspects(store, digits, say)
    _retrain(digits, suspected, seeds, say)
    hold_against_retraining(store, recipe(), scores, say)
    budget_curve(folder / "remat" / "step.log", say)
    _story_breaks.kill_and_resume(store, say)
    _story_breaks.damage_and_repair(store, say)
    write_page(store, folder.with_name(f"{folder.name}.html"), say)
    say(f"done       in {time.perf_counter() - started:.0f} s; all of it is in {folder}")
    say(f"next       gradkeep serve {folder} --recipe {__name__}:recipe    the page: click and ask")
    say(f"           gradkeep why {folder} {blamed}")
    say(f"           gradkeep suspects {folder}")
    say(f"           gradkeep info {folder}")
    say(f'           gradkeep sql {folder} "select label, avg(loss) from samples group by label"')


def _capture(store: gk.Store, digits: Digits, states: States, say: Callable[[str], None]) -> None:
    """Replay every checkpoint over both splits, and keep every gradient."""
    found: list[gk.Captured] = []
    for split, images, labels in (
        ("train", digits.train_images, digits.train_labels),
        ("test", digits.test_images, digits.test_labels),
    ):
        batch = (torch.from_numpy(images), torch.from_numpy(labels))
        pictures = gk.Preview(image=images.reshape(-1, 8, 8))
        for number, (name, state) in enumerate(states.items(), 1):
            found += gk.capture(
                store,
                network(),
                [batch],
                task=gk.Classification(),
                split=split,
                checkpoints={name: gk.Weights(state, step=number, lr=RATE)},
                preview=pictures if number == len(states) else None,  # once is enough for the page
                progress=False,
            )
    size, dense = sum(kept.bytes for kept in found), sum(kept.dense_bytes for kept in found)
    say(
        f"captured   {len(states)} checkpoints x {len(digits.train_labels)} + "
        f"{len(digits.test_labels)} digits: every gradient, exact, in {size / 1e6:.1f} MB "
        f"(dense {dense / 1e6:.0f} MB, {dense / size:.0f}x) and "
        f"{sum(kept.seconds for kept in found):.1f} s"
    )


def _attribute(
    store: gk.Store, digits: Digits, say: Callable[[str], None]
) -> tuple[gk.Scores, int]:
    """Score all rows for all test digits; also gives a mistake that planted labels explain best."""
    began = time.perf_counter()
    scores = gk.attribute(store)
    took = time.perf_counter() - began
    say(
        f"scored     {scores.shape[0]} test digits x {scores.shape[1]} training digits by "
        f"{scores.method} at {len(scores.checkpoints)} checkpoints in {took:.1f} s"
    )
    last = scores.checkpoints[-1]
    test = store.read(gk.store.CaptureKey(last, "test"))
    mistakes = np.flatnonzero(test.column("label") != test.column("predicted"))
    shares = [digits.planted[scores.bottom(5, query=int(query)).ids].mean() for query in mistakes]
    if not len(mistakes):
        say("explained  no test digit is wrong")
        return scores, int(scores.query_ids[0])
    say(
        f"explained  {len(mistakes)} mistakes: of the 5 training digits that harmed each most, "
        f"{np.mean(shares):.0%} carry a planted label (of all training digits "
        f"{digits.planted.mean():.0%})"
    )
    return scores, int(mistakes[int(np.argmax(shares))])


def _suspects(store: gk.Store, digits: Digits, say: Callable[[str], None]) -> Any:
    """The rows that look most like wrong labels, as many as were planted."""
    ranked = gk.suspects(store).ids
    wrong = int(digits.planted.sum())
    first = int(digits.planted[ranked[:wrong]].sum())
    more = int(digits.planted[ranked[: 2 * wrong]].sum())
    say(
        f"suspects   the {wrong} highest mean losses hold {first} of the {wrong} planted labels "
        f"(precision and recall {first / wrong:.0%}); twice as many hold {more} "
        f"(recall {more / wrong:.0%})"
    )
    return ranked[:wrong]


def _retrain(digits: Digits, suspected: Any, seeds: int, say: Callable[[str], None]) -> None:
    """Train again without the suspects, without as many others, and with the right labels."""
    rows = np.arange(len(digits.train_labels))
    random = np.random.default_rng(0).choice(rows, len(suspected), replace=False)
    clean = load_digits()
    arms = (
        ("with them", digits, rows),
        ("without the suspects", digits, np.setdiff1d(rows, suspected)),
        ("without as many at random", digits, np.setdiff1d(rows, random)),
        ("all labels right", clean, rows),
    )
    told = []
    for name, data, chosen in arms:
        found = [train(data, chosen, seed=1 + seed).accuracy for seed in range(seeds)]
        told.append(f"{name} {np.mean(found):.1%} (+-{np.std(found):.1%})")
    say(f"retrained  mean of {seeds} seeds: {'; '.join(told)}")


EPOCHS, BATCH, RATE, MOMENTUM = 30, 64, 0.1, 0.9
KEPT = (2, 4, 7, 10, 15, 30)
"""The epochs whose weights are kept, more of them early: late ones have learnt all by heart."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a training ends with."""

    accuracy: float
    """On the test digits."""
    states: States = field(default_factory=dict)
    """The weights by the name of their checkpoint."""


def network() -> nn.Sequential:
    """A 64-64-10 network."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(digits: Digits, rows: Any, *, seed: int, keep: bool = False) -> Trained:
    """Train on some rows of the training digits."""
    torch.manual_seed(seed)
    model = network()
    chosen = torch.as_tensor(rows)
    images = torch.from_numpy(digits.train_images)[chosen]
    labels = torch.from_numpy(digits.train_labels)[chosen]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    states = {}
    for epoch in range(1, EPOCHS + 1):
        for batch in torch.split(torch.randperm(len(labels)), BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(images[batch]), labels[batch]))
            optimizer.step()
        if keep and epoch in KEPT:
            states[f"epoch-{epoch:02d}"] = {
                name: value.clone() for name, value in model.state_dict().items()
            }
    with torch.no_grad():
        said = model(torch.from_numpy(digits.test_images)).argmax(1)
    accuracy = float((said == torch.from_numpy(digits.test_labels)).float().mean())
    return Trained(accuracy, states)


def recipe() -> Recipe:
    """How the demo's network is trained, for whoever trains it again: the study, the commands."""
    digits = load_digits(wrong_labels=WRONG)
    pairs = (
        (torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)),
        (torch.from_numpy(digits.test_images), torch.from_numpy(digits.test_labels)),
    )
    training = Training(
        network, epochs=EPOCHS, batch_size=BATCH, lr=RATE, options={"momentum": MOMENTUM}
    )
    return Recipe(*pairs, training, source=f"{__name__}:recipe")
