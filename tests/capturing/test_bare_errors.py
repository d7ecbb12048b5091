"""Captures that ended in an error of torch: they work, or say what to do."""

import pytest
import torch
from raises import raises
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.errors import CaptureError

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def capture(store, model, task, x=X, **options):
    batches = list(zip(x.split(5), Y.split(5), strict=True))
    gk.capture(store, model, batches, task=task, split="train", progress=False, **options)
    return gk.gradients(store, split="train")


def single_gradients(model, task, weight, x=X):
    rows = [task.losses(model, (x[i : i + 1], Y[i : i + 1])).sum() for i in range(len(x))]
    return torch.stack([torch.autograd.grad(loss, weight)[0].to_dense() for loss in rows])


@pytest.mark.filterwarnings("ignore::gradkeep.capturing._report.CaptureWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_of_a_half_precision_model(store, dtype):
    model, x = classifier().to(dtype), X.to(dtype)
    result = capture(store, model, gk.Classification(), x, of="loss").restore(range(12))
    wide = model.float()
    true = single_gradients(wide, gk.Classification(), wide[0].weight, x.float())
    assert torch.allclose(result["0.weight"], true, rtol=1e-4, atol=1e-6)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table((x.abs() * 3).long().clamp(max=6)).sum(1))


def test_embeddings_with_sparse_gradients(store):
    torch.manual_seed(0)
    model, task = Words(), gk.Classification()
    result = capture(store, model, task, of="loss").restore(range(12))
    true = single_gradients(model, task, model.table.weight)
    assert torch.allclose(result["table.weight"], true, rtol=1e-4, atol=1e-6)


class Penalized(gk.Task):
    """A loss with the squared gradient at the input."""

    def losses(self, model, batch):
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1], reduction="none") + slope.square().sum(1)


def test_a_task_with_a_gradient_penalty(store, tmp_path):
    model, task = classifier(), Penalized()
    result = capture(store, model, task).restore(range(12))
    for name, weight in model.named_parameters():
        true = single_gradients(model, task, weight)
        assert torch.allclose(result[name], true, rtol=1e-3, atol=1e-5), name
    losses = gk.open(tmp_path / "losses")
    batches = [(X, Y)]
    gk.capture(losses, model, batches, task=task, split="train", keep="losses", progress=False)
    (key,) = losses.captures()
    assert torch.allclose(
        torch.from_numpy(losses.read(key).column("loss")), task.losses(model, (X, Y)).detach()
    )


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_of_width_zero_is_restored(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3))
    result = capture(store, model, gk.Classification()).restore([2, 0])
    assert result["0.weight"].shape == (2, 0, 4)
    assert result["1.bias"].shape == (2, 3)


class Scaled(gk.Task):
    def losses(self, model, batch):
        return 1e-22 * F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("keep", ["exact", "1KiB"])
def test_gradients_whose_products_underflow_are_refused(store, keep):
    with raises(CaptureError, "capture.tiny_gradients", fix="Multiply the loss"):
        capture(store, classifier(), Scaled(), keep=keep)
