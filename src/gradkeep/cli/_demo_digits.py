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
from gradkeep.cli._evaluate import ResultOptions, save_evaluations
from gradkeep.data import load_digits
from gradkeep.datamodels import Training
from gradkeep.errors import MissingExtraError
from gradkeep.evaluate import Recipe, ground_truth, judge_methods
from gradkeep.evaluate._intervals import format_interval
from gradkeep.store import LocalDisk, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradkeep.data._examples import Digits

    States = Mapping[str, dict[str, torch.Tensor]]


SUBSETS, SEEDS = 40, 2
METHODS = ("kernel", "trak", "tracin", "random")
"""Ours, its strongest peer here, the simplest one, and none at all."""


def explain_by_groups(
    scores: gk.Scores, query: int, planted: Any, report: Callable[[str], None]
) -> None:
    """One mistake, explained by a few groups of rows instead of by single ones."""
    groups = gk.groups(scores, query, count=1)
    for group in groups.groups:
        report(
            f"grouped    test digit {query}: {len(group.ids)} rows did {group.share:.0%} of what "
            f"{'helped' if group.helps else 'harmed'}: {group.name}, "
            f"{planted[group.ids].mean():.0%} of them planted"
        )
    if not groups.groups:
        report(f"grouped    test digit {query}: no three strong rows act alike")


def hold_against_retraining(
    store: gk.Store, recipe: Recipe, scores: gk.Scores, report: Callable[[str], None]
) -> None:
    """Train on random halves, and see how well each method predicted what these models say."""
    began = time.perf_counter()
    truth = ground_truth(store, recipe, subsets=SUBSETS, seeds=SEEDS, workers=0)
    took = time.perf_counter() - began
    report(
        f"studied    {len(truth.masks)} random halves x {truth.seeds} seeds trained in {took:.1f} s; half of them "
        f"judge, a perfect prediction would score {truth.ceiling() or 0.0:.2f}"
    )
    other_methods = [method for method in METHODS if method != scores.method]
    captured_scores = {scores.method: scores}
    judged = judge_methods(
        store, truth, methods=other_methods, extra_scores=captured_scores, hybrid_of_best=False
    )
    evaluations = [one.evaluation for one in judged.methods]
    save_evaluations(store, evaluations, ResultOptions())
    texts = [
        f"{one.name} {figure.value:.2f} {format_interval(figure.interval, '.2f')}"
        for one, figure in zip(judged.methods, evaluations, strict=True)
    ]
    report(f"judged     rank correlation with retraining (LDS): {'; '.join(texts)}")


SHARES = (0.8, 0.6, 0.5)
"""Of what a step takes without a budget; the last one is trained in."""


def budget_curve(log: Path, emit: Callable[[str], None]) -> None:
    """Print the cost of smaller budgets for a deeper network, and train in one of them.

    A step is recorded in `log`, where the page finds it.
    """
    budget = gk.memory_budget(SHARES[-1])
    same = all(
        torch.equal(plain, repeated)
        for plain, repeated in zip(_gradients(None), _gradients(budget), strict=True)
    )
    _record(log)
    report, costs = budget.report(), []
    for share, point in zip(SHARES, budget.curve(SHARES), strict=True):
        cost = f"{point.slowdown:.2f}x the time" if point.fits else "does not fit"
        costs.append(f"{share:.0%} of the memory {cost}")
    emit(f"budgets    a step of a network of 8 blocks, predicted: {', '.join(costs)}")
    if report.measured_peak is not None and report.budget is not None:
        whole = report.budget / SHARES[-1]
        emit(
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


def write_page(store: gk.Store, path: Path, report: Callable[[str], None]) -> None:
    """The same story in one file for a browser, where the packages for it are there."""
    try:
        from gradkeep.web._report import write_report
    except MissingExtraError as error:
        report(f"report     not written: {error.fix}")
        return
    written = write_report(store, path)
    report(f"report     {written}: {written.stat().st_size / 1e6:.1f} MB, opens without a server")


SOURCE = gk.store.CaptureKey("epoch-30", "train")
COPY = gk.store.CaptureKey("epoch-30", "train", capture="copy")
ROWS = 128
"""Rows per segment of the copy: each is durable as soon as it is full."""


def kill_and_resume(store: gk.Store, report: Callable[[str], None]) -> None:
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
    intact_rows = len(store.read(COPY, live=True))
    report(
        f"killed     a writer with kill -9 after {acknowledged} acknowledged rows: "
        f"{max(0, acknowledged - intact_rows)} lost"
    )
    _copy(store)
    whole, copy = store.read(SOURCE), store.read(COPY)
    names = copy.names
    same = all(_equal(whole, copy, name) for name in names)
    report(
        f"resumed    only what was missing was written; the copy is "
        f"{'equal to' if same else 'NOT equal to'} the original"
    )


def damage_and_repair(store: gk.Store, report: Callable[[str], None]) -> None:
    """Flip one bit on disk; verify names it, repair moves it aside, a second run recreates it."""
    backend = LocalDisk(store.location)
    victim = Path(store.location) / COPY.folder / "seg" / "000003.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    damage = verify(backend).damage[0]
    report(f"flipped    one bit; verify says: {Path(damage.path).name}, tensor {damage.tensor!r}")
    verify(backend, repair=True)
    _copy(store)
    state = "healthy" if verify(backend).healthy else "NOT healthy"
    report(f"repaired   the file was moved aside and written again; the store is {state}")


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


def run_digits_demo(folder: Path, *, seeds: int = 5, report: Callable[[str], None] = print) -> None:
    """Tell the whole story in `folder`; a second run goes on where the first one stopped."""
    with torch_threads(1):
        _run(folder, seeds, report)


def _run(folder: Path, seeds: int, report: Callable[[str], None]) -> None:
    started = time.perf_counter()
    store = gk.open(folder)
    digits = load_digits(wrong_labels=WRONG)
    wrong = int(digits.planted.sum())
    report(
        f"data       {len(digits.train_labels)} digits to train, {wrong} of them with a wrong label "
        f"planted; {len(digits.test_labels)} to test"
    )
    trained = train(digits, range(len(digits.train_labels)), seed=0, keep=True)
    report(
        f"trained    64-64-10 network, {TRAINING['epochs']} epochs, "
        f"{len(trained.states)} checkpoints: {trained.accuracy:.1%} of the test digits right"
    )
    _capture(store, digits, trained.states, report)
    scores, blamed = _attribute(store, digits, report)
    explain_by_groups(scores, blamed, digits.planted, report)
    suspected = _suspects(store, digits, report)
    _retrain(digits, suspected, seeds, report)
    hold_against_retraining(store, recipe(), scores, report)
    budget_curve(folder / "remat" / "step.log", report)
    kill_and_resume(store, report)
    damage_and_repair(store, report)
    write_page(store, folder.with_name(f"{folder.name}.html"), report)
    report(f"done       in {time.perf_counter() - started:.0f} s; all of it is in {folder}")
    report(
        f"next       gradkeep serve {folder} --recipe {__name__}:recipe    the page: click and ask"
    )
    report(f"           gradkeep why {folder} {blamed}")
    report(f"           gradkeep suspects {folder}")
    report(f"           gradkeep info {folder}")
    report(
        f'           gradkeep sql {folder} "select label, avg(loss) from samples group by label"'
    )


def _capture(
    store: gk.Store, digits: Digits, states: States, report: Callable[[str], None]
) -> None:
    """Replay every checkpoint over both splits, and keep every gradient."""
    captured: list[gk.Captured] = []
    for split, images, labels in (
        ("train", digits.train_images, digits.train_labels),
        ("test", digits.test_images, digits.test_labels),
    ):
        batch = (torch.from_numpy(images), torch.from_numpy(labels))
        pictures = gk.Preview(image=images.reshape(-1, 8, 8))
        for number, (name, state) in enumerate(states.items(), 1):
            captured += gk.capture(
                store,
                network(),
                [batch],
                task=gk.Classification(),
                split=split,
                checkpoints={name: gk.Weights(state, step=number, lr=TRAINING["lr"])},
                preview=pictures if number == len(states) else None,  # once is enough for the page
                progress=False,
            )
    size, dense = sum(item.bytes for item in captured), sum(item.dense_bytes for item in captured)
    report(
        f"captured   {len(states)} checkpoints x {len(digits.train_labels)} + "
        f"{len(digits.test_labels)} digits: every gradient, exact, in {size / 1e6:.1f} MB "
        f"(dense {dense / 1e6:.0f} MB, {dense / size:.0f}x) and "
        f"{sum(item.seconds for item in captured):.1f} s"
    )


def _attribute(
    store: gk.Store, digits: Digits, report: Callable[[str], None]
) -> tuple[gk.Scores, int]:
    """Score all rows for all test digits; also gives a mistake that planted labels explain best."""
    began = time.perf_counter()
    scores = gk.attribute(store)
    took = time.perf_counter() - began
    report(
        f"scored     {scores.shape[0]} test digits x {scores.shape[1]} training digits by "
        f"{scores.method} at {len(scores.checkpoints)} checkpoints in {took:.1f} s"
    )
    last = scores.checkpoints[-1]
    test = store.read(gk.store.CaptureKey(last, "test"))
    mistakes = np.flatnonzero(test.column("label") != test.column("predicted"))
    shares = [digits.planted[scores.bottom(5, query=int(query)).ids].mean() for query in mistakes]
    if not len(mistakes):
        report("explained  no test digit is wrong")
        return scores, int(scores.query_ids[0])
    report(
        f"explained  {len(mistakes)} mistakes: of the 5 training digits that harmed each most, "
        f"{np.mean(shares):.0%} carry a planted label (of all training digits "
        f"{digits.planted.mean():.0%})"
    )
    return scores, int(mistakes[int(np.argmax(shares))])


def _suspects(store: gk.Store, digits: Digits, report: Callable[[str], None]) -> Any:
    """The rows that look most like wrong labels, as many as were planted."""
    ranked = gk.suspects(store).ids
    wrong = int(digits.planted.sum())
    first = int(digits.planted[ranked[:wrong]].sum())
    more = int(digits.planted[ranked[: 2 * wrong]].sum())
    report(
        f"suspects   the {wrong} highest mean losses hold {first} of the {wrong} planted labels "
        f"(precision and recall {first / wrong:.0%}); twice as many hold {more} "
        f"(recall {more / wrong:.0%})"
    )
    return ranked[:wrong]


def _retrain(digits: Digits, suspected: Any, seeds: int, report: Callable[[str], None]) -> None:
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
    texts = []
    for name, data, chosen in arms:
        accuracies = [train(data, chosen, seed=1 + seed).accuracy for seed in range(seeds)]
        texts.append(f"{name} {np.mean(accuracies):.1%} (+-{np.std(accuracies):.1%})")
    report(f"retrained  mean of {seeds} seeds: {'; '.join(texts)}")


TRAINING: dict[str, Any] = {"epochs": 30, "batch_size": 64, "lr": 0.1}
MOMENTUM = 0.9
KEPT = (2, 4, 7, 10, 15, 30)
"""The epochs whose weights are kept, more of them early: late ones have learnt all by heart."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Result of a training."""

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
    optimizer = torch.optim.SGD(model.parameters(), lr=TRAINING["lr"], momentum=MOMENTUM)
    states = {}
    for epoch in range(1, TRAINING["epochs"] + 1):
        for batch in torch.split(torch.randperm(len(labels)), TRAINING["batch_size"]):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(images[batch]), labels[batch]))
            optimizer.step()
        if keep and epoch in KEPT:
            states[f"epoch-{epoch:02d}"] = {
                name: value.clone() for name, value in model.state_dict().items()
            }
    with torch.no_grad():
        outputs = model(torch.from_numpy(digits.test_images)).argmax(1)
    accuracy = float((outputs == torch.from_numpy(digits.test_labels)).float().mean())
    return Trained(accuracy, states)


def recipe() -> Recipe:
    """How the demo's network is trained, for whoever trains it again: the study, the commands."""
    digits = load_digits(wrong_labels=WRONG)
    pairs = (
        (torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)),
        (torch.from_numpy(digits.test_images), torch.from_numpy(digits.test_labels)),
    )
    training = Training(network, options={"momentum": MOMENTUM}, **TRAINING)
    return Recipe(*pairs, training, source=f"{__name__}:recipe")


if __name__ == "__main__":
    _copy(gk.open(sys.argv[1]), slowly=True)
