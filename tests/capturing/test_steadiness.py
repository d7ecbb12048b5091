"""Models whose rows cannot be kept under an id: those with a state, at random, or across the batch."""

import numpy as np
import pytest
import torch
from raises import raises
from torch import nn

import gradkeep as gk
from gradkeep.errors import CaptureError

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
KEEPS = ["exact", "losses", "1KiB"]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0


class Counting(Base):
    def forward(self, x):
        self.seen += 1
        return self.linear(x) * (1 + 0.1 * self.seen[0])


class CountingInPython(Base):
    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


class RunningMean(Base):
    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.seen)


class Carrying(nn.Module):
    """A recurrent layer that goes on where the last batch ended."""

    def __init__(self):
        super().__init__()
        self.cells, self.linear = nn.RNN(4, 5, batch_first=True), nn.Linear(5, 3)
        self.state = None

    def forward(self, x):
        if self.state is not None and self.state.shape[1] != len(x):
            self.state = None
        result, state = self.cells(x.unsqueeze(1), self.state)
        self.state = state.detach()
        return self.linear(result[:, -1])


class Noisy(Base):
    def forward(self, x):
        return self.linear(x + 0.3 * torch.randn_like(x))


class NoisyByNumpy(Base):
    def forward(self, x):
        return self.linear(x + 0.3 * torch.from_numpy(np.random.randn(*x.shape)).float())


class Centred(Base):
    def forward(self, x):
        return self.linear(x - x.mean(0))


class Sorted(Base):
    def forward(self, x):
        return self.linear(x)[torch.argsort(x[:, 0])]


def batches(size=4):
    return list(zip(X.split(size), Y.split(size), strict=True))


def capture(folder, model, **options):
    values = {"task": gk.Classification(), "split": "train", "progress": False, **options}
    return gk.capture(gk.open(folder), model, batches(), **values)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "kind", [Counting, CountingInPython, RunningMean, Carrying, Noisy, NoisyByNumpy]
)
def test_a_model_that_is_another_one_each_time_is_refused(tmp_path, kind, keep):
    torch.manual_seed(0)
    with raises(CaptureError, "capture.not_repeatable"):
        capture(tmp_path, kind().eval(), keep=keep)
    assert gk.open(tmp_path).captures() == []


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", [Centred, Sorted])
def test_a_model_that_mixes_rows_is_refused(tmp_path, kind, keep):
    torch.manual_seed(0)
    with pytest.raises(CaptureError) as caught:
        capture(tmp_path, kind().eval(), keep=keep)
    assert caught.value.code in ("capture.samples_mix", "capture.gradients_do_not_add_up")
    assert gk.open(tmp_path).captures() == []


@pytest.mark.parametrize("method", ["dot", "kfac", "kernel"])
@pytest.mark.parametrize("kind", [RunningMean, Noisy, Centred])
def test_neither_is_asked_once(kind, method):
    torch.manual_seed(0)
    with pytest.raises(CaptureError) as caught:
        gk.attribute_once(
            kind().eval(), batches(), batches(), task=gk.Classification(), method=method
        )
    assert caught.value.code in ("capture.not_repeatable", "capture.samples_mix")


def test_a_random_model_is_kept_where_that_is_asked_for(tmp_path):
    torch.manual_seed(0)
    capture(tmp_path, Noisy(), mode="train")
    (key,) = gk.open(tmp_path).captures()
    assert len(gk.open(tmp_path).read(key)) == 24


class Harmless(Base):
    """Counts, fills a table when it first needs it, and answers the same."""

    def forward(self, x):
        self.seen += 1
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(3), persistent=False)
        return self.linear(x) * self.table


def test_buffers_are_what_they_were(tmp_path):
    torch.manual_seed(0)
    model = Harmless().eval()
    capture(tmp_path, model)
    assert model.seen.tolist() == [0, 0, 0, 0]
    assert capture(tmp_path, model).reused_rows == 24  # and it is known again
    gk.attribute_once(model, batches(), batches(), task=gk.Classification(), method="dot")
    assert model.seen.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_batches_are_taken(tmp_path, size):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    store = gk.open(tmp_path)
    gk.capture(store, model, batches(size), task=gk.Classification(), split="train", progress=False)
    (key,) = store.captures()
    assert len(store.read(key)) == 24
