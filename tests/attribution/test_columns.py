"""`loss`, `label-match`, `similarity`, `knn-shapley`: from values that captures keep."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.attribution.scorers._baselines import shapley
from gradkeep.errors import AttributionError


class Squared(gk.Task):
    def losses(self, model, batch):
        return model(batch[0]).square().sum(1)


@pytest.fixture(scope="module")
def world(make_world):
    """A store with embeddings, and the model and data."""
    world = make_world(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        (3,),
        rows=9,
        queries=4,
        twins=[(5, 2)],
        checkpoints=("a", "b"),
        embeddings=["0", "1"],
    )
    for split, batch in world.data.items():
        gk.capture(
            world.store,
            world.model,
            [batch],
            task=Squared(),
            split=split,
            name="plain",
            progress=False,
        )
    return world.store, world.model, world.states, world.data


def embedded(model, state, x, upto):
    model.load_state_dict(state)
    return model[: upto + 1](x).detach().double()


def test_loss_is_the_mean_over_checkpoints_and_lowers(world):
    store, model, states, data = world
    expected = np.zeros(9)
    for state in states.values():
        model.load_state_dict(state)
        logits = model(data["train"][0])
        losses = nn.functional.cross_entropy(logits, data["train"][1], reduction="none")
        expected -= losses.detach().numpy() / 2
    scores = gk.attribute(store, method="loss")
    assert scores.shape == (1, 9)
    assert np.allclose(scores.numpy()[0], expected, rtol=1e-5)


def test_labels_match_or_do_not(world):
    store, _, _, data = world
    scores = gk.attribute(store, method="label-match", checkpoints="a", ids=[3, 1]).numpy()
    expected = data["test"][1][[3, 1], None] == data["train"][1]
    assert np.array_equal(scores, expected.float().numpy())


@pytest.mark.parametrize(("layer", "upto"), [(None, 1), ("0", 0), ("1", 1)])
def test_similarity_is_the_cosine_of_embeddings(world, layer, upto):
    store, model, states, data = world
    scores = gk.attribute(store, method="similarity", checkpoints="b", layer=layer).numpy()
    q, n = (embedded(model, states["b"], data[s][0], upto) for s in ("test", "train"))
    expected = (q @ n.T) / q.norm(dim=1)[:, None] / n.norm(dim=1)
    assert np.allclose(scores, expected, atol=1e-5)


def vote(near, agree, k):
    """Return the value of the k nearest of some rows: the share of k that agrees."""
    order = np.argsort(near, kind="stable")[:k]
    return sum(agree[order]) / k


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_shapley_values_are_means_over_all_orders(k):
    rng = np.random.default_rng(k)
    near, agree = rng.permutation(6) * 1.0, rng.integers(0, 2, 6) * 1.0
    expected = np.zeros(6)
    orders = list(permutations(range(6)))
    for order in orders:
        for at, row in enumerate(order):
            before, after = list(order[:at]), list(order[: at + 1])
            gain = vote(near[after], agree[after], k) - vote(near[before], agree[before], k)
            expected[row] += gain / len(orders)
    actual = shapley(torch.tensor(near)[None], torch.tensor(agree)[None], k=k)[0]
    assert np.allclose(actual, expected)


def test_knn_shapley_sorts_by_distance_of_embeddings(world):
    store, model, states, data = world
    scores = gk.attribute(store, method="knn-shapley", checkpoints="a", k=3, layer="0").numpy()
    q, n = (embedded(model, states["a"], data[s][0], 0) for s in ("test", "train"))
    agree = (data["test"][1][:, None] == data["train"][1]).double()
    expected = shapley(torch.cdist(q, n), agree, k=3)
    assert np.allclose(scores, expected, atol=1e-6)
    near = torch.cdist(q, n).argsort(dim=1, stable=True)[:, :3]
    assert np.allclose(scores.sum(1), agree.gather(1, near).mean(1), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        (
            {"method": "similarity", "layer": "7"},
            "attribute.missing_embeddings",
            r"embeddings of 0, 1\b.*\s.*embeddings=\['7'\]",
        ),
        (
            {"method": "similarity", "name": "plain"},
            "attribute.missing_embeddings",
            "no embeddings",
        ),
        ({"method": "knn-shapley", "name": "plain"}, "attribute.missing_embeddings", "embeddings="),
        ({"method": "label-match", "name": "plain"}, "attribute.missing_column", "needs the label"),
        ({"method": "knn-shapley", "k": 0}, "argument.invalid", "^k must be"),
        ({"method": "knn-shapley", "kk": 0}, "attribute.unknown_option", "'kk'"),
    ],
)
def test_mistakes_are_told(world, options, code, match):
    with pytest.raises(AttributionError, match=match) as caught:
        gk.attribute(world[0], **options)
    assert caught.value.code == code
