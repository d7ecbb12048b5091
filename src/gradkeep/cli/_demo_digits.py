"""The story of the demo: wrong labels are planted, found and left out; a writer is killed, a bit is flipped."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep._environment import torch_threads
from gradkeep.cli._evaluation_output import ResultOptions, save_evaluations
from gradkeep.data import load_digits
from gradkeep.datamodels import Training
from gradkeep.errors import MissingExtraError
from gradkeep.evaluate import Recipe, ground_truth, judge_methods
from gradkeep.store import LocalDisk, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradkeep.data._examples import Digits

    States = Mapping[str, dict[str, torch.Tensor]]


SUBSETS, SEEDS = 40, 2
METHODS = ("kernel", "trak", "tracin", "random")
"""Ours, its strongest peer here, the simplest one, and none at all."""


def explain_by_groups(
    scores: gk.Scores, query: int, planted: Any, say: Callable[[str], None]
) -> None:
    """One mistake, explained by a few groups of rows instead of by single ones."""
    found = gk.groups(scores, query, count=1)
    for group in found.groups:
        say(
            f"grouped    test digit {query}: {len(group.ids)} rows did {group.share:.0%} of what "
            f"{'helped' if group.helps else 'harmed'}: {group.name}, "
            f"{planted[group.ids].mean():.0%} of them planted"
        )
    if not found.groups:
        say(f"grouped    test digit {query}: no three strong rows act alike")


def hold_against_retraining(
    store: gk.Store, recipe: Recipe, scores: gk.Scores, say: Callable[[str], None]
) -> None:
    """Train on random halves, and see how well each method predicted what these models say."""
    began = time.perf_counter()
    truth = ground_truth(store, recipe, subsets=SUBSETS, seeds=SEEDS, workers=0)
    took = time.perf_counter() - began
    say(
        f"studied    {SUBSETS} random halves x {SEEDS} seeds trained in {took:.1f} s; half of them "
        f"judge, a perfect prediction would score {truth.ceiling() or 0.0:.2f}"
    )
    asked = [method for method in METHODS if method != scores.method]
    given = {scores.method: scores}
    judged = judge_methods(store, truth, methods=asked, extra_scores=given, hybrid_of_best=False)
    found = [one.evaluation for one in judged.methods if one.evaluation is not None]
    save_evaluations(store, found, ResultOptions())
    told = [
        f"{one.name} {figure.value:.2f} [{figure.interval[0]:.2f}, {figure.interval[1]:.2f}]"
        for one, figure in zip(judged.methods, found, strict=True)
    ]
    say(f"judged     rank correlation with retraining (LDS): {'; '.join(told)}")


SHARES = (0.8, 0.6, 0.5)
"""Of what a step takes without a budget; the last one is trained in."""


def budget_curve(log: Path, say: Callable[[str], None]) -> None:
    """What smaller budgets cost a deeper network, and one of them for real, to the bit.

    A step is recorded in `log`, where the page finds it.
    """
    budget = gk.memory_budget(SHARES[-1])
    same = all(
        torch.equal(plain, again)
        for plain, again in zip(_gradients(None), _gradients(budget), strict=True)
    )
    _record(log)
    report, costs = budget.report(), []
    for share, point in zip(SHARES, budget.curve(SHARES), strict=True):
        cost = f"{point.slowdown:.2f}x the time" if point.fits else "does not fit"
        costs.append(f"{share:.0%} of the memory {cost}")
    say(f"budgets    a step of a network of 8 blocks, predicted: {', '.join(costs)}")
    if report.measured_peak is not None and report.budget is not None:
        whole = report.budget / SHARES[-1]
        say(
            f"           trained in {report.measured_peak / 1e6:.1f} of {whole / 1e6:.1f} MB: "
            f"gradients {'equal to the bit' if same else 'NOT equal'}"
        )


def _deep_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()]
    return nn.Sequential(*layers)


def _record(log: Path) -> None:
    log.parent.mkdir(exist_ok=True)
    model, batch = _deep_network(), torch.randn(256, 128)
    with gk.remat.record(log):
        torch.autograd.backward(model(batch).square().mean())


def _gradients(budget: Any) -> list[torch.Tensor]:
    """The gradients after some steps of a small deep network."""
    model = _deep_network()
    batches = [torch.randn(256, 128) for _ in range(5)]
    for batch in batches:
        model.zero_grad()
        if budget is None:
            torch.autograd.backward(model(batch).square().mean())
        else:
            with budget.step(inputs=batch):
                torch.autograd.backward(model(batch).square().mean())
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def write_page(store: gk.Store, path: Path, say: Callable[[str], None]) -> None:
    """The same story in one file for a browser, where the packages for it are there."""
    try:
        from gradkeep.web._report import write_report
    except MissingExtraError as error:
        say(f"report     not written: {error.fix}")
        return
    written = write_report(store, path)
    say(f"report     {written}: {written.stat().st_size / 1e6:.1f} MB, opens without a server")


SOURCE = gk.store.CaptureKey("epoch-30", "train")
COPY = gk.store.CaptureKey("epoch-30", "train", capture="copy")
ROWS = 128
"""Rows per segment of the copy: each is durable as soon as it is full."""


def kill_and_resume(store: gk.Store, say: Callable[[str], None]) -> None:
    """Copy the last capture in another process, kill -9 it in the middle, and resume."""
    if store.has(COPY):
        store.delete(COPY)
    command = [sys.executable, "-m", "gradkeep.cli._demo_digits", store.location]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = 0
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged >= 4 * ROWS:
                os.kill(child.pid, signal.SIGKILL)
                break
    kept = len(store.read(COPY, live=True))
    say(
        f"killed     a writer with kill -9 after {acknowledged} acknowledged rows: "
        f"{max(0, acknowledged - kept)} lost"
    )
    _copy(store)
    whole, copy = store.read(SOURCE), store.read(COPY)
    names = copy.names
    same = all(_equal(whole, copy, name) for name in names)
    say(
        f"resumed    only what was missing was written; the copy is "
        f"{'equal to' if same else 'NOT equal to'} the original"
    )


def damage_and_repair(store: gk.Store, say: Callable[[str], None]) -> None:
    """Flip one bit on disk; verify names it, repair moves it aside, a second run recreates it."""
    backend = LocalDisk(store.location)
    victim = Path(store.location) / COPY.folder / "seg" / "000003.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    found = verify(backend).damage[0]
    say(f"flipped    one bit; verify says: {Path(found.path).name}, tensor {found.tensor!r}")
    verify(backend, repair=True)
    _copy(store)
    state = "healthy" if verify(backend).healthy else "NOT healthy"
    say(f"repaired   the file was moved aside and written again; the store is {state}")


def _copy(store: gk.Store, *, slowly: bool = False) -> None:
    """Write the copy, or what is missing of it."""
    source = store.read(SOURCE)
    schema = dataclasses.replace(source.schema, rows_per_segment=ROWS)
    with store.write(COPY, schema) as writer:
        for batch in source.stream(batch_rows=ROWS):
            if not writer.needs(len(batch.ids)):
                writer.skip(batch.ids)
                continue
            writer.append(batch.ids, {name: batch[name] for name in source.names})
            if slowly:
                writer.flush()
                print(writer.position, flush=True)
                time.sleep(0.2)


def _equal(one: Any, other: Any, name: str) -> bool:
    import numpy as np

    return all(
        np.array_equal(a, b) for a, b in zip(one.column(name), other.column(name), strict=True)
    )


WRONG = 0.08


def run_digits_demo(folder: Path, *, seeds: int = 5, say: Callable[[str], None] = print) -> None:
    """Tell the whole story in `folder`; a second run goes on where the first one stopped."""
    with torch_threads(1):
        _run(folder, seeds, say)


def _run(folder: Path, seeds: int, say: Callable[[str], None]) -> None:
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
    kill_and_resume(store, say)
    damage_and_repair(store, say)
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


if __name__ == "__main__":
    _copy(gk.open(sys.argv[1]), slowly=True)
