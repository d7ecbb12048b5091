"""`datainf` against explicit inverses in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.attribution.scorers import _datainf
from gradkeep.errors import AttributionError

MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(27, 3)), (1, 5, 5)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), (4,)),
    "tokens": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(15, 3)), (3, 4)),
    "words": (lambda: nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(12, 3)), 6),
}
SMALL = {"rows": 8, "queries": 3, "length": 4}


def by_inverses(q, n, damping):
    """Scores by the mean of explicit inverses."""
    eye = np.eye(n.shape[1])
    return q @ np.mean([np.linalg.inv(np.outer(g, g) + damping * eye) for g in n], 0) @ n.T


@settings(max_examples=8)
@given(kind=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 999), relative=st.floats(0.05, 5))
def test_scores_are_those_of_the_mean_inverse(make_world, kind, seed, relative):
    world = make_world(*MODELS[kind], seed=seed, **SMALL)
    store = world.store
    scores = gk.attribute(store, method="datainf", damping=relative, per_layer=True)
    for layer, part in zip(scores.layers, scores.per_layer, strict=True):
        q, n = (world.gradients(s, layer=layer).numpy() for s in ("test", "train"))
        expected = by_inverses(q, n, relative * np.square(n).mean())
        assert np.abs(part - expected).max() <= 1e-3 * np.abs(expected).max()
    assert np.allclose(scores.numpy(), scores.per_layer.sum(0), rtol=1e-4, atol=1e-4)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 999),
    by_sums=st.booleans(),
)
def test_either_way_to_multiply_all_rows_gives_them(make_world, kind, seed, by_sums):
    store = make_world(*MODELS[kind], seed=seed, **SMALL).store
    expected = gk.attribute(store, method="datainf").numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_datainf, "_sums_cost_less", lambda *_: by_sums)
        scores = gk.attribute(store, method="datainf").numpy()
    assert np.abs(scores - expected).max() <= 1e-5 * np.abs(expected).max()


def test_of_many_rows_no_products_of_all_pairs_are_made(make_world, monkeypatch):
    store = make_world(*MODELS["mlp"], rows=400, queries=2).store
    expected = gk.attribute(store, method="datainf").numpy()
    monkeypatch.delattr(_datainf, "_subtract_by_kernel")
    assert np.array_equal(gk.attribute(store, method="datainf").numpy(), expected)


def test_damping_can_be_absolute_and_must_be_above_zero(make_world):
    world = make_world(*MODELS["mlp"], **SMALL)
    store = world.store
    scores = gk.attribute(store, method="datainf", absolute_damping=0.03, layers="0").numpy()
    q, n = (world.gradients(s, layer="0").numpy() for s in ("test", "train"))
    expected = by_inverses(q, n, 0.03)
    assert np.abs(scores - expected).max() <= 1e-3 * np.abs(expected).max()
    with pytest.raises(AttributionError, match="damping"):
        gk.attribute(store, method="datainf", damping=-0.1)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_the_byte_budget_changes_nothing(make_world, kind):
    store = make_world(*MODELS[kind], rows=400).store  # more products than are made at a time
    one = gk.attribute(store, method="datainf").numpy()
    other = gk.attribute(store, method="datainf", memory_budget="3MiB").numpy()
    assert np.allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(one).max())


def test_gradients_that_are_all_zero(make_world, monkeypatch):
    store = make_world(*MODELS["mlp"], **SMALL).store
    kind = type(gk.gradients(store, split="train"))
    monkeypatch.setattr(kind, "slopes", lambda self: torch.zeros(len(self)))
    with raises(AttributionError, "attribute.zero_gradients"):
        gk.attribute(store, method="datainf")
