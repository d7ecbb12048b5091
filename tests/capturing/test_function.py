"""Splits of one checkpoint are joined only if the same function made them, not only the same weights."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradkeep as gk
from gradkeep.capturing._resume import fingerprint_function, fingerprint_weights
from gradkeep.errors import SchemaMismatchError

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


class Squashed(Rectified):
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Configured(Rectified):
    def __init__(self, activation, **settings):
        super().__init__()
        self.config = SimpleNamespace(activation=activation, use_cache=False, **settings)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(getattr(torch, self.config.activation)(self.first(x)))


class Holding(Rectified):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def layered(activation):
    return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3))


PAIRS = {
    "modules": (lambda: layered(nn.Tanh()), lambda: layered(nn.ReLU())),
    "slopes": (lambda: layered(nn.LeakyReLU(0.1)), lambda: layered(nn.LeakyReLU(0.3))),
    "code": (Rectified, Squashed),
    "configuration": (lambda: Configured("relu"), lambda: Configured("tanh")),
    "functions": (lambda: Holding(F.relu), lambda: Holding(torch.tanh)),
}


def both_captured(store, one, other):
    weights = one.state_dict()
    other.load_state_dict(weights)
    for split, model, size in (("train", one, 4), ("test", other, 3)):
        batches = list(zip(X.split(size), Y.split(size), strict=True))
        gk.capture(store, model, batches, task=gk.Classification(), split=split, progress=False)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_splits_of_two_functions_are_not_joined(store, pair):
    one, other = (make() for make in pair)
    with pytest.raises(SchemaMismatchError, match="another function") as caught:
        both_captured(store, one, other)
    assert "checkpoints=" in caught.value.fix
    assert [key.split for key in store.captures()] == ["train"]


def test_checkpoints_recorded_without_a_function_are_captured(store):
    """As by earlier versions; what cannot be compared is not refused."""
    model = Rectified()
    store.add_checkpoint(gk.store.Checkpoint("main", "final", fingerprint_weights(model)))
    both_captured(store, model, Squashed())
    assert gk.attribute(store, method="dot").values.shape == (12, 12)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_copies_pickles_and_used_models_are_the_same_function(pair):
    for make in pair:
        model = make()
        before = fingerprint_function(model)
        assert fingerprint_function(copy.deepcopy(model)) == before
        assert fingerprint_function(pickle.loads(pickle.dumps(model))) == before
        model(X)
        assert fingerprint_function(model.double().eval().requires_grad_(False)) == before
    assert fingerprint_function(pair[0]()) != fingerprint_function(pair[1]())


def test_splits_of_one_function_are_joined(store):
    both_captured(store, Configured("relu"), Configured("relu"))
    assert gk.attribute(store, method="dot").values.shape == (12, 12)
