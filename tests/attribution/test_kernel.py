"""The weighted kernel and TRAK against the formulas in float64, written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep._budgets import format_bytes
from gradkeep.attribution._row_features import RowStorage
from gradkeep.curvature._cholesky import dual, primal, relative_damping
from gradkeep.errors import AttributionError, BudgetError

ROWS, ASKED = 14, 6
AT = ("one", "two", "three")


@pytest.fixture(scope="module")
def world(make_world):
    """A store with three checkpoints, and margins and their gradients at each in float64."""
    world = make_world(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        (4,),
        rows=ROWS,
        queries=ASKED,
        checkpoints=AT,
    )
    truth = {}
    for split in world.data:
        for name in AT:
            q = torch.sigmoid(-world.margins(split, at=name))
            truth[split, name] = world.gradients(split, at=name, of="output"), q
    return world.store, truth


def by_hand(truth, at, *, weight="q", damping=1.0, q=None):
    pooled = torch.stack([truth["train", name][1] for name in at]).mean(0) if q is None else q
    w = {"q": pooled, "q(1-q)": pooled * (1 - pooled), "none": torch.ones_like(pooled)}[weight]
    parts = []
    for name in at:
        x, g = truth["train", name][0], truth["test", name][0]
        hessian = x.T @ (w.unsqueeze(1) * x)
        lam = damping * (w * x.square().sum(1)).mean()
        inverse = torch.linalg.inv(hessian + lam * torch.eye(len(hessian), dtype=x.dtype))
        parts.append((g @ inverse @ x.T) * pooled)
    return torch.stack(parts).mean(0).numpy()


def close(actual, expected):
    return np.abs(actual - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("weight", ["q", "q(1-q)", "none"])
@pytest.mark.parametrize("at", [AT[:1], AT])
@pytest.mark.parametrize("damping", [0.3, 1.0])
def test_kernel_is_the_damped_inverse_in_parameter_space(world, weight, at, damping):
    store, truth = world
    scores = gk.attribute(store, checkpoints=at, weight=weight, damping=damping)
    assert close(scores.numpy(), by_hand(truth, at, weight=weight, damping=damping))
    assert scores.exact


def test_kernel_is_the_default_over_all_checkpoints(world):
    store, truth = world
    assert gk.attribute(store).method == "kernel"
    expected = by_hand(truth, sorted(AT), weight="q", damping=1.0)
    assert close(gk.attribute(store).numpy(), expected)


def test_layers_add_up(world):
    store, _ = world
    scores = gk.attribute(store, per_layer=True)
    assert scores.per_layer.shape == (2, ASKED, ROWS)
    assert close(scores.per_layer.sum(0), gk.attribute(store).numpy())
    assert np.abs(scores.per_layer).max(axis=(1, 2)).min() > 0


def test_given_q_takes_the_place_of_the_pooled_one(world):
    store, truth = world
    q = np.linspace(0.0, 1.0, ROWS)  # both ends are probabilities too
    scores = gk.attribute(store, checkpoints="one", q=q)
    assert close(scores.numpy(), by_hand(truth, ["one"], q=torch.from_numpy(q)))
    assert not close(scores.numpy(), by_hand(truth, ["one"]))
    for wrong, words in ((q[:3], r"expected \[\d+\]"), (q * 2, "between 0 and 1")):
        with pytest.raises(AttributionError, match=words):
            gk.attribute(store, q=wrong)


def test_a_projection_with_many_numbers_comes_near_the_kernel(world):
    store, _ = world
    exact = gk.attribute(store)
    near = gk.attribute(store, dim=1 << 15)
    assert not near.exact
    assert "32768 numbers" in repr(near)
    assert np.corrcoef(exact.numpy().ravel(), near.numpy().ravel())[0, 1] > 0.99


def test_a_budget_too_small_for_a_projection_says_what_it_needs(world):
    store, _ = world
    for dim in (1 << 15, 1 << 13):
        # The matrix and its factor, the queries, and twice the rows that pass.
        needed = 4 * (2 * ROWS**2 + dim * ASKED + 2 * dim * ROWS)
        with pytest.raises(BudgetError, match=f"{dim} numbers") as refused:
            gk.attribute(store, dim=dim, memory_budget=needed - 1)
        assert refused.value.expected == f"at least {format_bytes(needed)}"
    assert gk.attribute(store, dim=512, memory_budget="64MiB").shape == (ASKED, ROWS)


@pytest.mark.parametrize("dim", [5, 13, 40])
@pytest.mark.parametrize("ridge", [0.5, 2.0])
def test_trak_is_the_ridged_inverse_of_projected_gradients(world, dim, ridge):
    store, truth = world
    parts = []
    pooled = torch.stack([truth["train", name][1] for name in AT]).mean(0)
    for number, name in enumerate(sorted(AT)):
        by = gk.Projection(dim=dim, seed=3)
        x, g = (
            gk.project(
                gk.gradients(store, split=s, checkpoints=name, of="output"), by, model=number
            ).double()
            for s in ("train", "test")
        )
        second = x.T @ x
        lam = ridge * second.trace() / min(dim, ROWS)
        inverse = torch.linalg.inv(second + lam * torch.eye(dim, dtype=x.dtype))
        parts.append((g @ inverse @ x.T) * pooled)
    scores = gk.attribute(store, method="trak", dim=dim, ridge=ridge, seed=3)
    assert close(scores.numpy(), torch.stack(parts).mean(0).numpy())


def test_trak_without_a_ridge_needs_more_rows_than_numbers(world):
    store, _ = world
    assert np.isfinite(gk.attribute(store, method="trak", dim=4, ridge=0).numpy()).all()
    with raises(AttributionError, "attribute.singular", fix="dim="):
        gk.attribute(store, method="trak", dim=ROWS, ridge=0)


def test_asking_for_some_queries_gives_the_same_rows(world):
    store, _ = world
    for method in ("kernel", "trak"):
        whole = gk.attribute(store, method=method)
        some = gk.attribute(store, method=method, ids=[4, 1])
        assert some.query_ids.tolist() == [4, 1]
        assert np.allclose(some.numpy(), whole.numpy()[[4, 1]], rtol=1e-4, atol=1e-6)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(0.05, 5))
@settings(max_examples=40, deadline=None)
def test_dual_and_primal_are_the_same(rows, dim, seed, damping):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator)
    g = torch.randn(3, dim, generator=generator)
    weight, pull = torch.rand(2, rows, generator=generator) + 0.1
    one = primal(RowStorage.of(x), weight=weight, pull=pull, damping=damping)(g)
    other = dual(x @ x.T, weight=weight, pull=pull, damping=damping)(g @ x.T)
    a = x.double()
    inverse = torch.linalg.inv(a.T @ (weight.unsqueeze(1) * a) + damping * torch.eye(dim))
    expected = (g.double() @ inverse @ a.T) * pull
    assert torch.allclose(one.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.allclose(other.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_damping_is_relative_to_any_diagonal_above_zero():
    assert relative_damping(0.5, 1e-9, name="damping") == 5e-10
    assert relative_damping(2.0, 1e9, name="damping") == 2e9
    for diagonal in (0.0, -1.0, float("nan")):
        with raises(AttributionError, "attribute.zero_gradients"):
            relative_damping(1.0, diagonal, name="damping")
    for damping in (0.0, -1.0, "auto"):
        with raises(AttributionError, "attribute.damping"):
            relative_damping(damping, 1.0, name="damping")


def test_of_squared_errors_the_weight_is_one(tmp_path):
    torch.manual_seed(2)
    store, net = gk.open(tmp_path), nn.Linear(3, 1)
    data = {s: (torch.randn(n, 3), torch.randn(n)) for s, n in (("train", 9), ("test", 4))}
    for split, batch in data.items():
        gk.capture(store, net, [batch], task=gk.Regression(), split=split, progress=False)
    x, g = (torch.cat([data[s][0], torch.ones(len(data[s][1]), 1)], 1) for s in ("train", "test"))
    residual = (net(data["train"][0]).squeeze(1) - data["train"][1]).detach()
    lam = x.square().sum(1).mean()
    expected = g @ torch.linalg.inv(x.T @ x + lam * torch.eye(4)) @ x.T * -residual
    assert close(gk.attribute(store, target="output").numpy(), expected.numpy())
    residuals = (net(data["test"][0]).squeeze(1) - data["test"][1]).detach()
    assert close(gk.attribute(store).numpy(), (-residuals[:, None] * expected).numpy())
    with raises(AttributionError, "attribute.q_without_margins"):
        gk.attribute(store, q=np.full(9, 0.5))


def test_of_losses_alone_the_kernel_is_theirs(tmp_path):
    class Absolute(gk.Task):
        def losses(self, model, batch):
            return (model(batch[0]).squeeze(1) - batch[1]).abs()

    torch.manual_seed(3)
    store, net = gk.open(tmp_path), nn.Linear(3, 1)
    data = {s: (torch.randn(n, 3), torch.randn(n)) for s, n in (("train", 9), ("test", 4))}
    for split, batch in data.items():
        gk.capture(store, net, [batch], task=Absolute(), split=split, progress=False)
    x, g = (
        torch.cat([data[s][0], torch.ones(len(data[s][1]), 1)], 1)
        * (net(data[s][0]).squeeze(1) - data[s][1]).sign().unsqueeze(1).detach()
        for s in ("train", "test")
    )
    lam = x.square().sum(1).mean()
    expected = g @ torch.linalg.inv(x.T @ x + lam * torch.eye(4)) @ x.T
    assert close(gk.attribute(store).numpy(), expected.numpy())
    with raises(AttributionError, "attribute.q_without_margins"):
        gk.attribute(store, q=np.full(9, 0.5))


def test_gradients_that_are_all_zero_are_an_error(tmp_path):
    store, net = gk.open(tmp_path), nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.zero_(), net.bias.zero_()
    flat = nn.Sequential(net, nn.ReLU(), nn.Linear(1, 2))
    with torch.no_grad():
        flat[2].weight.zero_(), flat[2].bias.zero_()
    data = {s: (torch.zeros(n, 3), torch.arange(n) % 2) for s, n in (("train", 5), ("test", 2))}
    for split, batch in data.items():
        gk.capture(store, flat, [batch], task=gk.Classification(), split=split, progress=False)
    with raises(AttributionError, "attribute.zero_gradients"):
        gk.attribute(store, layers="0")


def test_auto_takes_what_predicts_the_outcomes_of_subsets_best(world):
    store, _ = world
    rng = np.random.default_rng(0)
    masks = rng.random((60, ROWS)) < 0.5
    target = gk.attribute(store, damping=10.0).numpy()
    outcomes = masks @ target.T
    scores = gk.attribute(store, damping="auto", subsets=(masks, outcomes))
    assert np.array_equal(scores.numpy(), target)
    assert "damping 10 of 0.3, 1, 3, 10" in scores.chosen
    name = "study"
    schema = gk.store.Schema(
        (
            gk.store.Array("masks", "bool", (ROWS,), kind="mask", encoding="bits"),
            gk.store.Array("margins", shape=(ASKED,), kind="data"),
        )
    )
    stored = store.rows(name, schema, num_rows=len(masks))
    for row in range(len(masks)):
        stored.put(row, {"masks": masks[row], "margins": outcomes[row].astype(np.float32)})
    second_scores = gk.attribute(store, damping="auto")
    assert np.array_equal(second_scores.numpy(), target)
    assert second_scores.chosen == scores.chosen.replace("of the passed subsets", "of study")
    for wrong, code in (
        ((masks[:5], outcomes[:5]), "attribute.few_subsets"),
        ((masks[:, :4], outcomes), "attribute.wrong_subsets"),
        ("other", "attribute.unknown_subsets"),
    ):
        with raises(AttributionError, code):
            gk.attribute(store, damping="auto", subsets=wrong)
