"""Labels that are drawn from the model: the same in every batch, by the model's probabilities."""

import numpy as np
import pytest
import torch
from torch import nn

import gradkeep as gk
from gradkeep.errors import CaptureError


def drawn(model, batch, **options):
    return gk.Classification(labels="sampled", **options).measure(model, batch).labels


def test_a_sample_has_the_same_label_in_every_batch():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(50, 4), torch.arange(50) % 3
    whole = drawn(model, (x, y))
    parts = [drawn(model, (x[i : i + 7], y[i : i + 7])) for i in range(0, 50, 7)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, y)
    assert not torch.equal(whole, drawn(model, (x, y), seed=1))


@pytest.mark.parametrize("single", [False, True])
def test_labels_are_as_frequent_as_they_are_probable(single):
    torch.manual_seed(0)
    model = nn.Linear(1, 1 if single else 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.8]) if single else torch.tensor([0.1, 1.0, -1.0]))
    x = torch.arange(4000.0).unsqueeze(1)
    result = drawn(model, (x, torch.zeros(4000, dtype=torch.long)))
    expected = model.bias.softmax(0) if not single else torch.tensor([-0.4, 0.4]).softmax(0)
    shares = torch.bincount(result, minlength=len(expected)) / 4000
    assert torch.allclose(shares, expected.detach(), atol=0.03)


def test_losses_and_gradients_are_those_of_the_drawn_labels(tmp_path):
    torch.manual_seed(0)
    model, store = nn.Linear(4, 3), gk.open(tmp_path)
    batch = (torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    task = gk.Classification(labels="sampled")
    gk.capture(store, model, [batch], task=task, split="train", name="sampled", progress=False)
    labels = drawn(model, batch)
    block = store.read(gk.store.CaptureKey("final", "train", "main", "sampled"))
    expected = nn.functional.cross_entropy(model(batch[0]), labels, reduction="none")
    assert np.allclose(block.column("loss"), expected.detach(), rtol=1e-5)
    assert np.array_equal(block.column("label"), labels)
    result = gk.gradients(store, split="train", name="sampled").restore(range(6))["bias"]
    one_hot = nn.functional.one_hot(labels, 3)
    assert torch.allclose(result, model(batch[0]).softmax(1) - one_hot, atol=1e-5)


def test_what_the_task_is_called_stays_as_it_was():
    assert gk.Classification().describe() == "gradkeep.Classification()"
    text = gk.Classification(labels="sampled", seed=2).describe()
    assert text == "gradkeep.Classification(labels='sampled', seed=2)"
    with pytest.raises(CaptureError, match="'true'"):
        gk.Classification(labels="true")
