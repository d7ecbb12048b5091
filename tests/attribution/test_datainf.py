"""`datainf` against explicit inverses in float64."""

import tempfile

import numpy as np
import pytest
import torch
from autograd_reference import per_sample_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.errors import AttributionError

MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(27, 3)), (1, 5, 5)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), (4,)),
    "tokens": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(15, 3)), (3, 4)),
    "words": (lambda: nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(12, 3)), None),
}


def world(kind, *, seed=0, rows=8):
    torch.manual_seed(seed)
    make, shape = MODELS[kind]
    model, store, data = make(), gk.open(tempfile.mkdtemp()), {}
    for split, count in (("train", rows), ("test", 3)):
        x = torch.randint(6, (count, 4)) if shape is None else torch.randn(count, *shape)
        data[split] = (x, torch.arange(count) % 3)
        task = gk.Classification()
        gk.capture(store, model, [data[split]], task=task, split=split, progress=False)
    return store, model.double(), data


def dense(model, batch, layer):
    def losses(m, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    x = batch[0].double() if batch[0].is_floating_point() else batch[0]
    found = per_sample_gradients(model, losses, (x, batch[1]))
    return torch.cat([v.flatten(1) for k, v in found.items() if k.startswith(layer)], 1).numpy()


def by_inverses(q, n, damping):
    """Scores by the mean of explicit inverses."""
    eye = np.eye(n.shape[1])
    return q @ np.mean([np.linalg.inv(np.outer(g, g) + damping * eye) for g in n], 0) @ n.T


@settings(max_examples=8)
@given(kind=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 999), relative=st.floats(0.05, 5))
def test_scores_are_those_of_the_mean_inverse(kind, seed, relative):
    store, model, data = world(kind, seed=seed)
    found = gk.attribute(store, method="datainf", damping=relative, per_layer=True)
    for layer, part in zip(found.layers, found.per_layer, strict=True):
        q, n = (dense(model, data[s], layer) for s in ("test", "train"))
        wanted = by_inverses(q, n, relative * np.square(n).mean())
        assert np.abs(part - wanted).max() <= 1e-3 * np.abs(wanted).max()
    assert np.allclose(found.numpy(), found.per_layer.sum(0), rtol=1e-4, atol=1e-4)


def test_damping_can_be_absolute_and_must_be_above_zero():
    store, model, data = world("mlp")
    found = gk.attribute(store, method="datainf", absolute_damping=0.03, layers="0").numpy()
    q, n = (dense(model, data[s], "0") for s in ("test", "train"))
    wanted = by_inverses(q, n, 0.03)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()
    with pytest.raises(AttributionError, match="damping"):
        gk.attribute(store, method="datainf", damping=-0.1)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_the_byte_budget_changes_nothing(kind):
    store, *_ = world(kind, rows=400)  # more products than are made at a time
    one = gk.attribute(store, method="datainf").numpy()
    other = gk.attribute(store, method="datainf", memory_budget="3MiB").numpy()
    assert np.allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(one).max())


def test_gradients_that_are_all_zero(monkeypatch):
    store, *_ = world("mlp")
    kind = type(gk.gradients(store, split="train"))
    monkeypatch.setattr(kind, "slopes", lambda self: torch.zeros(len(self)))
    with pytest.raises(AttributionError, match="are zero"):
        gk.attribute(store, method="datainf")
