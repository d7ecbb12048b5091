"""The store and the small classifier that most captures here begin with."""

import pytest
import torch
from torch import nn

import gradkeep as gk


@pytest.fixture
def store(tmp_path):
    return gk.open(tmp_path / "store")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
