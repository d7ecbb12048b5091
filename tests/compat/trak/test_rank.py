"""Without a ridge: the default sketch of real gradients has the rank of a dense matrix."""

import logging
import re

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

from gradkeep.compat.trak import TRAKer
from gradkeep.compat.trak.projectors import BasicProjector, SketchProjector, sketch_type
from gradkeep.data import load_digits
from gradkeep.errors import AttributionError

DIGITS = load_digits()
X, Y = torch.from_numpy(DIGITS.train_images), torch.from_numpy(DIGITS.train_labels)


def trained(hidden, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[:rows]), Y[:rows]).backward()
        optimizer.step()
    return model


def featurized(model, folder, rows, dim, **options):
    t = TRAKer(
        model,
        "image_classification",
        rows,
        folder,
        device="cpu",
        proj_dim=dim,
        use_half_precision=False,
        logging_level=logging.ERROR,
        **options,
    )
    t.load_checkpoint(model.state_dict(), 0)
    t.featurize((X[:rows], Y[:rows]), num_samples=rows)
    return t


def rank(values):
    scaled = values / np.maximum(np.linalg.norm(values, axis=0), 1e-30)
    singular_values = np.linalg.svd(scaled.astype(np.float64), compute_uv=False)
    return int((singular_values > 1e-6 * singular_values[0]).sum())


@pytest.mark.parametrize(
    ("hidden", "dim"),
    # 2.4, 4.7, 9.4 and 18.8 values a number: a TensorSketch has rank 384, 509, 512 and 256.
    [(16, 512), (32, 512), (64, 512), (64, 256)],
)
def test_the_default_sketch_keeps_full_rank(tmp_path, hidden, dim):
    model = trained(hidden, 800)
    t = featurized(model, tmp_path / "sketch", 800, dim, lambda_reg=0.0)
    assert rank(np.array(t.saver.current_store["grads"])) == dim
    t.finalize_features()
    t.start_scoring_checkpoint("e", model.state_dict(), 0, 5)
    t.score((X[-5:], Y[-5:]), num_samples=5)
    assert np.isfinite(t.finalize_scores("e")).all()


def test_what_no_projection_can_keep_fails_when_features_are_finalized(tmp_path):
    model = nn.Linear(64, 10)  # 65 x 10 values; ten outputs have nine independent gradients
    size = sum(parameter.numel() for parameter in model.parameters())
    dense = BasicProjector(size, 620, 0, "normal")
    for name, projector in (("dense", dense), ("sketch", None)):
        t = featurized(model, tmp_path / name, 800, 620, lambda_reg=0.0, projector=projector)
        with raises(AttributionError, "compat.singular") as caught:
            t.finalize_features()
        assert re.search(r"of rank 5\d\d", caught.value.found)
        assert t.saver.model_ids[0] == {"is_featurized": 1, "is_finalized": 0}
        t.finalize_features(lambda_reg=None)


def test_which_sketch_is_taken():
    assert sketch_type(10_000, 2048, 500) == "tensor-sketch"  # no rank to keep: k > n
    assert sketch_type(10_000_000, 2048, 50_000) == "tensor-sketch"
    assert sketch_type(10_000, 2048, 50_000) == "sjlt"
    assert sketch_type(30, 2, 40) == "rademacher"


def test_what_was_begun_with_a_tensor_sketch_goes_on_with_it(tmp_path):
    model = nn.Linear(64, 10)
    earlier = SketchProjector(650, 128)  # as it was whatever the number of rows
    featurized(model, tmp_path, 200, 128, projector=earlier)
    t = featurized(model, tmp_path, 200, 128)
    assert t.projector.proj_type == "tensor-sketch"
    assert t.saver.model_ids[0]["is_featurized"] == 1
    assert featurized(model, tmp_path / "new", 200, 128).projector.proj_type == "sjlt"
