"""Products of gradients as Adam saw them, against autograd."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.capturing._weights import read_adam
from gradkeep.errors import AttributionError


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    for _ in range(4):
        adam.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adam.step()
    for split, some in (("train", slice(0, 7)), ("test", slice(7, 10))):
        gk.capture(
            tmp_path,
            model,
            [(x[some], y[some])],
            task=gk.Classification(),
            split=split,
            progress=False,
        )
    return tmp_path, model, adam, x, y


def test_scores_are_those_of_autograd(trained):
    store, model, adam, x, y = trained
    scores = gk.attribute(store, method="adam", state=read_adam(adam.state_dict(), model))
    rows, roots = [], []
    for at in range(10):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[at : at + 1]), y[at : at + 1]).backward()
        rows.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    for parameter in model.parameters():
        state = adam.state[parameter]
        second = state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))
        roots.append((second.sqrt() + 1e-8).flatten())
    whole = torch.stack(rows)
    expected = ((whole[7:] / torch.cat(roots)) @ whole[:7].t()).numpy()
    np.testing.assert_allclose(
        scores.numpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )
    parts = gk.attribute(
        store, method="adam", state=read_adam(adam.state_dict(), model), per_layer=True
    )
    np.testing.assert_allclose(parts.per_layer.sum(0), scores.numpy(), rtol=1e-4, atol=1e-4)


def test_a_state_that_is_missing_or_of_another_model_is_refused(trained):
    store, *_ = trained
    with raises(AttributionError, "attribute.no_adam_state"):
        gk.attribute(store, method="adam")
    other = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    adam = torch.optim.AdamW(other.parameters())
    other(torch.randn(1, 6)).sum().backward()
    adam.step()
    with pytest.raises(AttributionError, match="no second moments for"):
        gk.attribute(store, method="adam", state=read_adam(adam.state_dict(), other))
