"""Maps of rows: places are principal components, clusters and their opposition what is planted."""

import numpy as np
import pytest
import torch

import gradkeep as gk
from gradkeep.datamodels import fit
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._groups import map_rows, map_targets


def test_targets_that_depend_on_the_same_rows_lie_together_and_opposites_oppose():
    rng = np.random.default_rng(0)
    masks = rng.random((400, 30)) < 0.5
    one, other = rng.standard_normal((2, 30))
    kinds = np.arange(24) % 3
    weights = np.stack([(one, -one, other)[kind] for kind in kinds])
    actual = fit(
        masks, masks @ weights.T + 0.1 * rng.standard_normal((400, 24)), penalty="ridge", lam=1.0
    )
    drawn = map_targets(actual, clusters=3)
    for kind in range(3):
        assert len(np.unique(drawn.clusters[kinds == kind])) == 1
    pair = drawn.opposing[0]
    assert {pair.first, pair.second} == {drawn.clusters[0], drawn.clusters[1]}
    assert pair.cosine < -0.9


def test_places_are_the_principal_components_of_directions(tmp_path):
    model = torch.nn.Linear(6, 3)
    data = [(torch.randn(40, 6), torch.arange(40) % 3)]
    store = gk.open(tmp_path)
    gk.capture(store, model, data, task=gk.Classification(), split="train", progress=False)
    drawn = map_rows(store, clusters=4)
    stored = gk.gradients(store, split="train")
    whole = gk.project(stored, gk.Projection(dim=256)).double().numpy()
    unit = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    remaining, strength, _ = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    expected = remaining[:, :2] * strength[:2]
    assert np.allclose(np.abs(drawn.places), np.abs(expected), atol=1e-4)
    assert drawn.share[0] == pytest.approx(strength[0] ** 2 / (strength**2).sum(), rel=1e-3)
    some = map_rows(store, clusters=2, most=10)
    assert (len(some), some.total) == (10, 40)
    rows = np.flatnonzero(np.isin(stored.ids, some.ids))
    picked = gk.project(stored, gk.Projection(dim=256), rows=rows)
    assert torch.allclose(picked.double(), torch.from_numpy(whole[rows]), atol=1e-5)


def test_a_map_needs_rows(tmp_path):
    gk.open(tmp_path)
    with pytest.raises(gk.GradkeepError):
        map_rows(tmp_path)
    with pytest.raises(EvaluationError):
        map_rows(tmp_path, clusters=0)
