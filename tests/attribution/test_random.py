"""`random`: numbers that depend on nothing but ids and seed."""

import numpy as np
import torch
from torch import nn

import gradkeep as gk


def store_with(folder, ids):
    store, model = gk.open(folder), nn.Linear(2, 2)
    for split, stored in (("train", ids), ("test", [4, 2, 9])):
        batch = (torch.randn(len(stored), 2), torch.zeros(len(stored), dtype=torch.long))
        gk.capture(
            store,
            model,
            [batch],
            task=gk.Classification(),
            split=split,
            ids=stored,
            progress=False,
        )
    return store


def test_scores_are_by_ids_alone(tmp_path):
    torch.manual_seed(0)
    many = store_with(tmp_path / "many", list(range(1000)))
    few = store_with(tmp_path / "few", [900, 3, 77])
    one, other = gk.attribute(many, method="random"), gk.attribute(few, method="random")
    assert np.array_equal(one.numpy()[:, [900, 3, 77]], other.numpy())
    some = gk.attribute(many, method="random", ids=[9])
    assert np.array_equal(some.numpy()[0], one.of(9))
    second_scores = gk.attribute(many, method="random", seed=1).numpy()
    assert abs(np.corrcoef(second_scores.ravel(), one.numpy().ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(one.numpy())[0, 1]) < 0.15


def test_scores_are_uniform(tmp_path):
    torch.manual_seed(0)
    values = np.sort(gk.attribute(store_with(tmp_path, list(range(4000))), method="random").of(2))
    assert np.abs(values - np.linspace(-1, 1, 4000)).max() < 0.06
