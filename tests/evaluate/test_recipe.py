"""Recipes: pairs of arrays for own trainings, and regressions."""

import numpy as np
import pytest
import torch

from gradkeep import evaluate
from gradkeep.datamodels import Training


def own_training(subset, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in torch.utils.data.DataLoader(subset, batch_size=5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_an_own_training_takes_a_pair_of_arrays(tmp_path, kind):
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    recipe = evaluate.Recipe((kind(x), kind(y)), (x[:3], y[:3]), own_training)
    truth = evaluate.ground_truth(tmp_path, recipe, subsets=10, workers=0)
    assert truth.outputs.shape == (10, 2, 3)


def linear():
    return torch.nn.Linear(4, 1)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_regression_is_trained_and_its_squared_errors_recorded(tmp_path, stacked):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    training = Training(linear, epochs=100, batch_size=8, lr=0.1)
    recipe = evaluate.Recipe((x, y), (x[:5], y[:5] + 1), training)
    truth = evaluate.ground_truth(tmp_path, recipe, subsets=10, stacked=stacked, workers=0)
    # The targets of the queries are 1 above what is learned; larger outputs are better answers.
    np.testing.assert_allclose(truth.outputs, -1, atol=0.02)
