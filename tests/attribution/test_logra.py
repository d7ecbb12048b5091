"""`logra` against explicit matrices in float64."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.curvature._project import TwoSided, two_sided
from gradkeep.errors import AttributionError, BudgetError


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def influence(q, n, relative):
    fisher = n.T @ n / len(n)
    damping = relative * np.trace(fisher) / len(fisher)
    return q @ np.linalg.solve(fisher + damping * np.eye(len(fisher)), n.T)


@pytest.mark.parametrize("rows", [10, 60])  # fewer and more than numbers
def test_sides_that_are_kept_whole_give_the_whole_fisher_matrix(make_world, rows):
    world = make_world(mlp, (6,), rows=rows, queries=4)
    store = world.store
    scores = gk.attribute(store, method="logra", rank=8, damping=0.2, per_layer=True)
    for layer, part in zip(scores.layers, scores.per_layer, strict=True):
        q, n = (world.gradients(s, layer=layer).numpy() for s in ("test", "train"))
        assert np.allclose(part, influence(q, n, 0.2), rtol=2e-3, atol=1e-3)
    assert np.allclose(scores.numpy(), scores.per_layer.sum(0), rtol=1e-4, atol=1e-4)
    assert "8 x 8" in scores.approximate


@pytest.mark.parametrize("kind", ["linear", "conv", "tokens"])
def test_projected_gradients_are_inverted_layer_by_layer(make_world, kind):
    models = {
        "linear": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
        "conv": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)), (2, 5, 5)),
        "tokens": (nn.Sequential(nn.Linear(6, 5), nn.Flatten(), nn.Linear(20, 3)), (4, 6)),
    }
    model, shape = models[kind]
    store = make_world(lambda: model, shape, rows=30, queries=4).store
    scores = gk.attribute(store, method="logra", rank=3, damping=0.5, seed=2)
    expected = 0
    for layer in scores.layers:
        n, q = (
            two_sided(gk.gradients(store, split=s, layers=layer), TwoSided(3, 3, 2))
            for s in ("train", "test")
        )
        expected = expected + influence(q.double().numpy(), n.double().numpy(), 0.5)
    assert np.allclose(scores.numpy(), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_mistakes_are_told(make_world):
    store = make_world(mlp, (6,), rows=9, queries=4).store
    with pytest.raises(AttributionError, match="damping"):
        gk.attribute(store, method="logra", damping=0)
    with pytest.raises(AttributionError, match="positive dimension"):
        gk.attribute(store, method="logra", rank=0)
    with raises(BudgetError, "budget.projections", fix="smaller rank="):
        gk.attribute(store, method="logra", rank=64, memory_budget=4000)


def test_gradients_that_are_all_zero(make_world, monkeypatch):
    store = make_world(mlp, (6,), rows=9, queries=4).store
    kind = type(gk.gradients(store, split="train"))
    monkeypatch.setattr(kind, "slopes", lambda self: torch.zeros(len(self)))
    with raises(AttributionError, "attribute.zero_gradients"):
        gk.attribute(store, method="logra")


def test_the_byte_budget_changes_nothing(make_world):
    store = make_world(mlp, (6,), rows=40, queries=4).store
    one = gk.attribute(store, method="logra").numpy()
    other = gk.attribute(store, method="logra", memory_budget="6MiB").numpy()
    assert np.allclose(one, other, rtol=1e-4, atol=1e-4)
