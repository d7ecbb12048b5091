"""Captures without gradients: what they keep, what they cost in bytes, what they refuse."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkeep as gk
from gradkeep.errors import CaptureError, GradkeepError, SchemaMismatchError

KEY = gk.store.CaptureKey("final", "train")
ROWS = 400


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 3))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))


def capture(store, model, data, **options):
    options = {"task": gk.Classification(), "split": "train", "progress": False} | options
    return gk.capture(store, model, DataLoader(data, batch_size=64), keep="losses", **options)


def test_losses_labels_and_probabilities_are_kept_in_few_bytes(store, model, data):
    report = capture(store, model, data, embeddings=["2"])
    block = store.read(KEY)
    with torch.no_grad():
        logits = model(data.tensors[0])
    losses = nn.functional.cross_entropy(logits, data.tensors[1], reduction="none")
    assert np.allclose(block.column("loss"), losses, rtol=1e-4, atol=1e-6)
    assert np.allclose(block.column("probabilities"), logits.softmax(1), rtol=1e-3)
    assert (block.column("label") == data.tensors[1].numpy()).all()
    assert (block.column("predicted") == logits.argmax(1).numpy()).all()
    assert np.allclose(block.column("embedding.2"), logits, atol=1e-6)
    assert report.bytes < 100 * ROWS
    assert report.layers == ()
    assert "the losses of 400 rows" in str(report)
    assert gk.suspects(store).ids[0] == int(losses.argmax())


def test_no_gradient_is_computed(store, model, data):
    class Watching(gk.Classification):
        def measure(self, model, batch):
            assert not torch.is_grad_enabled()
            return super().measure(model, batch)

    model[0].weight.grad = torch.ones_like(model[0].weight)
    capture(store, model, data, task=Watching())
    assert (model[0].weight.grad == 1).all()


def test_it_is_resumed_compared_and_made_again_like_any_capture(store, model, data):
    capture(store, model, data)
    assert capture(store, model, data).reused_rows == ROWS
    x, y = data.tensors
    with raises(CaptureError, "capture.rows_changed", mentions="sample 399 "):
        capture(store, model, TensorDataset(x, torch.cat([y[:-1], (y[-1:] + 1) % 3])))
    model[1] = nn.GELU()
    with raises(CaptureError, "capture.function_changed"):
        capture(store, model, data)


def test_gradients_are_not_mixed_with_losses(store, model, data):
    capture(store, model, data)
    with pytest.raises(SchemaMismatchError):
        gk.capture(store, model, DataLoader(data, 64), task=gk.Classification(), split="train")
    with pytest.raises(GradkeepError, match="holds no gradients"):
        gk.gradients(store, split="train")


def test_other_tasks_keep_their_losses(store, data):
    x, y = data.tensors
    loader = DataLoader(TensorDataset(x, y.float()), 64)
    gk.capture(store, nn.Linear(4, 1), loader, task=gk.Regression(), split="train", keep="losses")
    assert "probabilities" not in store.read(KEY).names
    assert gk.suspects(store).noise is None
    gk.capture(
        store,
        nn.Linear(4, 1),
        DataLoader(data, 64),
        task=gk.Classification(),
        split="two",
        keep="losses",
        checkpoints="other",
    )
    assert store.read(gk.store.CaptureKey("other", "two")).column("probabilities").shape == (
        ROWS,
        2,
    )


def test_a_loss_that_is_no_number_is_told(store, model, data):
    x, y = (part.clone() for part in data.tensors)
    x[70] = torch.nan
    with raises(CaptureError, "capture.not_finite", mentions="the loss of sample 70 "):
        capture(store, model, TensorDataset(x, y))
