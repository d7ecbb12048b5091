"""Scores of a regression are about the query's loss: a positive row lowers it, in every method."""

import numpy as np
import pytest
import torch
from raises import raises
from scipy.stats import spearmanr
from torch import nn

import gradkeep as gk
from gradkeep.errors import AttributionError

ROWS, ASKED, RIDGE = 40, 12, 3.0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A ridge regression at its optimum, and the losses of queries without each row."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS + ASKED, 4, generator=draw, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2, 0.5, 0], dtype=torch.float64)
    y = y + torch.randn(len(x), generator=draw, dtype=torch.float64)

    def fitted(rows):
        a, b = x[:ROWS][rows], y[:ROWS][rows]
        return torch.linalg.solve(a.T @ a + RIDGE * torch.eye(4, dtype=x.dtype), a.T @ b)

    def losses(weights):
        return 0.5 * (x[ROWS:] @ weights - y[ROWS:]).square()

    every = torch.arange(ROWS)
    whole = losses(fitted(every))
    removed = torch.stack([losses(fitted(every[every != row])) for row in range(ROWS)], 1)
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = fitted(every).float()[None]
    store = gk.open(tmp_path_factory.mktemp("store"))
    for split, part in (("train", slice(0, ROWS)), ("test", slice(ROWS, None))):
        data = [(x[part].float(), y[part].float())]
        gk.capture(store, model, data, task=gk.Regression(), split=split, progress=False)
    return store, (removed - whole[:, None]).numpy()


METHODS = {
    "kernel": {},
    "trak": {"dim": 64},
    "ekfac": {},
    "dot": {},
    "kfac": {},
    "influence": {"curvature": "fisher"},
    "tracin": {"lrs": [0.1]},
    "datainf": {},
    "logra": {"rank": 4},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_row_with_a_positive_score_lowers_the_loss_of_the_query(world, method):
    store, harm_of_removal = world
    scores = gk.attribute(store, method=method, **METHODS[method]).values
    for query in range(ASKED):
        assert spearmanr(scores[query], harm_of_removal[query]).statistic > 0.8


def test_the_default_method_agrees_with_removal_in_size(world):
    store, harm_of_removal = world
    scores = np.asarray(gk.attribute(store, damping=1e-3).values)
    slope = (scores * harm_of_removal).sum() / np.square(scores).sum()
    assert 0.8 < slope < 1.25


@pytest.mark.parametrize("method", ["kernel", "trak"])
def test_scores_of_outputs_are_made_on_request_and_say_so(world, method):
    store, _ = world
    losses, outputs = (
        gk.attribute(store, method=method, target=target) for target in ("loss", "output")
    )
    slope = store.read(gk.store.CaptureKey("final", "test")).column("slope")
    assert np.allclose(losses.values, -slope[:, None] * outputs.values, rtol=1e-4, atol=1e-6)
    assert "output" in outputs.scale
    assert "not its loss" not in losses.scale
    with pytest.raises(AttributionError):
        gk.attribute(store, method=method, target="label")


def test_scores_of_outputs_need_outputs(tmp_path):
    store, model = gk.open(tmp_path), nn.Linear(3, 2)
    for split in ("train", "test"):
        data = [(torch.randn(4, 3), torch.randn(4, 2))]
        gk.capture(store, model, data, task=gk.Regression(), split=split, progress=False)
    assert gk.attribute(store).shape == (4, 4)
    with raises(AttributionError, "attribute.no_outputs", fix="target"):
        gk.attribute(store, target="output")
