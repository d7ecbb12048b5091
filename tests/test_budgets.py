"""One parser of budgets for every function: bytes everywhere, fractions only where they mean something."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep._budgets import parse_budget, parse_bytes
from gradkeep.capturing._weights import AdamState
from gradkeep.errors import BudgetError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    torch.manual_seed(0)
    store, model = gk.open(tmp_path_factory.mktemp("store")), nn.Linear(4, 3)
    batch = (torch.randn(6, 4), torch.arange(6) % 3)
    for split in ("train", "test"):
        gk.capture(
            store, model, [batch], task=gk.Classification(), split=split, lr=0.1, progress=False
        )
    return store, model, batch, gk.gradients(store, split="train")


def adam_of(model):
    second = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return AdamState({}, second, step=1, beta2=0.9, eps=1e-8)


MASKS = np.random.default_rng(0).random((30, 8)) < 0.5
ASKED = {
    **{
        f"attribute {method.name}": lambda w, b, name=method.name: gk.attribute(
            w[0], method=name, memory_budget=b
        )
        for method in gk.methods()
        if method.name not in ("similarity", "knn-shapley", "influence", "arnoldi", "adam")
    },
    "attribute adam": lambda w, b: gk.attribute(
        w[0], method="adam", state=adam_of(w[1]), memory_budget=b
    ),
    "dot": lambda w, b: gk.query.dot(w[3], w[3], memory_budget=b),
    "cosine": lambda w, b: gk.query.cosine(w[3], w[3], memory_budget=b),
    "gram": lambda w, b: gk.query.gram(w[3], memory_budget=b),
    "top": lambda w, b: gk.query.top(w[3], w[3], 2, memory_budget=b),
    "mean": lambda w, b: gk.query.mean(w[3], memory_budget=b),
    "variance": lambda w, b: gk.query.variance(w[3], memory_budget=b),
    "along": lambda w, b: gk.query.along(w[3], gk.query.mean(w[3]), memory_budget=b),
    "project": lambda w, b: gk.project(w[3], gk.Projection(dim=8), memory_budget=b),
    "plan": lambda w, b: gk.plan(w[1], w[2], task=gk.Classification(), rows=9, memory_budget=b),
    "fit": lambda w, b: gk.datamodels.fit(
        MASKS, MASKS.sum(1, keepdims=True) * 1.0, memory_budget=b
    ),
}


@pytest.mark.parametrize("queries", ASKED)
@pytest.mark.parametrize("budget", [0.5, "0.5", 1.0], ids=repr)
def test_a_fraction_of_nothing_is_refused(world, queries, budget):
    with raises(BudgetError, "budget.fraction"):
        ASKED[queries](world, budget)


@pytest.mark.parametrize("queries", ASKED)
@pytest.mark.parametrize(
    "budget", ["2 bananas", "-1GiB", 0, -5, float("nan"), True, [1], "1e400"], ids=repr
)
def test_what_is_no_budget_is_refused(world, queries, budget):
    with pytest.raises(BudgetError):
        ASKED[queries](world, budget)


@pytest.mark.parametrize("queries", ASKED)
@pytest.mark.parametrize("budget", ["1GiB", 10**9, 1e9], ids=repr)
def test_bytes_are_taken_however_they_are_written(world, queries, budget):
    assert ASKED[queries](world, budget) is not None


def test_fractions_are_taken_where_they_mean_something(world, tmp_path):
    _, model, batch, _ = world
    stored = gk.capture(
        tmp_path,
        model,
        [batch],
        task=gk.Classification(),
        split="train",
        memory_budget=0.9,
        progress=False,
    )
    assert stored.rows == 6
    assert gk.memory_budget(0.5) is not None
    assert gk.memory_budget("0.5") is not None
    for wrong in (1.5e-3 - 2, 0.0, "0.0", float("inf")):
        with pytest.raises(BudgetError):
            gk.memory_budget(wrong)


@given(st.integers(1, 10**15), st.sampled_from(["", "B", "kB", "MB", "KiB", "GiB"]))
def test_numbers_with_units(number, unit):
    sizes = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "KiB": 2**10, "GiB": 2**30}
    result = parse_bytes(f"{number} {unit}")
    assert result == pytest.approx(number * sizes[unit], rel=1e-15)
    assert isinstance(result, int)


@given(st.floats(0, 1, exclude_min=True))
def test_fractions_stay_as_they_are(fraction):
    assert parse_budget(fraction) == fraction
    assert isinstance(parse_budget(fraction), float)
