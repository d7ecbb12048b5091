"""The part of the demo that asks further: in groups, against retraining, in fewer bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import gradkeep as gk
from gradkeep.cli._shown_evaluations import keep_evaluations
from gradkeep.errors import MissingExtra
from gradkeep.evaluate import ground_truth, judge_methods

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gradkeep.evaluate import Recipe

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
    judged = judge_methods(store, truth, methods=asked, given=given, hybrid_of_best=False)
    found = [one.evaluation for one in judged.methods if one.evaluation is not None]
    keep_evaluations(store, found, save=True, plots=None)
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
    except MissingExtra as error:
        say(f"report     not written: {error.fix}")
        return
    written = write_report(store, path)
    say(f"report     {written}: {written.stat().st_size / 1e6:.1f} MB, opens without a server")
