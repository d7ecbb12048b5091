"""`logra` against explicit matrices in float64."""

import tempfile

import numpy as np
import pytest
import torch
from autograd_reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.attribution._projections import TwoSided, two_sided
from gradkeep.errors import AttributionError, BudgetError


def world(*, rows, model=None, shape=(6,)):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    store, data = gk.open(tempfile.mkdtemp()), {}
    for split, count in (("train", rows), ("test", 4)):
        data[split] = (torch.randn(count, *shape), torch.arange(count) % 3)
        task = gk.Classification()
        gk.capture(store, model, [data[split]], task=task, split=split, progress=False)
    return store, model.double(), data


def dense(model, batch, layer):
    def losses(m, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    found = per_sample_gradients(model, losses, (batch[0].double(), batch[1]))
    return torch.cat([v.flatten(1) for k, v in found.items() if k.startswith(layer)], 1).numpy()


def influence(q, n, relative):
    fisher = n.T @ n / len(n)
    damping = relative * np.trace(fisher) / len(fisher)
    return q @ np.linalg.solve(fisher + damping * np.eye(len(fisher)), n.T)


@pytest.mark.parametrize("rows", [10, 60])  # fewer and more than numbers
def test_sides_that_are_kept_whole_give_the_whole_fisher_matrix(rows):
    store, model, data = world(rows=rows)
    found = gk.attribute(store, method="logra", rank=8, damping=0.2, per_layer=True)
    for layer, part in zip(found.layers, found.per_layer, strict=True):
        q, n = (dense(model, data[s], layer) for s in ("test", "train"))
        assert np.allclose(part, influence(q, n, 0.2), rtol=2e-3, atol=1e-3)
    assert np.allclose(found.numpy(), found.per_layer.sum(0), rtol=1e-4, atol=1e-4)
    assert "8 x 8" in found.approximate


@pytest.mark.parametrize("kind", ["linear", "conv", "tokens"])
def test_projected_gradients_are_inverted_layer_by_layer(kind):
    models = {
        "linear": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
        "conv": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)), (2, 5, 5)),
        "tokens": (nn.Sequential(nn.Linear(6, 5), nn.Flatten(), nn.Linear(20, 3)), (4, 6)),
    }
    model, shape = models[kind]
    store, *_ = world(rows=30, model=model, shape=shape)
    found = gk.attribute(store, method="logra", rank=3, damping=0.5, seed=2)
    wanted = 0
    for layer in found.layers:
        n, q = (
            two_sided(gk.gradients(store, split=s, layers=layer), TwoSided(3, 3, 2))
            for s in ("train", "test")
        )
        wanted = wanted + influence(q.double().numpy(), n.double().numpy(), 0.5)
    assert np.allclose(found.numpy(), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def test_mistakes_are_told():
    store, *_ = world(rows=9)
    with pytest.raises(AttributionError, match="damping"):
        gk.attribute(store, method="logra", damping=0)
    with pytest.raises(AttributionError, match="positive dimension"):
        gk.attribute(store, method="logra", rank=0)
    with pytest.raises(BudgetError, match="smaller rank="):
        gk.attribute(store, method="logra", rank=64, memory_budget=4000)


def test_gradients_that_are_all_zero(monkeypatch):
    store, *_ = world(rows=9)
    kind = type(gk.gradients(store, split="train"))
    monkeypatch.setattr(kind, "slopes", lambda self: torch.zeros(len(self)))
    with pytest.raises(AttributionError, match="are zero"):
        gk.attribute(store, method="logra")


def test_the_byte_budget_changes_nothing():
    store, *_ = world(rows=40)
    one = gk.attribute(store, method="logra").numpy()
    other = gk.attribute(store, method="logra", memory_budget="6MiB").numpy()
    assert np.allclose(one, other, rtol=1e-4, atol=1e-4)
