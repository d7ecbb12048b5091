"""Scores: every method against brute force, and clear errors."""

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.errors import AttributionError

LRS = {"epoch-1": 0.1, "epoch-2": 0.05}


@pytest.fixture(scope="module")
def world(make_world):
    """A store with two checkpoints, and the true gradients at each."""
    reported = {name: {"step": at, "lr": lr} for at, (name, lr) in enumerate(LRS.items())}
    world = make_world(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        (4,),
        rows=12,
        checkpoints=reported,
    )
    truth = {(s, n): world.gradients(s, at=n) for s in ("train", "test") for n in LRS}
    return world.store, truth


def close(actual, expected):
    return np.allclose(actual, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_dot_and_cos_are_products_and_angles(world):
    store, truth = world
    a, b = truth["test", "epoch-2"], truth["train", "epoch-2"]
    dot = gk.attribute(store, method="dot", checkpoints="epoch-2")
    assert close(dot.numpy(), a @ b.T)
    assert dot.exact
    assert "positive helps" in repr(dot)
    cos = gk.attribute(store, method="cos", checkpoints="epoch-2")
    assert close(cos.numpy(), (a @ b.T) / a.norm(dim=1)[:, None] / b.norm(dim=1))


def test_tracin_sums_over_checkpoints_with_their_learning_rates(world):
    store, truth = world
    expected = sum(lr * truth["test", n] @ truth["train", n].T for n, lr in LRS.items())
    assert close(gk.attribute(store, method="tracin").numpy(), expected)
    flat = sum(truth["test", n] @ truth["train", n].T for n in LRS)
    assert close(gk.attribute(store, method="tracin", lrs=[1, 1]).numpy(), flat)


def test_self_influence_is_the_squared_length(world):
    store, truth = world
    expected = sum(truth["train", n].square().sum(1) for n in LRS)
    assert close(gk.attribute(store, method="self").numpy()[0], expected)


def test_a_positive_score_lowers_the_loss_of_the_query(tmp_path):
    torch.manual_seed(1)
    model, store = nn.Linear(3, 2), gk.open(tmp_path)
    train, test = (torch.randn(6, 3), torch.arange(6) % 2), (torch.randn(4, 3), torch.arange(4) % 2)
    for split, batch in (("train", train), ("test", test)):
        gk.capture(store, model, [batch], task=gk.Classification(), split=split, progress=False)
    scores = gk.attribute(store, method="dot").numpy()

    def losses():
        return nn.functional.cross_entropy(model(test[0]), test[1], reduction="none")

    before = losses().detach()
    for row in range(6):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        loss = nn.functional.cross_entropy(model(train[0][row : row + 1]), train[1][row : row + 1])
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            p.data -= 1e-3 * g
        fell = (before - losses().detach()).numpy()
        model.load_state_dict(state)
        assert ((fell > 0) == (scores[:, row] > 0)).all()


def test_top_and_bottom_are_ranked_by_id(world):
    store, _ = world
    scores = gk.attribute(store, checkpoints="epoch-1")
    row = scores.of(3)
    assert scores.top(3, query=3).ids.tolist() == np.argsort(-row)[:3].tolist()
    ids, values = scores.bottom(1, query=3)
    assert values[0] == row.min()
    assert ids[0] == row.argmin()
    with pytest.raises(AttributionError, match="no scores of query 77"):
        scores.top(3, query=77)


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        ({"method": "trakk"}, "attribute.unknown_method", "'trakk'"),
        ({"method": "dot"}, "attribute.several_checkpoints", "method='tracin'"),
        ({"method": "dot", "checkpoint": "epoch-1"}, "attribute.unknown_option", "'checkpoint'"),
        ({"method": "dot", "refine": "whole"}, "attribute.refine", "gk.query.top"),
        ({"damp": 1.0}, "attribute.unknown_option", "Did you mean damping"),
        ({"damping": 0.0}, "attribute.damping", "damping must be positive"),
        ({"damping": "auto"}, "attribute.no_subsets", "subsets="),
        ({"weight": "p"}, "argument.invalid", "^weight must be"),
        (
            {"method": "cos", "checkpoints": "epoch-1", "per_layer": True},
            "attribute.not_per_layer",
            "cos",
        ),
        ({"method": "trak", "ridge": 0}, "attribute.singular", "Omit ridge"),
        ({"ids": []}, "attribute.no_queries", "ids="),
        ({"queries": "holdout"}, "attribute.no_captures", "split='holdout'"),
        ({"method": "tracin", "lrs": [1.0]}, "attribute.wrong_lrs", "1 learning rates"),
    ],
)
def test_mistakes_are_told(world, options, code, match):
    with pytest.raises(AttributionError, match=match) as caught:
        gk.attribute(world[0], **options)
    assert caught.value.code == code
